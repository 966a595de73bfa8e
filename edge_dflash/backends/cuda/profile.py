"""Where a cycle's time goes: each step between two readings of the device's clock, without overlap of steps."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import Capture
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.schedule import Head, Multiply, Project, Step
from edge_dflash.backends.cuda.schedule import State as StateStep

REPEATS = 5  # cycles that are timed


@dataclass(frozen=True)
class StepTime:
    """One step of a cycle."""

    name: str  # what it is: the weights of a linear, or the op
    seconds: float  # median, a launch's latency included
    weight_bytes: int  # that it reads


def profile_cycle(gpu: Gpu, loaded: Loaded, capture: Capture) -> list[StepTime]:
    """Times of all steps of propose and verify, in order. Runs REPEATS cycles that the host keeps no count of."""
    steps: list[Step] = []
    count = sum(len(loaded.passes[name].plan.steps) for name in ("propose", "verify")) + 1
    stamps = gpu.allocate(8 * count)

    def around(step: Step | None) -> None:
        loaded.kernels.cycle.stamp(stamps.at(8 * len(steps), 8))
        if step is not None:
            steps.append(step)

    graph = gpu.capture(lambda: capture.cycle(around=around))
    graph.upload()
    readings = []
    for _ in range(REPEATS):
        graph.launch()
        readings.append(np.diff(gpu.read(stamps, (count,), np.uint64).astype(np.int64)))
    times = [median(values) * 1e-9 for values in zip(*(r.tolist() for r in readings), strict=True)]
    return [StepTime(_name(step), time, _weight_bytes(step)) for step, time in zip(steps, times, strict=True)]


def _name(step: Step) -> str:
    match step:
        case Multiply() | Project() | Head():
            return f"{step.stack.names[0]} {step.stack.layout.format}"
        case StateStep():
            return f"{type(step.op).__name__} {step.op.state}"
        case _:
            return step.label


def _weight_bytes(step: Step) -> int:
    match step:
        case Multiply():
            return step.stack.layout.nbytes + (step.side.layout.nbytes if step.side else 0)
        case Project() | Head():
            return step.stack.layout.nbytes
        case _:
            return 0
