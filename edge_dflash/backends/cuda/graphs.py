"""The CUDA graphs of a loaded pair, and what each enqueues. Captured at load, never again.

One graph of each kind, for every position and lane; where a verify is in it, one for each of a few numbers of rows; and
all for each of a few numbers of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np

from edge_dflash.backends.cuda.driver import Gpu, Graph
from edge_dflash.backends.cuda.kernels.cycle import COUNTED_WORDS, RESULT_WORDS, Result
from edge_dflash.backends.cuda.kernels.sample import SETTINGS, Block, Chooser, Span
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


class Graphs:
    """The graphs of passes over so many slots; rows are those of a slot.

    A whole cycle proposes, verifies, accepts the rows that count and commits, all without logits (``greedy``) or by the
    settings on the device (``sampled``). After a ``verify`` its own choices decide (``accept``), or choices of its
    logits by the chooser's settings and masks (``choose``).
    """

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
        self.capture()

    def capture(self, pattern: DevicePointer = NULL) -> None:
        """Record every graph, again where something changed; ``pattern`` as in ``CycleKernels.accept``."""
        self.forced = pattern != NULL  # whether cycles follow a pattern, not the choices
        drafting = [rows for rows in self._verifies if rows > 1]
        ends = [self._rows] if self.slots == 1 else list(self._verifies)  # rows of one slot lie where those of more do
        self.propose = self._gpu.capture(self._enqueue_propose)  # anchors in the control blocks -> drafts, logits
        self.verify = self._by_rows(self._enqueue_verify, self._verifies)  # ids on the host -> choices, logits
        self.greedy = self._by_rows(partial(self.enqueue_cycle, pattern=pattern), drafting)
        self.sampled = self._by_rows(partial(self.enqueue_cycle, pattern=pattern, sampled=True), drafting)
        self.accept = self._by_rows(partial(self._enqueue_end, pattern, choose=False), ends)
        self.choose = self._by_rows(partial(self._enqueue_end, pattern, choose=True), ends)
        if self.slots == 1:
            self.prefill = self._gpu.capture(self._enqueue_prefill)  # ids on the host -> choice of the last row, logits
            self.flush = self._gpu.capture(self._enqueue_flush)  # pending rows into the recurrent states

    def every(self) -> list[Graph]:
        """All of them."""
        by_rows = (self.verify, self.greedy, self.sampled, self.accept, self.choose)
        alone = [self.prefill, self.flush] if self.slots == 1 else []
        return [self.propose, *(graph for each in by_rows for graph in each.graphs.values()), *alone]

    def _by_rows(self, enqueue: Callable[[int], None], rows: Iterable[int]) -> ByRows:
        return ByRows({n: self._gpu.capture(partial(enqueue, n)) for n in rows})

    def _enqueue_propose(self) -> None:
        """One drafter pass over [anchor, mask, ...]."""
        self._ids(self._block)
        self._propose.enqueue(logits=True)
        self._gpu.read_into(self._buffers.drafts, self._host.drafts)

    def _enqueue_verify(self, rows: int) -> None:
        """One target pass over ``rows`` of the host's ids."""
        self._gpu.write_from(self._buffers.ids, self._host.ids[: self.slots * rows])
        self._verifies[rows].enqueue(logits=True)
        self._kernels.small.replayed(self._buffers.control, self.slots)
        self._gpu.read_into(self._buffers.choices, self._host.choices)

    def enqueue_cycle(
        self,
        rows: int,
        *,
        pattern: DevicePointer = NULL,
        sampled: bool = False,
        around: Callable[[PassStep | None], None] = lambda step: None,
    ) -> None:
        """Propose, verify ``rows`` rows, accept, commit; ``around`` is told each step before it, then None.

        Choices are the largest logits, or ``sampled``; a walk's are its own. The drafts are for the positions from
        length + 1 on, row r of the target chooses for position length + r + 1.
        """
        buffers, clock, block = self._buffers, self._buffers.clock, self._block
        drafts = buffers.drafts.behind(4 * self._first)
        self._ids(block, clock=clock.at(0, 8))
        self._propose.enqueue(logits=sampled, sampled=sampled, around=around)
        if sampled and self._walker is None:
            self._sample(buffers.drafts, block, offset=1 - self._first, first=self._first)
        self._ids(rows, drafts=drafts, clock=clock.at(8, 8), apart=block)
        self._verifies[rows].enqueue(logits=sampled, around=around)
        if sampled:
            self._sample(buffers.choices, rows, offset=1, first=0)
        around(None)
        judged = self._walker is not None and self._walker.judges
        valid = buffers.counted.behind(8 if judged else 0)
        self._accept(drafts, rows, pattern, valid, apart=block, valid_apart=COUNTED_WORDS)

    def _enqueue_end(self, pattern: DevicePointer, rows: int, *, choose: bool) -> None:
        """Accept and commit what was verified: as many rows of the host's ids as the chooser's settings say."""
        buffers, slots = self._buffers, self.slots
        self._chooser.enqueue(buffers.choices if choose else None, span=Span(rows, slots) if slots > 1 else None)
        drafts = buffers.ids.at(4, 4 * (slots * rows - 1))
        each = SETTINGS.itemsize // 4
        self._accept(drafts, rows, pattern, self._chooser.stop, apart=rows, valid_apart=each)

    def _enqueue_prefill(self) -> None:
        """One chunk."""
        self._gpu.write_from(self._buffers.ids, self._host.ids)
        self._passes["prefill"].enqueue(logits=True)
        self._kernels.small.commit_prefill(self._buffers.control)
        self._gpu.read_into(self._buffers.choices, self._host.choices)

    def _enqueue_flush(self) -> None:
        """Replay pending rows."""
        for name, kernels in self._kernels.delta.items():
            kernels.flush(self._common.states.delta[name], self._buffers.delta, self._words)
        self._kernels.small.replayed(self._buffers.control)

    def _ids(self, rows: int, **given: Any) -> None:
        """Anchor and drafts, or masks, of each slot to where a pass takes its ids from."""
        where = self._buffers.control, self._buffers.ids
        self._kernels.cycle.ids(*where, rows, mask=0 if "drafts" in given else self._mask, slots=self.slots, **given)

    def _sample(self, ids: DevicePointer, rows: int, *, offset: int, first: int) -> None:
        block = Block(self._words.length, offset, first, rows)
        self._kernels.sampler.choose(self._buffers.sampling, self._buffers.logits, ids, block, Span(rows, self.slots))

    def _accept(
        self, drafts: DevicePointer, rows: int, pattern: DevicePointer, valid: DevicePointer, **apart: Any
    ) -> None:
        buffers = self._buffers
        what = (drafts, buffers.choices, rows, buffers.control, self._host.found, buffers.clock, pattern, valid)
        self._kernels.cycle.accept(*what, slots=self.slots, **apart)
