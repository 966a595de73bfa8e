"""Runs a Schedule: each step becomes calls of the kernel faces, over one arena. Enqueues only; allocates nothing.

The head's ids and logits lie outside the arena, because they outlive the pass. :class:`Frame` is what every pass needs,
whoever computes its dense ops; :class:`Pass` computes them by launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_dflash.backends.cuda.attend import Attention
from edge_dflash.backends.cuda.delta import GatedDelta
from edge_dflash.backends.cuda.linear import Linears, LinearWeights, Norm
from edge_dflash.backends.cuda.memory import NULL, Control, DevicePointer, Matrix, Place, control_word
from edge_dflash.backends.cuda.sample import Sampler
from edge_dflash.backends.cuda.schedule import (
    Columns,
    Copy,
    Gather,
    Head,
    Last,
    Multiply,
    Normalise,
    Project,
    Schedule,
    State,
    Step,
)
from edge_dflash.backends.cuda.small import CycleKernels, Small
from edge_dflash.backends.cuda.states import States
from edge_dflash.model.ops import Attend, KvAppend
from edge_dflash.model.ops import GatedDelta as GatedDeltaOp
from edge_dflash.weights.stacks import Stack


@dataclass(frozen=True)
class Kernels:
    """Everything that launches, but for dense ops."""

    small: Small
    cycle: CycleKernels
    sampler: Sampler
    attention: Mapping[str, Attention]  # by KV state
    delta: Mapping[str, GatedDelta]  # by gated delta state


@dataclass(frozen=True)
class Shared:
    """Memory that all passes share."""

    control: DevicePointer
    arena: DevicePointer
    attention: DevicePointer
    delta: DevicePointer
    counters: DevicePointer
    linear: DevicePointer


@dataclass(frozen=True, kw_only=True)
class Frame(ABC):
    """One pass, ready to be enqueued: its tensors, its state kernels, its embedding."""

    plan: Schedule
    places: Mapping[str, Place]
    rows: int  # of the pass
    wide: bool
    vocabulary: int
    kernels: Kernels
    states: States
    shared: Shared
    embeddings: Mapping[str, DevicePointer]
    ids: DevicePointer  # [rows] int32
    choices: DevicePointer  # [row tile] int32
    logits: Matrix  # [row tile, V]

    def enqueue(self, *, logits: bool, around: Callable[[Step], None] = lambda step: None) -> None:
        """Enqueue all steps; ``around`` is told each one before it, ``logits`` keeps the head's."""
        for step in self.plan.steps:
            around(step)
            self._step(step, logits)

    def _step(self, step: Step, logits: bool) -> None:
        match step:
            case State():
                self._state(step)
            case Last():
                x, out = self._matrix(step.reads[0]), self._matrix(step.writes[0])
                valid = self._word(Control.ROWS) if self.wide else NULL
                columns = self.plan.widths[step.writes[0]]
                self.kernels.small.last_row(x, out.pointer, columns, self.rows, valid)
            case _:
                self._dense(step, logits)

    @abstractmethod
    def _dense(self, step: Step, logits: bool) -> None:
        """Enqueue a step of dense ops."""

    def _gather(self, weight: str, out: str) -> None:
        """Rows of the embedding for the pass's ids."""
        columns, table = self.plan.widths[out], self.embeddings[weight]
        self.kernels.small.embed(self.ids, table, self._matrix(out), self.rows, columns, self.vocabulary)

    def _state(self, step: State) -> None:
        op, shared = step.op, self.shared
        inputs = [self._matrix(name) for name in step.reads]
        length = self._word(Control.LENGTH)
        rows = self._word(Control.ROWS) if self.wide else NULL
        match op:
            case Attend():
                attention, memory = self.kernels.attention[op.state], self.states.kv[op.state]
                q, k, v = inputs
                out = self._matrix(step.writes[0])
                attention.attend(q, k, v, out, memory, shared.attention, length, rows)
            case KvAppend():
                k, v = inputs
                self.kernels.attention[op.state].append(k, v, self.states.kv[op.state], length, rows)
            case GatedDeltaOp():
                qkv, z, a, b = inputs
                out, layer = self._matrix(step.writes[0]), self.states.delta[op.state]
                pending = self._word(Control.PENDING)
                kernels = self.kernels.delta[op.state]
                kernels.run(qkv, z, a, b, out, layer, shared.delta, shared.counters, pending, rows)
            case _:
                raise TypeError(f"no kernel for op {type(op).__name__}")

    def _matrix(self, tensor: str) -> Matrix:
        root, column = self.plan.place(tensor)
        place = self.places[root]
        return Matrix(self.shared.arena.at(place.offset + 2 * column, place.nbytes - 2 * column), place.stride)

    def _rows(self, tensor: str) -> int:
        return 1 if tensor in self.plan.single else self.rows

    def _word(self, word: Control) -> DevicePointer:
        return control_word(self.shared.control, word)


