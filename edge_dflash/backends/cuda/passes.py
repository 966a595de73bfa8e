"""Runs a Schedule: each step becomes calls of the kernel faces, over one arena. Enqueues only; allocates nothing.

The head's ids and logits lie outside the arena, because they outlive the pass. :class:`Frame` is what every pass needs,
whoever computes its dense ops; :class:`Pass` computes them by launches.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from edge_dflash.backends.cuda.attend import AttendTensors, Attention
from edge_dflash.backends.cuda.common import Common
from edge_dflash.backends.cuda.delta import DeltaTensors
from edge_dflash.backends.cuda.linear import Linears, LinearWeights, Norm
from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix, Words
from edge_dflash.backends.cuda.mixtures import Mixtures
from edge_dflash.backends.cuda.order import strides_of_blocks
from edge_dflash.backends.cuda.states import KvMemory
from edge_dflash.backends.cuda.steps import (
    Columns,
    Convolve,
    Copy,
    Draft,
    Gather,
    Head,
    Last,
    Mix,
    Multiply,
    Normalise,
    PassStep,
    Project,
    State,
)
from edge_dflash.model.ops import Attend, GatedDelta, KvAppend, RmsNorm
from edge_dflash.weights.stacks import Stack


def _appends(step: PassStep) -> bool:
    return isinstance(step, State) and isinstance(step.op, KvAppend)


class Frame(ABC):
    """One pass, ready to be enqueued: its tensors, its state kernels, its embedding."""

    mixtures: Mixtures | None = None  # of a target with experts

    def __init__(self, common: Common, name: str) -> None:
        layout, buffers = common.layout, common.buffers
        self.schedule, self.places = layout.schedules[name], layout.places[name]
        self.prefill = name == "prefill"
        self.rows = layout.sizes.of_pass(name)
        self.common, self.kernels = common, common.kernels
        block = None if self.prefill or self.rows == layout.sizes.rows else self.rows
        self.words = Words(buffers.control, self.prefill, block)
        self.choices = buffers.drafts if name == "propose" else buffers.choices

    def narrow(self, rows: int, slots: int = 1) -> Frame:
        """The pass over ``rows`` rows of each of so many slots, if it is there for other rows than all; else itself."""
        return self

    def enqueue(
        self, *, logits: bool, sampled: bool = False, around: Callable[[PassStep], None] = lambda step: None
    ) -> None:
        """Enqueue all steps; ``around`` is told each one before it, ``logits`` keeps the head's.

        A walk is greedy, or ``sampled`` by the settings on the device.
        """
        logits = logits or self.schedule.program.walk is not None
        for appends, steps in groupby(self.schedule.steps, _appends):
            together = list(steps)
            for step in together:
                around(step)
                if not appends:
                    self._enqueue(step, logits, sampled)
            if appends:
                self._append(together)

    def _enqueue(self, step: PassStep, logits: bool, sampled: bool) -> None:
        match step:
            case State():
                self._state(step)
            case Draft():
                self._draft(step, sampled)
            case Last():
                x, out = self._matrix(step.reads[0]), self._matrix(step.writes[0])
                columns = self.schedule.widths[step.writes[0]]
                self.kernels.small.last_row(x, out.pointer, columns, self.rows, self.words.rows)
            case _:
                self._dense(step, logits)

    @abstractmethod
    def _dense(self, step: PassStep, logits: bool) -> None:
        """Enqueue a step of dense ops."""

    def _draft(self, step: Draft, sampled: bool) -> None:
        buffers, walker = self.common.buffers, self.common.kernels.walker
        assert walker is not None
        hidden, logits = self._matrix(step.reads[0]).behind(step.first), buffers.logits.behind(step.first)
        walker.prepare(hidden, logits, self.words.slots)
        tokens, sampling = self.choices.at(4 * step.first, self.choices.nbytes - 4 * step.first), buffers.sampling
        walker.walk(
            logits, buffers.control, buffers.counted, tokens, sampling if sampled else None, slots=self.words.slots
        )

    def _gather(self, weight: str, out: str, norm: Norm | None = None) -> None:
        """Rows of the embedding for the pass's ids."""
        columns, table, buffers = self.schedule.widths[out], self.common.embeddings[weight], self.common.buffers
        images = buffers.images if self.prefill and buffers.images.nbytes else NULL
        what = (self.rows, columns, self.common.layout.vocabulary, norm, images)
        self.kernels.small.embed(buffers.ids, table, self._matrix(out), *what)

    def _state(self, step: State) -> None:
        op, states, buffers = step.op, self.common.states, self.common.buffers
        tensors = [self._matrix(name) for name in (*step.reads, *step.writes)]
        match op:
            case Attend():
                attention, memory = self.kernels.attention[op.state], states.kv[op.state]
                attention.attend(AttendTensors(*tensors), memory, buffers.attention, self.words)
            case GatedDelta():
                layer = states.delta[op.state]
                self.kernels.delta[op.state].run(DeltaTensors(*tensors), layer, buffers.delta, self.words)
            case _:
                raise TypeError(f"no kernel for op {type(op).__name__}")

    def _append(self, steps: Sequence[PassStep]) -> None:
        """Appends that follow each other: those of one shape in one launch."""
        layers: dict[Attention, list[tuple[Matrix, Matrix, KvMemory]]] = {}
        for step in steps:
            assert isinstance(step, State)
            state, (k, v) = step.op.state, (self._matrix(name) for name in step.reads)
            layers.setdefault(self.kernels.attention[state], []).append((k, v, self.common.states.kv[state]))
        for attention, rows in layers.items():
            attention.append(rows, self.words)

    def _matrix(self, tensor: str) -> Matrix:
        root, column = self.schedule.place(tensor)
        place, arena = self.places[root], self.common.buffers.arena
        return Matrix(arena.at(place.offset + 2 * column, place.nbytes - 2 * column), place.stride)


