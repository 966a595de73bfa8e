"""Backends that wait or take their time, for tests of the planner."""

from __future__ import annotations

import threading
import time

from fakes import FakeBackend

from edge_dflash.decode.delegate import Delegate


class Gate(Delegate):
    """Every pass but ``free`` first ones waits until ``open`` is set."""

    def __init__(self, backend=None, free=0):
        self.backend = backend or FakeBackend()
        super().__init__(self.backend)
        self.open = threading.Event()
        self.reached = threading.Event()
        self.free = free

    def _wait(self):
        if self.free > 0:
            self.free -= 1
            return
        self.reached.set()
        assert self.open.wait(60)

    def prefill(self, ids, lane=0, sight=None):
        self._wait()
        return super().prefill(ids, lane, sight)

    def verify(self, ids, lane=0, parents=None):
        self._wait()
        return super().verify(ids, lane)


class Slow(Delegate):
    """Each verify takes ``seconds``."""

    def __init__(self, backend, seconds):
        super().__init__(backend)
        self.seconds = seconds

    def verify(self, ids, lane=0, parents=None):
        time.sleep(self.seconds)
        return super().verify(ids, lane)