@dataclass(frozen=True, kw_only=True)
class Pass(Frame):
    """A pass whose dense ops are launches over stacks of weights."""

    linears: Linears
    weights: Mapping[str, LinearWeights]  # by key of the stack

    def _dense(self, step: Step, logits: bool) -> None:
        match step:
            case Gather():
                self._gather(step.weight, step.writes[0])
            case Multiply():
                self._multiply(step)
            case Project():
                self._project(step)
            case Normalise():
                x, out, op = self._matrix(step.reads[0]), self._matrix(step.writes[0]), step.op
                columns = self.plan.widths[step.writes[0]]
                self.kernels.small.rms_norm(x, self._norm(step), out, self._rows(step.reads[0]), columns, op.eps)
            case Head():
                rows = self._rows(step.reads[0])
                kept = self.logits if logits else None
                head = self.weights[step.stack.key]
                x = self._matrix(step.reads[0])
                self.linears.greedy(head, x, self.choices, rows, self.shared.linear, kept)
            case _:
                self._columns(step)

    def _columns(self, step: Step) -> None:
        """Steps that only move or add columns."""
        inputs, out = [self._matrix(name) for name in step.reads], self._matrix(step.writes[0])
        rows, columns = self._rows(step.reads[0]), self.plan.widths[step.writes[0]]
        match step:
            case Copy():
                self.kernels.cycle.copy(inputs[0], out, rows, columns)
            case Columns():
                self.kernels.cycle.elementwise(step.op, inputs, out, rows, columns)
            case _:
                raise TypeError(f"no kernel for step {type(step).__name__}")

    def _multiply(self, step: Multiply) -> None:
        x = self._matrix(step.reads[0])
        count = len(step.writes) - (self._outputs(step.side) if step.side else 0)
        out = [self._matrix(name) for name in step.writes[:count]]
        weights = self.weights[step.stack.key]
        if self.wide:
            self.linears.tiles(weights, x, out, self.rows, valid=self._word(Control.ROWS))
            return
        side = self.weights[step.side.key] if step.side else None
        side_out = [self._matrix(name) for name in step.writes[count:]]
        self.linears.linear(weights, x, out, self.rows, side=side, side_out=side_out)

    def _project(self, step: Project) -> None:
        x, out = self._matrix(step.reads[0]), self._matrix(step.writes[0])
        residual = self._matrix(step.reads[1]) if len(step.reads) > 1 else None
        weights, linears = self.weights[step.stack.key], self.linears
        if self.wide:
            linears.tiles(weights, x, [out], self.rows, residual=residual, valid=self._word(Control.ROWS))
            return
        norm = None
        if step.norm is not None:
            weight = self.states.norm(step.norm.weight, plus_one=step.norm.plus_one)
            norm = Norm(weight, step.norm.eps, self._matrix(step.writes[1]))
        linears.split_linear(weights, x, out, self.rows, self.shared.linear, residual=residual, norm=norm)

    def _norm(self, step: Normalise) -> DevicePointer:
        return self.states.norm(step.op.weight, plus_one=step.op.plus_one)

    def _outputs(self, stack: Stack) -> int:
        return 1 if stack.joined and len(stack.names) > 1 else len(stack.names)
