"""Run as a program: build a pair again and again, killing each attempt with SIGKILL, until one comes through.

Arguments: target, drafter, output, kills, seed, perhaps a recipe. Prints how many attempts were killed. No killed
attempt may leave an output that is not a whole bundle.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch

from edge_dflash.builder import record
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle import parts
from edge_dflash.bundle.reader import Bundle

EVENTS = ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir")


def attempt(config, die_at):
    """Build in a child that kills itself before the given file operation, or in the middle of that write."""
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    torch.set_num_threads(1)
    record.NEW_TOKENS = 16  # as in tests/conftest.py
    left = [die_at]

    def count(event="write", args=()):
        if event == "write" or (event in EVENTS and ".building" in str(args[0])):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(file, data):
        file.write(data[: len(data) // 2])
        file.flush()
        count()
        file.write(data[len(data) // 2 :])

    if die_at:
        parts.write_bytes = write
        sys.addaudithook(count)
    try:
        build(config)
    except BaseException as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)


def main():
    target, drafter, output = map(Path, sys.argv[1:4])
    kills, seed = map(int, sys.argv[4:6])
    recipe = Path(sys.argv[6]) if sys.argv[6:] else None
    config, chance, done = BuildConfig(target, drafter, output, recipe=recipe), random.Random(seed), 0
    while not output.exists():
        status = attempt(config, chance.randint(1, 90) if done < kills else 0)
        if os.WIFSIGNALED(status):
            done += 1
        elif status:
            sys.exit(f"attempt {done + 1} ended with {status}")
    Bundle.open(output)
    print(done)


if __name__ == "__main__":
    main()
