"""What benchmarks do to a native backend: force choices, count the experts that were read, time steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.memory import NULL
from edge_dflash.backends.cuda.steps import Head, Mix, Multiply, PassStep, Project, State
from edge_dflash.errors import BackendError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend

REPEATS = 5  # cycles that are timed


def force(backend: NativeBackend, accept: Sequence[int] | None) -> None:
    """Accept so many drafts a cycle, whatever the target says; None ends it. Captures graphs.

    Raises BackendError for a number of drafts that no cycle has.
    """
    most = backend.shape.drafts
    if accept is not None and not (accept and all(0 <= n <= most for n in accept)):
        raise BackendError(f"accept pattern {list(accept)} is not made of 0 to {most} drafts")
    backend.gpu.enter()
    pattern = NULL if accept is None else backend.gpu.upload(np.array(accept, np.int32))
    for each in backend.graphs.values():
        each.capture(pattern)


def force_experts(backend: NativeBackend, table: npt.NDArray[np.int32] | None) -> None:
    """Give the token at position p the experts table[p % len(table)] in every layer; None ends it.

    Captures graphs, and ends what :func:`force` began. Raises BackendError for a target without experts.
    """
    if (mixtures := backend.loaded.mixtures) is None:
        raise BackendError("the pair has no experts on this backend; none can be forced")
    backend.gpu.enter()
    mixtures.force(table)
    for each in backend.graphs.values():
        each.capture()


def experts_read(backend: NativeBackend) -> int:
    """Experts that rows of verify passes have chosen since load, all layers together."""
    backend.gpu.enter()
    backend.gpu.synchronize()
    return backend.loaded.mixtures.read if backend.loaded.mixtures else 0


@dataclass(frozen=True)
class StepTime:
    """One step of a cycle."""

    name: str  # what it is: the weights of a linear, or the op
    seconds: float  # median, a launch's latency included
    weight_bytes: int  # that it reads


def profile(backend: NativeBackend, anchor: int = 0) -> list[StepTime]:
    """Time of each step of one cycle, on the device's clock, in order; the steps do not overlap here.

    Captures a graph and runs REPEATS cycles from ``anchor``, of which it leaves an empty sequence.
    """
    gpu, loaded, graphs, rows = backend.gpu, backend.loaded, backend.graphs[1], backend.shape.verify_rows
    backend.begin_at(anchor, 0, REPEATS * rows)
    backend.host.count((rows, 0.0))
    steps: list[PassStep] = []
    count = sum(len(loaded.passes[name].schedule.steps) for name in ("propose", "verify")) + 1
    stamps = gpu.allocate(8 * count)

    def around(step: PassStep | None) -> None:
        loaded.common.kernels.cycle.stamp(stamps.at(8 * len(steps), 8))
        if step is not None:
            steps.append(step)

    graph = gpu.capture(lambda: graphs.enqueue_cycle(rows, around=around))
    readings, mixtures = [], loaded.mixtures
    before = mixtures.read if mixtures else 0
    for _ in range(REPEATS):
        graph.launch()
        readings.append(np.diff(gpu.read(stamps, (count,), np.uint64).astype(np.int64)))
    times = [median(values) * 1e-9 for values in zip(*(r.tolist() for r in readings), strict=True)]
    experts = (mixtures.read - before) / REPEATS / mixtures.layers if mixtures else 0.0
    backend.reset()
    return [_timed(step, seconds, experts) for step, seconds in zip(steps, times, strict=True)]


def _timed(step: PassStep, seconds: float, experts: float) -> StepTime:
    """``experts``: read by a layer, on average."""
    match step:
        case Mix():
            each, router = step.up.layout.nbytes + step.down.layout.nbytes, 2 * step.up.layout.k * step.up.experts
            return StepTime(step.label, seconds, round((experts + step.up.parts) * each) + router)
        case Multiply() | Project() | Head():
            side = step.side.layout.nbytes if isinstance(step, Multiply) and step.side else 0
            stack = step.stack
            return StepTime(f"{stack.names[0]} {stack.layout.format}", seconds, stack.layout.nbytes + side)
        case State():
            return StepTime(f"{type(step.op).__name__} {step.op.state}", seconds, 0)
        case _:
            return StepTime(step.label, seconds, 0)