class Pass(Frame):
    """A pass whose dense ops are launches over stacks of weights, by the stack's key."""

    def __init__(
        self,
        common: Common,
        name: str,
        linears: Linears,
        weights: Mapping[str, LinearWeights],
        mixtures: Mixtures | None = None,
    ) -> None:
        super().__init__(common, name)
        self._linears, self._weights, self.mixtures = linears, weights, mixtures
        self._in_blocks = {} if self.prefill else strides_of_blocks(self.schedule, self._window)

    def narrow(self, rows: int, slots: int = 1) -> Pass:
        """See :class:`Frame`. Linears take the rows of a tile all the same."""
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
        match step:
            case Gather():
                self._gather(step.weight, step.writes[0], self._normal(step.norm, step.writes))
            case Multiply():
                self._multiply(step)
            case Project():
                self._project(step)
            case Mix():
                self._mix(step)
            case Head():
                weights, x, buffers = self._weights[step.stack.key], self._matrix(step.reads[0]), self.common.buffers
                rows, kept = self._rows(step.reads[0]), buffers.logits if logits else None
                self._linears.greedy(weights, x, self.choices, rows, buffers.linear, kept)
            case _:
                self._columns(step)

    def _columns(self, step: PassStep) -> None:
        """Steps that change no more than columns of a row."""
        inputs, out = [self._matrix(name) for name in step.reads], self._matrix(step.writes[0])
        rows, columns = self._rows(step.reads[0]), self.schedule.widths[step.writes[0]]
        match step:
            case Normalise():
                weight = self._norm(step.op)
                self.kernels.small.rms_norm(inputs[0], weight, out, rows, columns, step.op.eps)
            case Copy():
                widths = [self.schedule.widths[name] for name in step.writes]
                self.kernels.cycle.copy(inputs, [self._matrix(name) for name in step.writes], widths, rows)
            case Convolve():
                residual, norm = inputs[2] if len(inputs) > 2 else None, self._normal(step.norm, step.writes)
                base = self.common.states.norm(step.op.base, plus_one=False)
                u, c, slots = *inputs[:2], self.words.slots
                self.kernels.conv.convolve(step.op, u, c, base, out, rows // slots, columns, residual, norm, slots)
            case Columns():
                self.kernels.cycle.elementwise(step.op, inputs, out, rows, columns)
            case _:
                raise TypeError(f"no kernel for step {type(step).__name__}")

    def _multiply(self, step: Multiply) -> None:
        x, weights = self._matrix(step.reads[0]), self._weights[step.stack.key]
        out = [self._matrix(name) for name in step.writes]
        if self.prefill:
            self._linears.tiles(weights, x, out, self.rows, valid=self.words.rows)
            return
        count = len(out) - step.side_outputs
        side = self._weights[step.side.key] if step.side else None
        self._linears.linear(weights, x, out[:count], self.rows, side=side, side_out=out[count:])

    def _project(self, step: Project) -> None:
        x, out = self._matrix(step.reads[0]), self._matrix(step.writes[0])
        residual = self._matrix(step.reads[1]) if len(step.reads) > 1 else None
        weights, linears = self._weights[step.stack.key], self._linears
        if self.prefill:
            linears.tiles(weights, x, [out], self.rows, residual=residual, valid=self.words.rows)
            return
        norm = self._normal(step.norm, step.writes)
        linears.split_linear(weights, x, out, self.rows, self.common.buffers.linear, residual=residual, norm=norm)

    def _mix(self, step: Mix) -> None:
        x, out, norm = self._matrix(step.reads[0]), self._matrix(step.writes[0]), self._normal(step.norm, step.writes)
        residual = self._matrix(step.reads[1]) if len(step.reads) > 1 else None
        assert self.mixtures is not None
        self.mixtures.run(step, x, out, self.rows, self.words, residual=residual, norm=norm)

    def _normal(self, op: RmsNorm | None, writes: Sequence[str]) -> Norm | None:
        """The norm of a step's first output, which is its second one."""
        return None if op is None else Norm(self._norm(op), op.eps, self._matrix(writes[1]))

    def _norm(self, op: RmsNorm) -> DevicePointer:
        return self.common.states.norm(op.weight, plus_one=op.plus_one)

    def _rows(self, tensor: str) -> int:
        return 1 if tensor in self.schedule.single else self.rows
