"""Running everything once behind loading, so that no first cycle pays for loading code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_dflash.decode.backend import Asked
from edge_dflash.decode.sampling import Sampling, choose

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend


def warm_up(backend: NativeBackend) -> None:
    """Run every graph of a backend; it is left empty."""
    shape = backend.shape
    if shape.max_context >= 3 * shape.verify_rows:
        backend.prefill([0])
        if shape.drafts:
            choose(backend.propose(0), Sampling(1.0), 0)
        for rows in backend.graphs.verify.graphs:
            backend.verify([0] * rows)
            backend.cycle(Asked(0, drafts=rows - 1))
            backend.cycle(Asked(0, Sampling(1.0, top_k=1), drafts=rows - 1))
        backend.cycle(Asked(0, Sampling(1.0, top_p=0.5), drafts=0))
        backend.commit(1)
        backend.flush()
        choose(backend.verify([0]), Sampling(1.0), 0)
    backend.reset()
    backend.gpu.synchronize()
