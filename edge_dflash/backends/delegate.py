"""A backend in front of another: the base of everything that watches or replaces single calls."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.backends.host_cycle import host_cycle
from edge_dflash.decode.backend import Backend, Cycle, PairShape, Rows, Snapshot, Steering
from edge_dflash.decode.sampling import GREEDY, Sampling


class Delegate:
    """A backend that passes every call on to another; subclasses replace some of them."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        return self._backend.shape

    @property
    def length(self) -> int:
        """Number of committed rows."""
        return self._backend.length

    def reset(self) -> None:
        """Forget the sequence."""
        self._backend.reset()

    def prefill(self, ids: Sequence[int]) -> Rows:
        """See Backend."""
        return self._backend.prefill(ids)

    def cycle(
        self,
        anchor: int,
        sampling: Sampling = GREEDY,
        *,
        steering: Steering | None = None,
        drafting: bool = True,
        logits: bool = False,
    ) -> Cycle:
        """See Backend. Made of this backend's own passes, so that a subclass may replace one."""
        return host_cycle(self, anchor, sampling, steering, drafting, logits)

    def propose(self, anchor: int) -> Rows:
        """See Backend."""
        return self._backend.propose(anchor)

    def verify(self, ids: Sequence[int]) -> Rows:
        """See Backend."""
        return self._backend.verify(ids)

    def commit(self, rows: int) -> None:
        """See Backend."""
        self._backend.commit(rows)

    def flush(self) -> None:
        """See Backend."""
        self._backend.flush()

    def snapshot(self) -> Snapshot:
        """See Backend."""
        return self._backend.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """See Backend."""
        self._backend.restore(snapshot)

    def close(self) -> None:
        """See Backend."""
        self._backend.close()
