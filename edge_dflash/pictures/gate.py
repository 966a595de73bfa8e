"""A bound on the memory of pictures that are being read: bytes in flight, over all requests of a planner.

Callers are let in in the order of their coming, so that a large picture is not passed over for ever by small ones.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PIXEL_BYTES = 16
"""Most that a pixel takes while it is decoded and resized: a progressive JPEG's coefficients and planes take 12."""
TEXT_BYTES = 8 << 20
"""Most that a compressed text of a PNG file takes: the decoder reads up to a megabyte of each, twice."""
_SLICE = 0.05  # seconds between two looks at a caller's deadline


def in_flight(pixels: int) -> int:
    """Bytes that pictures may have in flight where a request may have so many pixels."""
    return PIXEL_BYTES * pixels


class Gate:
    """Lets callers in while the bytes that they hold together fit ``budget``. Used from any thread."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held = 0
        self._waiting: deque[object] = deque()  # the first comes next
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes in flight now."""
        return self._held

    @contextmanager
    def hold(self, size: int, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold ``size`` bytes, at most the budget, when those before have let go.

        ``check`` is asked before that, again and again; what it raises ends the waiting.
        """
        size, mine = min(size, self.budget), object()
        check()
        with self._changed:
            self._waiting.append(mine)
            try:
                while self._waiting[0] is not mine or self._held + size > self.budget:
                    self._changed.wait(_SLICE)
                    check()
                self._held += size
            finally:
                self._waiting.remove(mine)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
