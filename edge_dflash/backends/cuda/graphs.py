"""The CUDA graphs of a loaded pair, and the times of their steps.

One graph of each kind, for every position; where a verify is in it, one for each of a few numbers of rows. Captured at
load, never again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu, Graph
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.memory import NULL, Array, DevicePointer, Words
from edge_dflash.backends.cuda.sample import Block, Chooser
from edge_dflash.backends.cuda.small import RESULT_WORDS, Result
from edge_dflash.backends.cuda.steps import Head, Mix, Multiply, PassStep, Project, State
from edge_dflash.decode.backend import row_steps


class HostBuffers:
    """Page-locked memory that the graphs read and write, int32."""

    def __init__(self, gpu: Gpu, loaded: Loaded) -> None:
        buffers = loaded.common.buffers
        self.ids: Array = gpu.pinned((buffers.ids.nbytes // 4,), np.int32)  # [max(B, prefill rows)]
        self.drafts: Array = gpu.pinned((buffers.drafts.nbytes // 4,), np.int32)  # [row tile], row 0 is no draft
        self.choices: Array = gpu.pinned((buffers.choices.nbytes // 4,), np.int32)  # [row tile]
        self.result: Array = gpu.pinned((RESULT_WORDS,), np.int32)
        self.found = DevicePointer(self.result.ctypes.data, self.result.nbytes)  # the same, for the device
        self._gpu, self._device_counted = gpu, buffers.counted.at(0, 8)
        self._counted: Array = gpu.pinned((2,), np.int32)  # ROWS_ASKED and THRESHOLD of kernels/control.cuh
        self._told: tuple[int, float] | None = None  # the same, as the device has them

    def count(self, rows: int, threshold: float = 0.0) -> None:
        """Let so many rows of the next whole cycle's verify count, and no draft from the first unsure one on.

        The caller waits for it before the next call.
        """
        if self._told != (rows, threshold):
            self._told = rows, threshold
            self._counted[0], self._counted[1:].view(np.float32)[0] = rows, threshold
            self._gpu.write_from(self._device_counted, self._counted)

    def read(self, rows: int) -> Result:
        """Wait for what a cycle of at most ``rows`` rows found."""
        self._gpu.synchronize()
        return Result.of(self.result, rows)


class ByRows:
    """Graphs with a verify in them, by its rows."""

    def __init__(self, graphs: Mapping[int, Graph]) -> None:
        self.graphs = dict(sorted(graphs.items()))
        self._most = [
            next(count for count in self.graphs if count >= rows) for rows in range(max(graphs, default=-1) + 1)
        ]

    def of(self, rows: int) -> Graph:
        """The graph of the fewest rows that are enough."""
        return self.graphs[self._most[rows]]

    def most(self, rows: int) -> int:
        """Rows of that graph."""
        return self._most[rows]


@dataclass(frozen=True)
class Graphs:
    """The passes of a cycle, and what lies around them."""

    propose: Graph  # anchor in the control block -> drafts, logits
    verify: ByRows  # ids on the host -> choices, logits
    prefill: Graph  # ids on the host, ROWS of them -> choice of the last row, logits
    flush: Graph  # pending rows into the recurrent states


@dataclass(frozen=True)
class Cycles:
    """How a cycle ends on the device: accepted, committed, and its result read back."""

    greedy: ByRows  # a whole cycle: propose, verify, accept the rows that count and commit, without logits
    sampled: ByRows  # the same with sampled choices
    accept: Graph  # behind ``verify``: its choices decide
    choose: Graph  # behind ``verify``: choices of its logits by the chooser's settings and masks decide


class Capture:
    """What each graph enqueues."""

    def __init__(self, gpu: Gpu, loaded: Loaded, host: HostBuffers, chooser: Chooser, mask: int) -> None:
        self._gpu, self._host, self._chooser, self._mask = gpu, host, chooser, mask
        self._common, self._passes = loaded.common, loaded.passes
        self._buffers, self._kernels = loaded.common.buffers, loaded.common.kernels
        self._rows, self._control = loaded.common.layout.sizes.rows, loaded.common.buffers.control
        self._block, self._first = loaded.common.layout.sizes.of_pass("propose"), loaded.common.layout.first_draft
        self._walker = loaded.common.kernels.walker
        self._words = Words(self._control)
        narrowed = [self._passes["verify"].narrow(rows) for rows in row_steps(self._rows)]
        self._verifies = {each.rows: each for each in narrowed}

    def passes(self) -> Graphs:
        """Capture the passes."""
        capture = self._gpu.capture
        verify = ByRows({rows: capture(partial(self.verify, rows)) for rows in self._verifies})
        return Graphs(capture(self.propose), verify, capture(self.prefill), capture(self.flush))

    def cycles(self, pattern: DevicePointer = NULL) -> Cycles:
        """Capture how cycles end; ``pattern`` as in :meth:`~edge_dflash.backends.cuda.small.CycleKernels.accept`."""
        capture = self._gpu.capture
        drafting = [rows for rows in self._verifies if rows > 1]
        return Cycles(
            greedy=ByRows({n: capture(partial(self.cycle, pattern, rows=n)) for n in drafting}),
            sampled=ByRows({n: capture(partial(self.cycle, pattern, rows=n, sampled=True)) for n in drafting}),
            accept=capture(lambda: self.end(pattern, choose=False)),
            choose=capture(lambda: self.end(pattern, choose=True)),
        )

    def propose(self) -> None:
        """One drafter pass over [anchor, mask, ...]."""
        self._kernels.cycle.ids(self._control, self._buffers.ids, self._block, mask=self._mask)
        self._passes["propose"].enqueue(logits=True)
        self._gpu.read_into(self._buffers.drafts, self._host.drafts)

    def verify(self, rows: int) -> None:
        """One target pass over ``rows`` of the host's ids."""
        self._gpu.write_from(self._buffers.ids, self._host.ids[:rows])
        self._verifies[rows].enqueue(logits=True)
        self._kernels.small.replayed(self._control)
        self._gpu.read_into(self._buffers.choices, self._host.choices)

    def cycle(
        self,
        pattern: DevicePointer = NULL,
        around: Callable[[PassStep | None], None] = lambda step: None,
        *,
        rows: int | None = None,
        sampled: bool = False,
    ) -> None:
        """Propose, verify ``rows`` rows (None: all), accept, commit; ``around`` is told each step before it, then None.

        Choices are the largest logits, or ``sampled``; a walk's are its own. The drafts are for the positions from
        length + 1 on, row r of the target chooses for position length + r + 1.
        """
        buffers, frame, clock = self._buffers, self._kernels.cycle, self._buffers.clock
        drafts = buffers.drafts.at(4 * self._first, buffers.drafts.nbytes - 4 * self._first)
        rows = rows or self._rows
        frame.ids(self._control, buffers.ids, self._block, mask=self._mask, clock=clock.at(0, 8))
        self._passes["propose"].enqueue(logits=sampled, sampled=sampled, around=around)
        if sampled and self._walker is None:
            self._sample(buffers.drafts, offset=1 - self._first, first=self._first, stop=self._block)
        frame.ids(self._control, buffers.ids, rows, drafts=drafts, clock=clock.at(8, 8))
        self._verifies[rows].enqueue(logits=sampled, around=around)
        if sampled:
            self._sample(buffers.choices, offset=1, first=0, stop=rows)
        around(None)
        control, found, judged = self._control, self._host.found, self._walker is not None and self._walker.judges
        counted = buffers.counted.at(8 if judged else 0, 4)
        frame.accept(drafts, buffers.choices, rows, control, found, clock, pattern, counted)

    def end(self, pattern: DevicePointer = NULL, *, choose: bool) -> None:
        """Accept and commit what was verified: as many rows of the host's ids as the chooser's settings say."""
        buffers, rows, accept = self._buffers, self._rows, self._kernels.cycle.accept
        self._chooser.enqueue(buffers.choices if choose else None)
        drafts, valid = buffers.ids.at(4, 4 * (rows - 1)), self._chooser.stop
        accept(drafts, buffers.choices, rows, self._control, self._host.found, buffers.clock, pattern, valid)

    def _sample(self, ids: DevicePointer, *, offset: int, first: int, stop: int) -> None:
        block = Block(self._words.length, offset, first, stop)
        self._kernels.sampler.choose(self._buffers.sampling, self._buffers.logits, ids, block)

    def prefill(self) -> None:
        """One chunk."""
        self._gpu.write_from(self._buffers.ids, self._host.ids)
        self._passes["prefill"].enqueue(logits=True)
        self._kernels.small.commit_prefill(self._control)
        self._gpu.read_into(self._buffers.choices, self._host.choices)

    def flush(self) -> None:
        """Replay pending rows."""
        for name, kernels in self._kernels.delta.items():
            kernels.flush(self._common.states.delta[name], self._buffers.delta, self._words)
        self._kernels.small.replayed(self._control)


REPEATS = 5  # cycles that are timed


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
