"""One pass of a loaded pair: a Schedule as calls of the kernel faces, over one arena.

The head's ids and logits lie outside the arena, because they outlive the pass. :class:`PassBase` is what every pass
needs, whoever computes its dense ops; :class:`Pass` computes them by launches. Enqueues only; allocates nothing.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda import steps
from edge_dflash.backends.cuda.kernels.attend import AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.kernels.delta import DeltaTensors
from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix, Norm, Words
from edge_dflash.backends.cuda.mixtures import Mixtures
from edge_dflash.backends.cuda.schedule import strides_of_blocks
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.model import ops
from edge_dflash.weights.stacks import Stack

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.loading import Common


class PassBase(ABC):
    """One pass, ready to be enqueued: its tensors, and every kernel but those of linears and what engines hold."""

    def __init__(self, common: Common, name: str, mixtures: Mixtures | None = None) -> None:
        """``mixtures``: of a target with experts."""
        layout, buffers = common.layout, common.buffers
        self.schedule, self.places = layout.schedules[name], layout.places[name]
        self.prefill = name == "prefill"
        self.rows = layout.sizes.of_pass(name)
        self.common, self.kernels, self.mixtures = common, common.kernels, mixtures
        block = None if self.prefill or self.rows == layout.sizes.rows else self.rows
        self.words = Words(buffers.control, self.prefill, block)
        self.choices = buffers.drafts if name == "propose" else buffers.choices

    def narrow(self, rows: int, slots: int = 1) -> PassBase:
        """The pass over ``rows`` rows of each of so many slots, if it is there for other rows than all; else itself."""
        return self

    def enqueue(
        self, *, logits: bool, sampled: bool = False, around: Callable[[PassStep], None] = lambda step: None
    ) -> None:
        """Enqueue all steps; ``around`` is told each one before it, ``logits`` keeps the head's.

        A walk is greedy, or ``sampled`` by the settings on the device.
        """
        logits = logits or self.schedule.program.walk is not None
        for appends, group in groupby(self.schedule.steps, _appends):
            together = list(group)
            for step in together:
                around(step)
                if not appends:
                    self._enqueue(step, logits, sampled)
            if appends:
                self._append(together)

    def _enqueue(self, step: PassStep, logits: bool, sampled: bool) -> None:
        match step:
            case steps.State():
                self._state(step)
            case steps.Draft():
                self._draft(step, sampled)
            case steps.Last():
                x, out = self._matrix(step.reads[0]), self._matrix(step.writes[0])
                columns = self.schedule.widths[step.writes[0]]
                self.kernels.small.last_row(x, out.pointer, columns, self.rows, self.words.rows_there)
            case steps.Gather():
                self._gather(step)
            case steps.Convolve():
                self._convolve(step)
            case steps.Mix():
                assert self.mixtures is not None
                (x, *added), (out, *_) = self._tensors(step)
                residual, norm = next(iter(added), None), self._norm_behind(step)
                self.mixtures.run(step, x, out, self.rows, self.words, residual=residual, norm=norm)
            case _:
                self._dense(step, logits)

    @abstractmethod
    def _dense(self, step: PassStep, logits: bool) -> None:
        """Enqueue a step of linears, or of what stands in their place."""

    def _draft(self, step: steps.Draft, sampled: bool) -> None:
        buffers, walker, slots = self.common.buffers, self.kernels.walker, self.words.slots
        assert walker is not None
        logits, skipped = buffers.logits.behind(step.first), 4 * step.first
        walker.prepare(self._matrix(step.reads[0]).behind(step.first), logits, slots)
        tokens, sampling = self.choices.behind(skipped), buffers.sampling if sampled else None
        walker.walk(logits, buffers.control, buffers.counted, tokens, sampling, slots=slots)

    def _gather(self, step: steps.Gather) -> None:
        """Rows of the embedding for the pass's ids."""
        out, common, buffers = step.writes[0], self.common, self.common.buffers
        images = buffers.images if self.prefill and buffers.images.nbytes else NULL
        what = (self.rows, self.schedule.widths[out], common.layout.vocabulary, self._norm_behind(step), images)
        self.kernels.small.embed(buffers.ids, common.embeddings[step.weight], self._matrix(out), *what)

    def _convolve(self, step: steps.Convolve) -> None:
        (u, c, *added), out = self._tensors(step)
        base, slots = self.common.states.norm(step.op.base, plus_one=False), self.words.slots
        width, residual = self.schedule.widths[step.writes[0]], next(iter(added), None)
        what = (out[0], self.rows // slots, width, residual, self._norm_behind(step), slots)
        self.kernels.conv.convolve(step.op, u, c, base, *what)

    def _norm_behind(self, step: steps.BeforeNorm) -> Norm | None:
        """The norm that a step ends with."""
        return Norm(self._norm(op), op.eps, self._matrix(step.writes[1])) if (op := step.norm) else None

    def _norm(self, op: ops.RmsNorm) -> DevicePointer:
        return self.common.states.norm(op.weight, plus_one=op.plus_one)

    def _tensors(self, step: PassStep) -> tuple[list[Matrix], list[Matrix]]:
        """What a step reads, and what it writes."""
        return [self._matrix(name) for name in step.reads], [self._matrix(name) for name in step.writes]

    def _state(self, step: steps.State) -> None:
        states, buffers = self.common.states, self.common.buffers
        tensors = [self._matrix(name) for name in (*step.reads, *step.writes)]
        match step.op:
            case ops.Attend(state=name):
                memory, scratch = states.kv[name], buffers.attention
                self.kernels.attention[name].attend(AttendTensors(*tensors), memory, scratch, self.words)
            case ops.GatedDelta(state=name):
                self.kernels.delta[name].run(DeltaTensors(*tensors), states.delta[name], buffers.delta, self.words)
            case op:
                raise TypeError(f"no kernel for op {type(op).__name__}")

    def _append(self, appends: Sequence[PassStep]) -> None:
        """Appends that follow each other: those of one shape in one launch."""
        layers: dict[Attention, list[tuple[Matrix, Matrix, KvMemory]]] = {}
        for step in appends:
            assert isinstance(step, steps.State)
            state, (k, v) = step.op.state, (self._matrix(name) for name in step.reads)
            layers.setdefault(self.kernels.attention[state], []).append((k, v, self.common.states.kv[state]))
        for attention, rows in layers.items():
            attention.append(rows, self.words)

    def _matrix(self, tensor: str) -> Matrix:
        root, column = self.schedule.place(tensor)
        place = self.places[root]
        return Matrix(self.common.buffers.arena.at(place.offset, place.nbytes).behind(2 * column), place.stride)


def _appends(step: PassStep) -> bool:
    return isinstance(step, steps.State) and isinstance(step.op, ops.KvAppend)


class Pass(PassBase):
    """A pass whose dense ops are launches over stacks of weights, by the stack's key."""

    def __init__(
        self,
        common: Common,
        name: str,
        linears: Linears,
        weights: Mapping[str, LinearWeights],
        mixtures: Mixtures | None = None,
    ) -> None:
        super().__init__(common, name, mixtures)
        self._linears, self._weights = linears, weights
        self._in_blocks = {} if self.prefill else strides_of_blocks(self.schedule, self._window)

    def narrow(self, rows: int, slots: int = 1) -> Pass:
        """See :class:`PassBase`. Linears take the rows of a tile all the same."""
        narrowed = copy.copy(self)
        narrowed.rows, narrowed.words = slots * rows, replace(self.words, block=rows, slots=slots)
        if slots > 1:  # kernels of more rows may read another order
            narrowed._in_blocks = strides_of_blocks(self.schedule, narrowed._window)
        return narrowed

    def _window(self, stack: Stack) -> int:
        return self._linears.choose(stack.layout, self.rows).window

    def _matrix(self, tensor: str) -> Matrix:
        matrix = super()._matrix(tensor)
        return Matrix(matrix.pointer, self._in_blocks.get(self.schedule.place(tensor)[0], matrix.stride))

    def _dense(self, step: PassStep, logits: bool) -> None:
        if isinstance(step, steps.Head):
            self._head(step, logits)
            return
        inputs, out = self._tensors(step)
        widths, rows = [self.schedule.widths[name] for name in step.writes], self._rows(step)
        match step:
            case steps.Multiply():
                self._multiply(step, inputs[0], out)
            case steps.Project():
                residual = inputs[1] if len(inputs) > 1 else None
                self._project(step, inputs[0], out[0], residual, self._norm_behind(step))
            case steps.Normalise():
                self.kernels.small.rms_norm(inputs[0], self._norm(step.op), out[0], rows, widths[0], step.op.eps)
            case steps.Copy():
                self.kernels.cycle.copy(inputs, out, widths, rows)
            case steps.Columns():
                self.kernels.cycle.elementwise(step.op, inputs, out[0], rows, widths[0])
            case _:
                raise TypeError(f"no kernel for step {type(step).__name__}")

    def _head(self, step: steps.Head, logits: bool) -> None:
        weights, x, buffers = self._weights[step.stack.key], self._matrix(step.reads[0]), self.common.buffers
        kept = buffers.logits if logits else None
        self._linears.greedy(weights, x, self.choices, self._rows(step), buffers.linear, kept)

    def _rows(self, step: PassStep) -> int:
        return 1 if step.reads and step.reads[0] in self.schedule.single else self.rows

    def _multiply(self, step: steps.Multiply, x: Matrix, out: Sequence[Matrix]) -> None:
        weights = self._weights[step.stack.key]
        if self.prefill:
            self._linears.tiles(weights, x, out, self.rows, valid=self.words.rows_there)
            return
        count = len(out) - step.side_outputs
        side = self._weights[step.side.key] if step.side else None
        self._linears.linear(weights, x, out[:count], self.rows, side=side, side_out=out[count:])

    def _project(self, step: steps.Project, x: Matrix, out: Matrix, residual: Matrix | None, norm: Norm | None) -> None:
        weights, linears = self._weights[step.stack.key], self._linears
        if self.prefill:
            linears.tiles(weights, x, [out], self.rows, residual=residual, valid=self.words.rows_there)
            return
        linears.split_linear(weights, x, out, self.rows, self.common.buffers.linear, residual=residual, norm=norm)
