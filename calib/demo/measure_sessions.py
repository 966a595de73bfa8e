"""Figures of long use of a bundle: a conversation that is killed, forked and cancelled, and many callers at once.

``python -m calib.demo.measure_sessions BUNDLE [--turns 50] [--callers 10] [--seconds 60]`` prints one JSON object
on the last line. The broken conversation runs in child processes that kill themselves between turns; it must give the
tokens and accept lengths of an unbroken one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from edge_dflash.planner import Planner
from edge_dflash.result import Plan
from edge_dflash.session import PlannerSession

NEW_TOKENS = 8  # a turn: 50 of them fit the demo's context
TEXTS = ("Go on.", "Wait.", "The door is locked.", "Take the mug.", "Stop.")
TURNS_OF_A_LIFE = 6  # between two kills

Turn = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, accept lengths


def text_of(turn: int) -> str:
    """What the user says in a turn."""
    return TEXTS[turn % len(TEXTS)]


def unbroken(bundle: Path, turns: int) -> list[Turn]:
    """The conversation in one go."""
    with (
        Planner.open(bundle, self_test="off", fallback=False) as planner,
        planner.session("You are a robot.") as session,
    ):
        return [_said(session.plan(text_of(turn), max_new_tokens=NEW_TOKENS)) for turn in range(turns)]


def live(bundle: Path, saved: Path, log: Path, turns: int) -> None:
    """One life: take the conversation up, play some turns with forks and cancels beside it, save each, die."""
    with Planner.open(bundle, self_test="off", fallback=False) as planner:
        session = planner.load_session(saved) if saved.exists() else planner.session("You are a robot.")
        first = len(log.read_text().splitlines()) if log.exists() else 0
        for turn in range(first, min(first + TURNS_OF_A_LIFE, turns)):
            if turn % 3 == 1:
                _cancelled_aside(session)
            tokens, lengths = _said(session.plan(text_of(turn), max_new_tokens=NEW_TOKENS))
            began = time.perf_counter()
            size = session.save(saved)
            seconds = time.perf_counter() - began
            with log.open("a") as file:
                file.write(json.dumps([tokens, lengths, size, seconds]) + "\n")
        os.kill(os.getpid(), signal.SIGKILL)


def _cancelled_aside(session: PlannerSession) -> None:
    """A fork that is asked something else and cancelled in the middle of its answer."""
    with session.fork() as other, other.stream("And now?", max_new_tokens=64) as stream:
        next(stream)
        stream.cancel()


def _said(plan: Plan) -> Turn:
    return plan.tokens, plan.accept_lengths


def conversation(bundle: Path, turns: int) -> dict[str, Any]:
    """Compare the broken conversation with the unbroken one."""
    expected = unbroken(bundle, turns)
    kills = 0
    with tempfile.TemporaryDirectory() as directory:
        saved, log = Path(directory) / "session", Path(directory) / "log"
        while not log.exists() or len(log.read_text().splitlines()) < turns:
            command = [sys.executable, "-m", "calib.demo.measure_sessions", str(bundle), "--live", directory]
            done = subprocess.run([*command, "--turns", str(turns)], check=False)
            if done.returncode != -signal.SIGKILL:
                raise SystemExit(f"a life ended with {done.returncode} instead of being killed")
            kills += 1
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        leftovers = sorted(path.name for path in Path(directory).iterdir() if path not in (saved, log))
    got = [(tuple(tokens), tuple(lengths)) for tokens, lengths, _, _ in rows]
    return {
        "turns": len(got),
        "kills": kills,
        "tokens_equal": [t for t, _ in got] == [t for t, _ in expected],
        "accept_lengths_equal": [a for _, a in got] == [a for _, a in expected],
        "last_save_bytes": rows[-1][2],
        "save_ms_median": 1e3 * statistics.median(row[3] for row in rows),
        "files_left_over": leftovers,
    }


def callers(bundle: Path, count: int, seconds: float) -> dict[str, Any]:
    """``count`` threads ask for ``seconds``; every answer must be the one that the same question gets alone."""
    tasks = [f"{text_of(i)} Caller {i}." for i in range(count)]
    with Planner.open(bundle, self_test="off", queue=2 * count) as planner:
        expected = [planner.plan(task, max_new_tokens=NEW_TOKENS).tokens for task in tasks]
        answers, wrong, errors, waits = [0] * count, [0] * count, [0] * count, [0.0] * count
        end = time.monotonic() + seconds

        def call(i: int) -> None:
            while time.monotonic() < end:
                began = time.monotonic()
                try:
                    plan = planner.plan(tasks[i], max_new_tokens=NEW_TOKENS, caller=str(i))
                except Exception:
                    errors[i] += 1
                    raise
                waits[i] = max(waits[i], time.monotonic() - began)
                answers[i] += 1
                wrong[i] += plan.tokens != expected[i]

        threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {
        "callers": count,
        "seconds": seconds,
        "answers": sum(answers),
        "answers_of_a_caller": [min(answers), max(answers)],
        "wrong": sum(wrong),
        "errors": sum(errors),
        "longest_wait_seconds": max(waits),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--callers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--live", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.live is not None:
        live(given.bundle, given.live / "session", given.live / "log", given.turns)
    figures = {
        "conversation": conversation(given.bundle, given.turns),
        "callers": callers(given.bundle, given.callers, given.seconds),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
