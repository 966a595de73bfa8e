"""The cycle: propose, verify, accept. Speculative decoding with a DFlash drafter (arXiv 2602.06036).

Here it is decided on the host, for every backend that has the passes. A device that runs it whole in one graph
(:mod:`edge_dflash.backends.cuda.cycle`) finds the same. :mod:`edge_dflash.decode.loop` commits: an answer may end
inside the accepted drafts. A cycle without drafts is plain decoding: a verify of one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Asked, Backend, Confident, Cycle, Outcome, Rows
from edge_dflash.decode.controls import Interrupted
from edge_dflash.decode.sampling import choose
from edge_dflash.errors import RequestError


def host_cycles(backend: Backend, asked: Sequence[Asked]) -> list[Outcome]:
    """``Backend.cycles``: the cycle of each lane, whose logits are read before the next one's passes."""
    outcomes = (outcome_of(partial(backend.cycle, one)) for one in asked)
    return [one.on_host() if isinstance(one, Cycle) else one for one in outcomes]


def host_cycle(backend: Backend, asked: Asked) -> Cycle:
    """``Backend.cycle`` by its passes; seconds are the host's."""
    sampling, steering, lane = asked.sampling, asked.steering, asked.lane
    position = backend.length(lane) + 1  # of the first draft
    began = time.perf_counter()
    drafting = asked.drafting and backend.shape.drafts > 0
    drafts = drafted(asked, backend.propose(asked.anchor, lane), position) if drafting else list(asked.known)
    proposed = time.perf_counter()

    rows = backend.verify([asked.anchor, *drafts], lane)
    choices = choose(rows, sampling, position, steering.masks(drafts) if steering is not None else None)

    tolerated = steering.tolerated(rows, drafts, choices) if steering is not None and drafts else []
    n = accepted(drafts[: len(choices) - 1], choices, tolerated)
    return Cycle(
        tokens=(*drafts[:n], choices[n]),
        accepted=n,
        drafts=len(drafts),
        propose_seconds=proposed - began if drafting else 0.0,
        verify_seconds=time.perf_counter() - proposed,
        relaxed=tuple(draft != choice for draft, choice in zip(drafts[:n], choices, strict=False)),
        logits=(lambda: rows.logits()[: n + 1]) if asked.logits else None,
    )


def drafted(asked: Asked, rows: Rows, position: int) -> list[int]:
    """Drafts to verify: a propose pass's ``rows`` choose them or steering does; cut by confidence and number."""
    steering = asked.steering
    drafts = choose(rows, asked.sampling, position) if steering is None else steering.drafts(rows, position)
    if asked.threshold and isinstance(rows, Confident):
        unsure = (row for row, confidence in enumerate(rows.confidence()) if confidence < asked.threshold)
        drafts = drafts[: next(unsure, None)]
    return drafts[: asked.drafts]


def outcome_of(cycle: Callable[[], Cycle]) -> Outcome:
    """What a cycle finds, or what its lane's steering ended it with; any other error is raised."""
    try:
        return cycle()
    except (Interrupted, RequestError) as error:
        return error
