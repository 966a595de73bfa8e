"""A cycle decided on the host, for backends that have the passes alone; and the base of a backend around another."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Backend, Cycle, PairShape, Rows, Snapshot, Steering
from edge_dflash.decode.sampling import GREEDY, Sampling, choose


def host_cycle(
    backend: Backend,
    anchor: int,
    sampling: Sampling,
    steering: Steering | None,
    drafting: bool,
    logits: bool = False,
) -> Cycle:
    """``Backend.cycle`` by ``propose`` and ``verify``; seconds are the host's."""
    position = backend.length + 1
    began = time.perf_counter()
    drafts: list[int] = []
    if drafting:
        rows = backend.propose(anchor)
        drafts = choose(rows, sampling, position) if steering is None else steering.drafts(rows, position)
    proposed = time.perf_counter()
    rows = backend.verify([anchor, *drafts])
    choices = choose(rows, sampling, position, steering.masks(drafts) if steering is not None else None)
    tolerated = steering.tolerated(rows, drafts, choices) if steering is not None and drafts else []
    n = accepted(drafts[: len(choices) - 1], choices, tolerated)
    relaxed = tuple(draft != choice for draft, choice in zip(drafts[:n], choices, strict=False))
    propose_seconds = proposed - began if drafting else 0.0
    tokens, verify_seconds = (*drafts[:n], choices[n]), time.perf_counter() - proposed
    left = (lambda: rows.logits()[: n + 1]) if logits else None
    return Cycle(tokens, n, propose_seconds, verify_seconds, relaxed, left)


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
