"""Pictures as the chunks of a prompt need them: their rows are kept in memory, or made by the vision tower."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.decode.backend import Backend
from edge_dflash.decode.store import Budgeted
from edge_dflash.pictures.pictured import Pictured, Placed, Seen, Sight

SEEN_BYTES = 256 << 20
"""Budget of a backend's pictures."""


@dataclass(frozen=True, kw_only=True)
class SeenStats:
    """What a store of pictures holds and how it served."""

    entries: int
    bytes: int  # of the rows, on the backend's side
    budget: int  # bytes
    hits: int  # pictures of prompts whose rows were there
    misses: int  # those for which the tower ran
    evicted: int  # entries dropped for newer ones


class SeenStore(Budgeted[object, Seen]):
    """Rows that the vision tower has made, by picture."""

    def __init__(self, budget: int = SEEN_BYTES) -> None:
        """Hold at most ``budget`` bytes; 0 stores nothing."""
        super().__init__(budget)
        self.failure: BaseException | None = None  # of the last pass of the tower

    def get(self, placed: Placed) -> Seen | None:
        """Rows of a picture, or None; a hit is counted."""
        with self._lock:
            if (seen := self._entries.get(placed.key)) is not None:
                self._entries.move_to_end(placed.key)
                self._hits += 1
            return seen

    def make(self, placed: Placed, backend: Backend) -> Seen:
        """Run the tower over a picture, and keep its rows unless they exceed the budget; a miss is counted."""
        try:
            seen = backend.see(placed.picture)
        except BaseException as error:
            self.failure = error
            raise
        with self._lock:
            self._misses += 1
            self._keep(placed.key, seen, seen.nbytes)
        return seen

    def __contains__(self, placed: Placed) -> bool:
        with self._lock:
            return placed.key in self._entries

    @property
    def stats(self) -> SeenStats:
        """Figures of this moment."""
        with self._lock:
            return SeenStats(**self._figures())


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
        self._held[placed.at] = self._store.make(placed, self._backend)

    def left(self, first: int) -> int:
        """Rows of pictures after row ``first`` for which the tower has to run."""
        pictures = self._sequence.within(first, len(self._sequence.ids))
        unseen = {one.key: one for one in pictures if one.at not in self._held and one not in self._store}
        return sum(one.picture.tokens for one in unseen.values())

    def sight(self, first: int, stop: int) -> Sight | None:
        """What these rows show of pictures, all of which were seen; those that end in them are let go."""
        sight = self._sequence.sight(first, stop, lambda placed: self._held[placed.at])
        for placed in self._sequence.within(first, stop):
            if placed.end <= stop:
                del self._held[placed.at]
        return sight
