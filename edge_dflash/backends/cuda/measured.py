"""What benchmarks ask of a native backend: forced choices, the experts that were read, times of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import Capture, Cycles, Graphs, HostBuffers, JointGraphs
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.states import Lane
from edge_dflash.backends.cuda.steps import Head, Mix, Multiply, PassStep, Project, State
from edge_dflash.decode.backend import PairShape
from edge_dflash.errors import BackendError

REPEATS = 5  # cycles that are timed


class Measured(ABC):
    """The part of :class:`~edge_dflash.backends.cuda.backend.NativeBackend` that serves benchmarks alone."""

    gpu: Gpu
    loaded: Loaded
    graphs: Graphs
    _shape: PairShape
    _host: HostBuffers
    _capture: Capture
    _cycles: Cycles
    _own_cycles: Cycles
    _joint: Mapping[int, JointGraphs]

    def force(self, accept: Sequence[int] | None) -> None:
        """Benchmarks: accept so many drafts a cycle, whatever the target says; None ends it. Captures graphs."""
        self.gpu.enter()
        self._cycles = self._own_cycles
        for graphs in self._joint.values():
            graphs.cycles = graphs.own
        if accept is None:
            return
        if not accept or not all(0 <= n <= self._shape.drafts for n in accept):
            raise BackendError(f"accept pattern {list(accept)} is not made of 0 to {self._shape.drafts} drafts")
        pattern = self.gpu.upload(np.array(accept, np.int32))
        self._cycles = self._capture.cycles(pattern)
        for graphs in self._joint.values():
            graphs.cycles = graphs.capture.cycles(pattern)

    def profile(self, anchor: int = 0) -> list[StepTime]:
        """Time of each step of one cycle, on the device's clock; the steps do not overlap here.

        Captures a graph and runs REPEATS cycles from ``anchor``, of which it leaves an empty sequence.
        """
        self._begin_at(anchor, 0, REPEATS * self._shape.verify_rows)
        self._host.count((self._shape.verify_rows, 0.0))
        times = profile_cycle(self.gpu, self.loaded, self._capture)
        self.reset()
        return times

    def force_experts(self, table: npt.NDArray[np.int32] | None) -> None:
        """Benchmarks: the token at position p takes experts table[p % len(table)] in every layer; None ends it.

        Captures graphs, and ends what :meth:`force` began. Raises BackendError for a target without experts.
        """
        if (mixtures := self.loaded.mixtures) is None:
            raise BackendError("the pair has no experts on this backend; none can be forced")
        self.gpu.enter()
        mixtures.force(table)
        self.graphs, self._own_cycles = self._capture.passes(), self._capture.cycles()
        self._cycles = self._own_cycles
        for graphs in self._joint.values():
            graphs.make()

    def experts_read(self) -> int:
        """Benchmarks: experts that rows of verify passes have chosen since load, all layers together."""
        self.gpu.enter()
        self.gpu.synchronize()
        return self.loaded.mixtures.read if self.loaded.mixtures else 0

    @abstractmethod
    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""

    @abstractmethod
    def _begin_at(self, anchor: int, lane: int, rows: int) -> Lane:
        """A new pass that drafts from ``anchor``."""


@dataclass(frozen=True)
class StepTime:
    """One step of a cycle."""

    name: str  # what it is: the weights of a linear, or the op
    seconds: float  # median, a launch's latency included
    weight_bytes: int  # that it reads


def profile_cycle(gpu: Gpu, loaded: Loaded, capture: Capture) -> list[StepTime]:
    """Times of all steps of propose and verify, in order. Runs REPEATS cycles that the host keeps no count of."""
    steps: list[PassStep] = []
    count = sum(len(loaded.passes[name].schedule.steps) for name in ("propose", "verify")) + 1
    stamps = gpu.allocate(8 * count)

    def around(step: PassStep | None) -> None:
        loaded.common.kernels.cycle.stamp(stamps.at(8 * len(steps), 8))
        if step is not None:
            steps.append(step)

    graph = gpu.capture(lambda: capture.cycle(around=around))
    readings, mixtures = [], loaded.mixtures
    before = mixtures.read if mixtures else 0
    for _ in range(REPEATS):
        graph.launch()
        readings.append(np.diff(gpu.read(stamps, (count,), np.uint64).astype(np.int64)))
    times = [median(values) * 1e-9 for values in zip(*(r.tolist() for r in readings), strict=True)]
    experts = (mixtures.read - before) / REPEATS / mixtures.layers if mixtures else 0.0
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
