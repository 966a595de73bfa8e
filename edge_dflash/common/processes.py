"""Work whose time and memory must be bounded: other interpreters of this program."""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Iterator


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
