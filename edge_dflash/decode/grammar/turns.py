"""Who may compile now: a few at the same time, and no caller takes all the places."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from edge_dflash.decode.controls import Patience

SLICE = 0.02  # seconds between two looks at whether somebody still waits


class Turns:
    """``places`` in all, ``share`` of them for each caller."""

    def __init__(self, places: int, share: int) -> None:
        self._places, self._share = places, share
        self._taken: Counter[str] = Counter()
        self._changed = threading.Condition()

    @contextmanager
    def place(self, caller: str, patience: Patience) -> Iterator[None]:
        """Hold a place, once there is one. Raises Interrupted when ``patience`` is over before."""
        with self._changed:
            while self._taken.total() >= self._places or self._taken[caller] >= self._share:
                patience.check()
                self._changed.wait(SLICE)
            self._taken[caller] += 1
        try:
            yield
        finally:
            with self._changed:
                self._taken[caller] -= 1
                self._changed.notify_all()
