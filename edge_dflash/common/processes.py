"""Work whose time and memory must be bounded: other interpreters of this program, and patterns matched in one.

Python's matcher of regular expressions takes exponential time for some patterns, and holds the interpreter meanwhile:
no other thread can stop it. Those of a quantization config are few and needed once, so another interpreter matches them
all, within bounds of time and of memory. It costs about 60 ms.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import sys
from collections.abc import Iterator, Sequence


def command(module: str, *arguments: object) -> list[str]:
    """What starts an interpreter that imports what this one does, and calls ``main`` of ``module`` with literals."""
    call = f"main({', '.join(map(repr, arguments))})"
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; {call}"]


def limit_memory(nbytes: int) -> None:
    """Bound the address space of this process: beyond it allocations fail. It leaves no core file."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    nbytes = nbytes if most == resource.RLIM_INFINITY else min(nbytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def obey_timers() -> None:
    """Let SIGPROF end this process, which whoever started it may have blocked."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Die by SIGPROF when the work inside takes more processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


PATTERN_SECONDS = 5.0  # for all patterns of a config; published ones need a thousandth
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
    import subprocess  # here, because a grammar's process imports this module, and little else

    patterns = list(dict.fromkeys(patterns))
    if not patterns:
        return {}
    try:
        done = subprocess.run(
            command(__name__),
            input=json.dumps([patterns, list(names)]).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATTERN_SECONDS,
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
        why = f"matches in {PATTERN_SECONDS:g} s" if late else "matches in 1 GiB"
        raise ValueError(patterns[len(found)], f"a pattern that {why}; write it without nested repeats")
    return found
