"""A cycle decided on the host, for backends that have the passes alone; and the base of a backend around another."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Asked, Backend, Confident, Cycle, Outcome, PairShape, Rows, Snapshot
from edge_dflash.decode.controls import Interrupted
from edge_dflash.decode.pictured import Picture, Seen, Sight
from edge_dflash.decode.sampling import choose
from edge_dflash.decode.walk import confident
from edge_dflash.errors import RequestError


def host_cycle(backend: Backend, asked: Asked) -> Cycle:
    """``Backend.cycle`` by ``propose`` and ``verify``; seconds are the host's."""
    sampling, steering, lane = asked.sampling, asked.steering, asked.lane
    position = backend.length(lane) + 1
    began = time.perf_counter()
    drafts: list[int] = []
    drafting = asked.drafting and backend.shape.drafts > 0
    if drafting:
        rows = backend.propose(asked.anchor, lane)
        drafts = choose(rows, sampling, position) if steering is None else steering.drafts(rows, position)
        if asked.threshold and isinstance(rows, Confident):
            drafts = drafts[: confident(rows.confidence(), asked.threshold)]
        drafts = drafts[: asked.drafts]
    proposed = time.perf_counter()
    rows = backend.verify([asked.anchor, *drafts], lane)
    choices = choose(rows, sampling, position, steering.masks(drafts) if steering is not None else None)
    tolerated = steering.tolerated(rows, drafts, choices) if steering is not None and drafts else []
    n = accepted(drafts[: len(choices) - 1], choices, tolerated)
    relaxed = tuple(draft != choice for draft, choice in zip(drafts[:n], choices, strict=False))
    propose_seconds = proposed - began if drafting else 0.0
    tokens, verify_seconds = (*drafts[:n], choices[n]), time.perf_counter() - proposed
    left = (lambda: rows.logits()[: n + 1]) if asked.logits else None
    return Cycle(tokens, n, len(drafts), propose_seconds, verify_seconds, relaxed, left)


def host_cycles(backend: Backend, asked: Sequence[Asked]) -> list[Outcome]:
    """``Backend.cycles`` by ``cycle``, lane by lane."""
    found: list[Outcome] = []
    for one in asked:
        try:
            found.append(backend.cycle(one))
        except (Interrupted, RequestError) as error:
            found.append(error)
    return found


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
