"""A backend in front of another: the base of everything that watches or replaces single calls."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.backends.host_cycle import host_cycle
from edge_dflash.decode.backend import Asked, Backend, Cycle, PairShape, Rows, Snapshot


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

    def prefill(self, ids: Sequence[int], lane: int = 0) -> Rows:
        """See Backend."""
        return self._backend.prefill(ids, lane)

    def cycle(self, asked: Asked) -> Cycle:
        """See Backend. Made of this backend's own passes, so that a subclass may replace one."""
        return host_cycle(self, asked)

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """See Backend."""
        return self._backend.propose(anchor, lane)

    def verify(self, ids: Sequence[int], lane: int = 0) -> Rows:
        """See Backend."""
        return self._backend.verify(ids, lane)

    def commit(self, rows: int, lane: int = 0) -> None:
        """See Backend."""
        self._backend.commit(rows, lane)

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
