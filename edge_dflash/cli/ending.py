"""Signals that end a command: it unwinds as after Ctrl-C, so that what is temporary goes and what is finished stays."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is Python's own KeyboardInterrupt
TWICE_SECONDS = 1.0  # within which a signal that comes again is the same one: timeout(1) sends it twice


class EndedError(KeyboardInterrupt):
    """A signal asked the process to end."""


class EndSignals:
    """What came, and how the process ends by it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._came = -TWICE_SECONDS

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler: raises in the main thread, between any two instructions."""
        now, before = time.monotonic(), self._came
        self.signal = self.signal or number
        if now - before >= TWICE_SECONDS:
            self._came = now
            raise EndedError

    def leave(self) -> None:
        """Die of the signal that came, as whoever sent it expects; without one return."""
        if self.signal is not None:
            sys.stdout.flush()
            signal.signal(self.signal, signal.SIG_DFL)
            os.kill(os.getpid(), self.signal)


@contextmanager
def ending() -> Iterator[EndSignals]:
    """Let SIGNALS raise inside. One that is ignored (nohup) stays so."""
    handler, ours = EndSignals(), []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield handler
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
