"""A Program as a sequence of steps, each one call of a kernel face: what is fused with what. Pure, no device.

Steps (steps.py) name tensors. Columns of another tensor (parts of a stack's output) are ``slices`` of it, so that
nothing but taps is copied. Two forms: ``narrow`` passes of one block (weights streamed once, residual and next norm
fused into what follows a linear) and ``wide`` prefill chunks (matrix tiles).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import (
    Add,
    Attend,
    Concat,
    DenseOp,
    Elementwise,
    Embed,
    Experts,
    GatedDelta,
    GroupedConv,
    KvAppend,
    Linear,
    Op,
    RmsNorm,
    SelectRows,
    StateOp,
    SwiGlu,
    Walk,
)
from edge_dflash.model.program import Program, Segment, segments
from edge_dflash.weights.formats import WeightFormat
from edge_dflash.weights.stacks import Stack, expert_stacks, program_stacks


@dataclass
class Schedule:
    """Steps of a pass and where its tensors lie."""

    program: Program
    steps: list[PassStep] = field(default_factory=list)
    columns: dict[str, int] = field(default_factory=dict)  # of each root tensor: one that is no slice
    widths: dict[str, int] = field(default_factory=dict)  # of all tensors
    slices: dict[str, tuple[str, int]] = field(default_factory=dict)  # tensor -> (tensor, first column)
    single: set[str] = field(default_factory=set)  # tensors of one row (behind ``last``)

    def place(self, tensor: str) -> tuple[str, int]:
        """The root tensor that holds ``tensor``, and its first column there."""
        column = 0
        while tensor in self.slices:
            tensor, more = self.slices[tensor]
            column += more
        return tensor, column


def schedule(program: Program, formats: Mapping[str, WeightFormat], *, wide: bool) -> Schedule:
    """Steps of a pass. Raises BackendError for what has no kernel."""
    return _Lowering(program, formats, wide).run()


class _Lowering:
    def __init__(self, program: Program, formats: Mapping[str, WeightFormat], wide: bool) -> None:
        self._program, self._wide = program, wide
        self._out = Schedule(program, widths=dict(program.columns))
        self._stacks = {name: stack for stack in program_stacks(program, formats) for name in stack.names}
        self._experts = expert_stacks(program, formats)
        self._readers: dict[str, list[Op]] = {}
        for op in program.ops:
            for name in op.inputs:
                self._readers.setdefault(name, []).append(op)
        self._done: set[str] = set()  # outputs that exist by now
        self._columns = self._out.widths
        self._handlers: dict[type[DenseOp], Callable[..., None]] = {
            Embed: lambda op, _: self._emit(Gather((), (op.output,), op.weight)),
            Linear: self._linear,
            RmsNorm: self._norm,
            Concat: self._concat,
            SelectRows: self._select,
            GroupedConv: self._convolve,
            Experts: self._mix,
        }

    def run(self) -> Schedule:
        for segment in segments(self._program):
            for op in segment.dense:
                if op.output not in self._done:
                    self._dense(op, segment)
            for state in segment.state:
                self._state(state)
        return self._out

    def _emit(self, step: PassStep) -> None:
        """Append a step, whose outputs then exist."""
        self._out.steps.append(step)
        for name in step.writes:
            self._made(name)

    def _made(self, name: str) -> None:
        self._done.add(name)
        if name not in self._out.slices:
            self._out.columns[name] = self._columns[name]

    def _linear(self, op: Linear, segment: Segment) -> None:
        stack = self._stacks[op.weight]
        if op.output == self._program.outputs.get("logits"):
            self._emit(Head((op.inputs[0],), (op.output,), stack))
        elif stack.layout.swiglu:
            gate = next(r for r in self._readers[op.output] if isinstance(r, SwiGlu))
            self._emit(Multiply((op.inputs[0],), (gate.output,), stack))
            self._done |= set(gate.inputs)
        elif len(stack.names) > 1 or not self._project(op, stack):
            self._multiply(op, stack, segment)

    def _project(self, op: Linear, stack: Stack) -> bool:
        """A linear whose only reader adds a residual, or (narrow) norms or convolves it."""
        if len(readers := self._readers[op.output]) != 1:
            return False
        residual, y, norm = self._following(op.output)
        if not residual and (self._wide or not isinstance(readers[0], RmsNorm | GroupedConv)):
            return False
        self._emit(Project((op.inputs[0], *residual), (y, *((norm.output,) if norm else ())), stack, norm=norm))
        self._done.add(op.output)
        return True

    def _following(self, made: str) -> tuple[tuple[str, ...], str, RmsNorm | None]:
        """What goes along with what makes a tensor: a residual, the tensor then written, and (narrow) a norm."""
        residual, y, readers = tuple[str, ...](), made, self._readers[made]
        if len(readers) == 1 and isinstance(add := readers[0], Add):
            other = add.inputs[0] if add.inputs[1] == made else add.inputs[1]
            if other in self._done:
                residual, y = (other,), add.output
        norms = [r for r in self._readers.get(y, ()) if isinstance(r, RmsNorm)]
        return residual, y, norms[0] if not self._wide and len(norms) == 1 and self._columns[y] % 2 == 0 else None

    def _convolve(self, op: GroupedConv, segment: Segment) -> None:
        residual, y, norm = self._following(op.output)
        self._emit(Convolve((*op.inputs, *residual), (y, *((norm.output,) if norm else ())), op, norm=norm))
        self._done.add(op.output)

    def _mix(self, op: Experts, segment: Segment) -> None:
        residual, y, norm = self._following(op.output)
        up, down = self._experts[op.output]
        self._emit(Mix((*op.inputs, *residual), (y, *((norm.output,) if norm else ())), op, up, down, norm=norm))
        self._done.add(op.output)

    def _multiply(self, op: Linear, stack: Stack, segment: Segment) -> None:
        """A stack with all its outputs; the gates' BF16 stack goes along with another one on the same input."""
        side = None
        if not self._wide and self._module(stack) != "gates":
            beside = {
                self._stacks[other.weight].key: self._stacks[other.weight]
                for other in segment.dense
                if isinstance(other, Linear) and other.inputs == op.inputs and other.output not in self._done
            }
            small = [s for s in beside.values() if self._module(s) == "gates" and s.layout.format == "bf16"]
            side = small[0] if len(small) == 1 and small[0].key != stack.key else None
        parts = (stack,) if side is None else (stack, side)
        written = [name for part in parts for name in self._outputs(part, op.inputs[0], segment)]
        self._emit(Multiply(op.inputs, tuple(written), stack, side))

    def _outputs(self, stack: Stack, x: str, segment: Segment) -> list[str]:
        """Tensors that a stack's launch writes: its own outputs, or one tensor of which they are slices."""
        made = {op.weight: op.output for op in segment.dense if isinstance(op, Linear) and op.inputs[0] == x}
        names = [made[weight] for weight in stack.names]
        if len(names) > 1 and stack.joined:
            column = 0
            for name, width in zip(names, stack.layout.columns, strict=True):
                self._out.slices[name] = (stack.key, column)
                self._made(name)
                column += width
            self._columns[stack.key] = column
            return [stack.key]
        return names

    def _module(self, stack: Stack) -> str:
        return self._program.weights[stack.names[0]].module

    def _norm(self, op: RmsNorm, segment: Segment) -> None:
        if self._out.steps and isinstance(last := self._out.steps[-1], Gather) and last.writes == op.inputs:
            self._out.steps.pop()
            self._emit(Gather((), (*last.writes, op.output), last.weight, norm=op))
            return
        self._emit(Normalise(op.inputs, (op.output,), op))
        if op.inputs[0] in self._out.single:
            self._out.single.add(op.output)

    def _dense(self, op: DenseOp, segment: Segment) -> None:
        if isinstance(op, Elementwise):
            self._emit(Columns(op.inputs, (op.output,), type(op)))
        elif isinstance(op, Walk):
            first = int(op.inputs[0] in self._out.slices)  # rows of the block but the anchor's
            self._emit(Draft((op.inputs[0],), (), op, first))
        elif type(op) in self._handlers:
            self._handlers[type(op)](op, segment)
        else:
            raise BackendError(f"{op.output}: the native backend has no kernel for op {type(op).__name__}")

    def _concat(self, op: Concat, segment: Segment) -> None:
        self._made(op.output)
        widths = [self._columns[name] for name in op.inputs]
        starts = {f"{op.output}[{i}]": sum(widths[:i]) for i in range(len(widths))}  # of each part
        self._out.slices |= {part: (op.output, column) for part, column in starts.items()}
        self._columns |= dict(zip(starts, widths, strict=True))
        self._emit(Copy(op.inputs, tuple(starts)))

    def _select(self, op: SelectRows, segment: Segment) -> None:
        if op.which == "last":
            self._out.single.add(op.output)
            self._emit(Last(op.inputs, (op.output,)))
        else:  # every row goes through the head; row 0 is left out when the result is read (invariant I4)
            self._out.slices[op.output] = (op.inputs[0], 0)
            self._made(op.output)

    def _state(self, op: StateOp) -> None:
        if not isinstance(op, Attend | GatedDelta | KvAppend):
            raise BackendError(f"the native backend has no kernel for op {type(op).__name__}")
        self._emit(State(op.inputs, (op.output,) if self._columns[op.output] else (), op))
        self._done.add(op.output)
