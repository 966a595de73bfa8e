"""Regular expressions that come with a checkpoint, matched in a process that can be stopped.

Python's matcher takes exponential time for some patterns, and holds the interpreter meanwhile: no other thread can stop
it. The patterns of a quantization config are few and needed once, so another interpreter matches them all, within
bounds of time and of memory. It costs about 60 ms.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from edge_dflash.common.interpreter import command, limit_memory

SECONDS = 5.0  # for all patterns of a config; published ones need a thousandth
_MEMORY = 1 << 30  # bytes of address space, the interpreter's included


def main() -> None:
    """What the other interpreter does: a line of JSON for each pattern, with indices of names or what is wrong."""
    limit_memory(_MEMORY)
    patterns, names = json.load(sys.stdin)
    found: list[int] | str
    for pattern in patterns:
        try:
            match = re.compile(pattern).match
            found = [index for index, name in enumerate(names) if match(name)]
        except Exception as error:
            found = (str(error) or type(error).__name__)[:200]
        print(json.dumps(found), flush=True)


def matching(patterns: Sequence[str], names: Sequence[str]) -> dict[str, frozenset[str]]:
    """The names whose beginning each pattern matches, as :func:`re.match` does.

    Raises ValueError(pattern, wanted) for one that is no pattern, or takes too long.
    """
    patterns = list(dict.fromkeys(patterns))
    if not patterns:
        return {}
    try:
        done = subprocess.run(
            command("edge_dflash.weights.patterns"),
            input=json.dumps([patterns, list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
        output, late = done.stdout, False
    except subprocess.TimeoutExpired as error:
        output, late = error.stdout or b"", True
    lines = output.splitlines()
    found: dict[str, frozenset[str]] = {}
    for pattern, line in zip(patterns, lines, strict=False):
        value = json.loads(line)
        if isinstance(value, str):
            raise ValueError(pattern, f"a valid pattern ({value})")
        found[pattern] = frozenset(names[index] for index in value)
    if len(found) < len(patterns):
        why = f"matches in {SECONDS:g} s" if late else "matches in 1 GiB"
        raise ValueError(patterns[len(found)], f"a pattern that {why}; write it without nested repeats")
    return found
