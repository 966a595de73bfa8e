"""A backend around another one: what measures or records a backend wraps it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome, Rows, Snapshot
from edge_dflash.decode.cycle import host_cycle, host_cycles
from edge_dflash.decode.shape import PairShape
from edge_dflash.decode.tree import Parents
from edge_dflash.pictures.pictured import Picture, Seen, Sight


class Delegate:
    """A backend that passes every call on to another; subclasses replace some of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._backend.shape

    def length(self, lane: int = 0) -> int:
        """Number of committed rows."""
        return self._backend.length(lane)

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""
        self._backend.reset(lane)

    def see(self, picture: Picture) -> Seen:
        """See Backend."""
        return self._backend.see(picture)

    def prefill(self, ids: Sequence[int], lane: int = 0, sight: Sight | None = None) -> Rows:
        """See Backend."""
        return self._backend.prefill(ids, lane, sight)

    def cycle(self, asked: Asked) -> Cycle:
        """See Backend. Made of this backend's own passes, so that a subclass may replace one."""
        return host_cycle(self, asked)

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """See Backend. Made of this backend's own cycles."""
        return host_cycles(self, asked)

    def copy(self, source: int, target: int) -> None:
        """See Backend."""
        self._backend.copy(source, target)

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """See Backend."""
        return self._backend.propose(anchor, lane)

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> Rows:
        """See Backend."""
        return self._backend.verify(ids, lane, parents)

    def commit(self, rows: int, lane: int = 0, path: Sequence[int] | None = None) -> None:
        """See Backend."""
        self._backend.commit(rows, lane, path)

    def flush(self, lane: int = 0) -> None:
        """See Backend."""
        self._backend.flush(lane)

    def snapshot(self, lane: int = 0) -> Snapshot:
        """See Backend."""
        return self._backend.snapshot(lane)

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """See Backend."""
        self._backend.restore(snapshot, lane)

    def close(self) -> None:
        """See Backend."""
        self._backend.close()
