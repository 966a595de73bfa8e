"""Running everything once after loading, so that no first cycle pays for loading code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_dflash.decode.backend import Asked, Rows
from edge_dflash.decode.sampling import GREEDY, Packed, Sampling, choose

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend


def warm_up(backend: NativeBackend) -> None:
    """Run every graph of a backend; it is left empty."""
    shape = backend.shape
    if shape.max_context >= 3 * shape.verify_rows:
        backend.prefill([0])
        if shape.drafts:
            choose(backend.propose(0), Sampling(1.0), 0)
        for rows in backend.graphs[1].verify.graphs:
            backend.verify([0] * rows)
            backend.cycle(Asked(0, drafts=rows - 1))
            backend.cycle(Asked(0, Sampling(1.0, top_k=1), drafts=rows - 1))
        backend.cycle(Asked(0, Sampling(1.0, top_p=0.5), drafts=0))
        backend.commit(1)
        backend.flush()
        choose(backend.verify([0]), Sampling(1.0), 0)
        joint = [
            (slots, rows - 1) for slots, each in backend.graphs.items() if slots > 1 for rows in each.verify.graphs
        ]
        for slots, drafts in joint:  # greedy and sampled, in one graph and in separate passes
            for sampling in (GREEDY, Sampling(1.0, top_p=0.5)):
                for steering in (None, _Drafts(drafts)):
                    backend.cycles([Asked(0, sampling, steering, drafts, lane=lane) for lane in range(slots)])
    for lane in range(shape.lanes):
        backend.reset(lane)
    backend.gpu.synchronize()


class _Drafts:
    """Steering that has all drafts and masks ready."""

    tolerant = False

    def __init__(self, count: int) -> None:
        self._count = count

    def drafts(self, rows: Rows, position: int) -> list[int]:
        return [0] * self._count

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        return [None] * (len(drafts) + 1)

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        return []
