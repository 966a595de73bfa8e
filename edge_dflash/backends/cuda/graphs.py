"""The CUDA graphs of a loaded pair.

One graph of each kind, for every position and lane; where a verify is in it, one for each of a few numbers of rows; and
all for each of a few numbers of slots. Captured at load, never again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu, Graph
from edge_dflash.backends.cuda.kernels.sample import SETTINGS, Block, Chooser, Span
from edge_dflash.backends.cuda.kernels.small import COUNTED_WORDS, RESULT_WORDS, Result
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.memory import NULL, Array, DevicePointer, Words
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.decode.shape import row_steps


class HostBuffers:
    """Page-locked memory that the graphs read and write, int32."""

    def __init__(self, gpu: Gpu, loaded: Loaded) -> None:
        buffers, slots = loaded.common.buffers, loaded.common.layout.sizes.slots
        self.ids: Array = gpu.pinned((buffers.ids.nbytes // 4,), np.int32)  # [all slots' B, or prefill rows]
        self.drafts: Array = gpu.pinned((buffers.drafts.nbytes // 4,), np.int32)  # a slot's row 0 may be no draft
        self.choices: Array = gpu.pinned((buffers.choices.nbytes // 4,), np.int32)
        self.result: Array = gpu.pinned((slots, RESULT_WORDS), np.int32)
        self.found = DevicePointer(self.result.ctypes.data, self.result.nbytes)  # the same, for the device
        self._gpu, self._device_counted = gpu, buffers.counted
        self._counted: Array = gpu.pinned((slots, COUNTED_WORDS), np.int32)  # Counted of kernels/control.cuh
        self._told: list[tuple[int, float] | None] = [None] * slots  # the same, as the device has them

    def count(self, *slots: tuple[int, float]) -> None:
        """Let so many rows of a slot in the next whole cycle's verify count; no draft from the first unsure one on.

        Rows and threshold of slots 0, 1, ... The caller waits for it before the next call.
        """
        count = len(slots)
        if list(slots) != self._told[:count]:
            self._told[:count] = slots
            for words, (rows, threshold) in zip(self._counted, slots, strict=False):
                words[0], words[1:2].view(np.float32)[0] = rows, threshold
            self._gpu.write_from(self._device_counted.at(0, 4 * COUNTED_WORDS * count), self._counted[:count])

    def read(self, rows: int, slots: int = 1) -> list[Result]:
        """Wait for what a cycle of at most ``rows`` rows a slot found in slots 0, 1, ..."""
        self._gpu.synchronize()
        return [Result.of(words, rows) for words in self.result[:slots]]


def joint_steps(most: int) -> tuple[int, ...]:
    """Rows of a verify of several slots that have graphs, as :func:`~edge_dflash.decode.shape.row_steps`: fewer."""
    return (*(rows for rows in (1, 4, 8, 16) if rows < most), most)


class ByRows:
    """Graphs with a verify in them, by the rows of a slot."""

    def __init__(self, graphs: Mapping[int, Graph]) -> None:
        self.graphs = dict(sorted(graphs.items()))

    def most(self, rows: int) -> int:
        """The fewest rows of a graph that are enough."""
        return next(count for count in self.graphs if count >= rows)

    def of(self, rows: int) -> Graph:
        """The graph of those rows."""
        return self.graphs[self.most(rows)]


@dataclass(frozen=True)
class Cycles:
    """How a cycle ends on the device: accepted, committed, and its result read back."""

    greedy: ByRows  # a whole cycle: propose, verify, accept the rows that count and commit, without logits
    sampled: ByRows  # the same with sampled choices
    accept: ByRows  # behind ``verify``: its choices decide
    choose: ByRows  # behind ``verify``: choices of its logits by the chooser's settings and masks decide


class Capture:
    """What each graph of passes over so many slots enqueues; rows are those of a slot."""

    def __init__(
        self, gpu: Gpu, loaded: Loaded, host: HostBuffers, chooser: Chooser, mask: int, slots: int = 1
    ) -> None:
        self.slots = slots
        self._gpu, self._host, self._chooser, self._mask = gpu, host, chooser, mask
        self._common, self._passes = loaded.common, loaded.passes
        self._buffers, self._kernels, layout = loaded.common.buffers, loaded.common.kernels, loaded.common.layout
        self._rows, self._block, self._first = layout.sizes.rows, layout.sizes.of_pass("propose"), layout.first_draft
        self._words, self._walker = Words(self._buffers.control), self._kernels.walker
        verify, self._propose = loaded.passes["verify"], loaded.passes["propose"]
        if slots > 1:
            self._propose = self._propose.narrow(self._block, slots)
        narrowed = [verify.narrow(rows, slots) for rows in (row_steps if slots == 1 else joint_steps)(self._rows)]
        self._verifies = {each.rows // slots: each for each in narrowed}

    def record(self, enqueue: Callable[[], None]) -> Graph:
        """The graph of what ``enqueue`` enqueues."""
        return self._gpu.capture(enqueue)

    def by_rows(self, enqueue: Callable[[int], None], rows: Iterable[int] | None = None) -> ByRows:
        """The graphs of what ``enqueue`` enqueues for each number of rows of a verify, or of ``rows``."""
        return ByRows({n: self.record(partial(enqueue, n)) for n in (self._verifies if rows is None else rows)})

    def cycles(self, pattern: DevicePointer = NULL) -> Cycles:
        """Capture how cycles end; ``pattern`` as in ``CycleKernels.accept``."""
        drafting = [rows for rows in self._verifies if rows > 1]
        ends = [self._rows] if self.slots == 1 else None  # rows of one slot lie where those of more do
        return Cycles(
            greedy=self.by_rows(lambda n: self.cycle(pattern, rows=n), drafting),
            sampled=self.by_rows(lambda n: self.cycle(pattern, rows=n, sampled=True), drafting),
            accept=self.by_rows(lambda n: self.end(pattern, rows=n, choose=False), ends),
            choose=self.by_rows(lambda n: self.end(pattern, rows=n, choose=True), ends),
        )

    def propose(self) -> None:
        """One drafter pass over [anchor, mask, ...]."""
        self._kernels.cycle.ids(
            self._buffers.control, self._buffers.ids, self._block, mask=self._mask, slots=self.slots
        )
        self._propose.enqueue(logits=True)
        self._gpu.read_into(self._buffers.drafts, self._host.drafts)

    def verify(self, rows: int) -> None:
        """One target pass over ``rows`` of the host's ids."""
        self._gpu.write_from(self._buffers.ids, self._host.ids[: self.slots * rows])
        self._verifies[rows].enqueue(logits=True)
        self._kernels.small.replayed(self._buffers.control, self.slots)
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
        buffers, frame, clock, slots = self._buffers, self._kernels.cycle, self._buffers.clock, self.slots
        drafts, block = buffers.drafts.behind(4 * self._first), self._block
        rows = rows or self._rows
        frame.ids(self._buffers.control, buffers.ids, block, mask=self._mask, clock=clock.at(0, 8), slots=slots)
        self._propose.enqueue(logits=sampled, sampled=sampled, around=around)
        if sampled and self._walker is None:
            self._sample(buffers.drafts, block, offset=1 - self._first, first=self._first)
        frame.ids(
            self._buffers.control, buffers.ids, rows, drafts=drafts, clock=clock.at(8, 8), slots=slots, apart=block
        )
        self._verifies[rows].enqueue(logits=sampled, around=around)
        if sampled:
            self._sample(buffers.choices, rows, offset=1, first=0)
        around(None)
        judged = self._walker is not None and self._walker.judges
        counted = buffers.counted.behind(8 if judged else 0)
        what = (drafts, buffers.choices, rows, self._buffers.control, self._host.found, clock, pattern, counted)
        frame.accept(*what, slots=slots, apart=block, valid_apart=COUNTED_WORDS)

    def end(self, pattern: DevicePointer = NULL, *, rows: int, choose: bool) -> None:
        """Accept and commit what was verified: as many rows of the host's ids as the chooser's settings say."""
        buffers, slots = self._buffers, self.slots
        self._chooser.enqueue(buffers.choices if choose else None, span=Span(rows, slots) if slots > 1 else None)
        drafts = buffers.ids.at(4, 4 * (slots * rows - 1))
        what = (drafts, buffers.choices, rows, self._buffers.control, self._host.found, buffers.clock, pattern)
        accept, each = self._kernels.cycle.accept, SETTINGS.itemsize // 4
        accept(*what, self._chooser.stop, slots=slots, apart=rows, valid_apart=each)

    def _sample(self, ids: DevicePointer, rows: int, *, offset: int, first: int) -> None:
        block = Block(self._words.length, offset, first, rows)
        self._kernels.sampler.choose(self._buffers.sampling, self._buffers.logits, ids, block, Span(rows, self.slots))

    def prefill(self) -> None:
        """One chunk."""
        self._gpu.write_from(self._buffers.ids, self._host.ids)
        self._passes["prefill"].enqueue(logits=True)
        self._kernels.small.commit_prefill(self._buffers.control)
        self._gpu.read_into(self._buffers.choices, self._host.choices)

    def flush(self) -> None:
        """Replay pending rows."""
        for name, kernels in self._kernels.delta.items():
            kernels.flush(self._common.states.delta[name], self._buffers.delta, self._words)
        self._kernels.small.replayed(self._buffers.control)


@dataclass(frozen=True)
class Graphs:
    """The graphs of a number of slots."""

    capture: Capture
    propose: Graph  # anchors in the control blocks -> drafts, logits
    verify: ByRows  # ids on the host -> choices, logits
    cycles: Cycles
    forced: bool = False  # whether ``cycles`` follow a pattern, not the choices

    @classmethod
    def of(cls, capture: Capture) -> Graphs:
        """Capture all of them."""
        return cls(capture, capture.record(capture.propose), capture.by_rows(capture.verify), capture.cycles())

    def following(self, pattern: DevicePointer) -> Graphs:
        """The same with cycles captured anew, for a ``pattern`` or NULL."""
        return replace(self, cycles=self.capture.cycles(pattern), forced=pattern != NULL)

    @property
    def slots(self) -> int:
        """Lanes that one pass takes."""
        return self.capture.slots


@dataclass(frozen=True)
class Alone:
    """The graphs that run on one slot alone."""

    prefill: Graph  # ids on the host, ROWS of them -> choice of the last row, logits
    flush: Graph  # pending rows into the recurrent states

    @classmethod
    def of(cls, capture: Capture) -> Alone:
        """Capture both."""
        return cls(capture.record(capture.prefill), capture.record(capture.flush))
