"""Rows of pictures that the vision tower has made: kept for the next request that shows the same picture.

A chunk of a prompt gets its rows here. Rows that were kept and rows that are made again are equal bit for bit, so a
picture that was dropped costs a pass of the tower and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from edge_dflash.decode.backend import Backend
from edge_dflash.decode.pictured import Pictured, Placed, Seen, Sight

SEEN_BYTES = 256 << 20
"""Budget of a backend's pictures."""


@dataclass(frozen=True)
class SeenStats:
    """What a store of pictures holds and how it served."""

    entries: int
    bytes: int  # of the rows, on the backend's side
    budget: int  # bytes
    hits: int  # pictures of prompts whose rows were there
    misses: int  # those for which the tower ran
    evicted: int  # entries dropped for newer ones


class SeenStore:
    """Rows by picture; the least recently used go when the budget is short. Stats may be read from any thread."""

    def __init__(self, budget: int = SEEN_BYTES) -> None:
        """Hold at most ``budget`` bytes; 0 stores nothing."""
        if budget < 0:
            raise ValueError(f"the budget is {budget} bytes, wanted 0 or more")
        self.budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[object, Seen] = OrderedDict()  # least recently used first
        self._open = False
        self._bytes = self._hits = self._misses = self._evicted = 0

    def begin(self) -> None:
        """The tower runs: it has failed until :meth:`put` follows."""
        self._open = True

    def failed(self) -> bool:
        """Whether the tower failed since this was asked last."""
        failed, self._open = self._open, False
        return failed

    def get(self, placed: Placed) -> Seen | None:
        """Rows of a picture, or None; a hit is counted."""
        with self._lock:
            if (seen := self._entries.get(placed.key)) is not None:
                self._entries.move_to_end(placed.key)
                self._hits += 1
            return seen

    def put(self, placed: Placed, seen: Seen) -> None:
        """Keep rows that the tower made, unless they are larger than the budget; a miss is counted."""
        with self._lock:
            self._open = False
            self._misses += 1
            if placed.key in self._entries or seen.nbytes > self.budget:
                return
            while self._bytes + seen.nbytes > self.budget:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= oldest.nbytes
                self._evicted += 1
            self._entries[placed.key] = seen
            self._bytes += seen.nbytes

    def __contains__(self, placed: Placed) -> bool:
        with self._lock:
            return placed.key in self._entries

    @property
    def stats(self) -> SeenStats:
        """Figures of this moment."""
        with self._lock:
            return SeenStats(
                entries=len(self._entries),
                bytes=self._bytes,
                budget=self.budget,
                hits=self._hits,
                misses=self._misses,
                evicted=self._evicted,
            )


class Gaze:
    """The pictures of one sequence, seen as its chunks need them."""

    def __init__(self, sequence: Pictured, backend: Backend, store: SeenStore) -> None:
        self._sequence, self._backend, self._store = sequence, backend, store
        self._held: dict[int, Seen] = {}  # by where the picture begins; of the next chunk

    def unseen(self, first: int, stop: int) -> Placed | None:
        """A picture of the rows ``first``, ..., ``stop`` - 1 for which the tower has to run; None: all are there."""
        for placed in self._sequence.within(first, stop):
            if placed.at not in self._held:
                if (seen := self._store.get(placed)) is None:
                    return placed
                self._held[placed.at] = seen
        return None

    def see(self, placed: Placed) -> None:
        """Run the tower over a picture."""
        self._store.begin()
        self._held[placed.at] = seen = self._backend.see(placed.picture)
        self._store.put(placed, seen)

    def left(self, first: int) -> int:
        """Rows of pictures behind row ``first`` for which the tower has to run."""
        pictures = self._sequence.within(first, len(self._sequence.ids))
        unseen = {one.key: one for one in pictures if one.at not in self._held and one not in self._store}
        return sum(one.picture.tokens for one in unseen.values())

    def sight(self, first: int, stop: int) -> Sight | None:
        """What these rows have of pictures, all of which are there; those that end in them are let go."""
        sight = self._sequence.sight(first, stop, lambda placed: self._held[placed.at])
        for placed in self._sequence.within(first, stop):
            if placed.end <= stop:
                del self._held[placed.at]
        return sight
