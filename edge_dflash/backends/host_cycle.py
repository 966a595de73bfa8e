"""A cycle decided on the host: for backends that have the passes alone, and for what no device decides."""

from __future__ import annotations

import time

from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Asked, Backend, Cycle
from edge_dflash.decode.sampling import choose


def host_cycle(backend: Backend, asked: Asked) -> Cycle:
    """``Backend.cycle`` by ``propose`` and ``verify``; seconds are the host's."""
    sampling, steering, lane = asked.sampling, asked.steering, asked.lane
    position = backend.length(lane) + 1
    began = time.perf_counter()
    drafts: list[int] = []
    if asked.drafting:
        rows = backend.propose(asked.anchor, lane)
        drafts = choose(rows, sampling, position) if steering is None else steering.drafts(rows, position)
    proposed = time.perf_counter()
    rows = backend.verify([asked.anchor, *drafts], lane)
    choices = choose(rows, sampling, position, steering.masks(drafts) if steering is not None else None)
    tolerated = steering.tolerated(rows, drafts, choices) if steering is not None and drafts else []
    n = accepted(drafts[: len(choices) - 1], choices, tolerated)
    relaxed = tuple(draft != choice for draft, choice in zip(drafts[:n], choices, strict=False))
    propose_seconds = proposed - began if asked.drafting else 0.0
    tokens, verify_seconds = (*drafts[:n], choices[n]), time.perf_counter() - proposed
    left = (lambda: rows.logits()[: n + 1]) if asked.logits else None
    return Cycle(tokens, n, propose_seconds, verify_seconds, relaxed, left)
