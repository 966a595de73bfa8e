"""A Program as a sequence of steps, each one call of a kernel face: what is fused with what, and where tensors lie.

Steps (steps.py) name tensors. Columns of another tensor (parts of a stack's output) are ``slices`` of it, so that
nothing but taps is copied. Two forms: ``narrow`` passes of one block (weights streamed once, residual and next norm
fused into what follows a linear) and ``wide`` prefill chunks (matrix tiles). Pure, no device.

Memory of a tensor is used again when its last reader has run. Kernels may start early but touch nothing but weights
before all earlier ones have ended, so reuse by the order of the steps is safe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from edge_dflash.backends.cuda import steps
from edge_dflash.backends.cuda.memory import PADDING, Placement, aligned
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.errors import BackendError
from edge_dflash.model import ops
from edge_dflash.model.program import Program, Segment, segments
from edge_dflash.weights.formats import WeightFormat
from edge_dflash.weights.stacks import Stack, expert_stacks, program_stacks

BLOCK_K = 64  # columns of a block of kernels/blocks.cuh


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


def readers_of(program: Program) -> dict[str, list[ops.Op]]:
    """The ops that read each tensor."""
    readers: dict[str, list[ops.Op]] = {}
    for op in program.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    return readers


class _Lowering:
    def __init__(self, program: Program, formats: Mapping[str, WeightFormat], wide: bool) -> None:
        self._program, self._wide = program, wide
        self._out = Schedule(program, widths=dict(program.columns))
        self._stacks = {name: stack for stack in program_stacks(program, formats) for name in stack.names}
        self._experts = expert_stacks(program, formats)
        self._readers = readers_of(program)
        self._done: set[str] = set()  # outputs that exist by now
        self._columns = self._out.widths

    def run(self) -> Schedule:
        for segment in segments(self._program):
            for op in segment.dense:
                if op.output not in self._done:
                    self._dense(op, segment)
            for state in segment.state:
                self._state(state)
        return self._out

    def _dense(self, op: ops.DenseOp, segment: Segment) -> None:
        match op:
            case ops.Linear():
                self._linear(op, segment)
            case ops.Embed():
                self._emit(steps.Gather((), (op.output,), op.weight))
            case ops.RmsNorm():
                self._norm(op)
            case ops.Elementwise():
                self._emit(steps.Columns(op.inputs, (op.output,), type(op)))
            case ops.Concat():
                self._concat(op)
            case ops.SelectRows():
                self._select(op)
            case ops.GroupedConv():
                reads, writes, norm = self._following(op)
                self._emit(steps.Convolve((*op.inputs, *reads), writes, op, norm=norm))
            case ops.Experts():
                reads, writes, norm = self._following(op)
                self._emit(steps.Mix((*op.inputs, *reads), writes, op, *self._experts[op.output], norm=norm))
            case ops.Walk():
                first = int(op.inputs[0] in self._out.slices)  # rows of the block but the anchor's
                self._emit(steps.Draft((op.inputs[0],), (), op, first))
            case _:
                raise BackendError(f"{op.output}: the native backend has no kernel for op {type(op).__name__}")
        self._done.add(op.output)

    def _state(self, op: ops.StateOp) -> None:
        if not isinstance(op, ops.Attend | ops.GatedDelta | ops.KvAppend):
            raise BackendError(f"the native backend has no kernel for op {type(op).__name__}")
        self._emit(steps.State(op.inputs, (op.output,) if self._columns[op.output] else (), op))
        self._done.add(op.output)

    def _emit(self, step: PassStep) -> None:
        """Append a step, whose outputs then exist."""
        self._out.steps.append(step)
        for name in step.writes:
            self._made(name)

    def _made(self, name: str) -> None:
        self._done.add(name)
        if name not in self._out.slices:
            self._out.columns[name] = self._columns[name]

    def _linear(self, op: ops.Linear, segment: Segment) -> None:
        stack, x = self._stacks[op.weight], op.inputs[:1]
        if op.output == self._program.outputs.get("logits"):
            self._emit(steps.Head(x, (op.output,), stack))
        elif stack.layout.swiglu:
            gate = next(r for r in self._readers[op.output] if isinstance(r, ops.SwiGlu))
            self._emit(steps.Multiply(x, (gate.output,), stack))
            self._done |= set(gate.inputs)
        elif len(stack.names) == 1 and len(readers := self._readers[op.output]) == 1:
            residual, writes, norm = self._following(op)
            if residual or (not self._wide and isinstance(readers[0], ops.RmsNorm | ops.GroupedConv)):
                self._emit(steps.Project((*x, *residual), writes, stack, norm=norm))
            else:
                self._multiply(op, stack, segment)
        else:
            self._multiply(op, stack, segment)

    def _following(self, op: ops.DenseOp) -> tuple[tuple[str, ...], tuple[str, ...], ops.RmsNorm | None]:
        """What goes along with an op: a residual that is read, the tensors then written, and (narrow) a norm."""
        residual, y, readers = tuple[str, ...](), op.output, self._readers[op.output]
        if len(readers) == 1 and isinstance(add := readers[0], ops.Add):
            other = add.inputs[0] if add.inputs[1] == y else add.inputs[1]
            if other in self._done:
                residual, y = (other,), add.output
        norms = [r for r in self._readers.get(y, ()) if isinstance(r, ops.RmsNorm)]
        if self._wide or len(norms) != 1 or self._columns[y] % 2:
            return residual, (y,), None
        return residual, (y, norms[0].output), norms[0]

    def _multiply(self, op: ops.Linear, stack: Stack, segment: Segment) -> None:
        """A stack with all its outputs; the gates' BF16 stack goes along with another one on the same input."""
        side = None
        if not self._wide and self._module(stack) != "gates":
            same_input = {
                self._stacks[other.weight].key: self._stacks[other.weight]
                for other in segment.dense
                if isinstance(other, ops.Linear) and other.inputs == op.inputs and other.output not in self._done
            }
            small = [s for s in same_input.values() if self._module(s) == "gates" and s.layout.format == "bf16"]
            side = small[0] if len(small) == 1 and small[0].key != stack.key else None
        parts = (stack,) if side is None else (stack, side)
        written = [name for part in parts for name in self._outputs(part, op.inputs[0], segment)]
        self._emit(steps.Multiply(op.inputs, tuple(written), stack, side))

    def _outputs(self, stack: Stack, x: str, segment: Segment) -> list[str]:
        """Tensors that a stack's launch writes: its own outputs, or one tensor of which they are slices."""
        made = {op.weight: op.output for op in segment.dense if isinstance(op, ops.Linear) and op.inputs[0] == x}
        names = [made[weight] for weight in stack.names]
        if len(names) == 1 or not stack.joined:
            return names
        column = 0
        for name, width in zip(names, stack.layout.columns, strict=True):
            self._out.slices[name] = (stack.key, column)
            self._made(name)
            column += width
        self._columns[stack.key] = column
        return [stack.key]

    def _module(self, stack: Stack) -> str:
        return self._program.weights[stack.names[0]].module

    def _norm(self, op: ops.RmsNorm) -> None:
        if self._out.steps and isinstance(last := self._out.steps[-1], steps.Gather) and last.writes == op.inputs:
            self._out.steps.pop()
            self._emit(steps.Gather((), (*last.writes, op.output), last.weight, norm=op))
            return
        self._emit(steps.Normalise(op.inputs, (op.output,), op))
        if op.inputs[0] in self._out.single:
            self._out.single.add(op.output)

    def _concat(self, op: ops.Concat) -> None:
        self._made(op.output)
        widths = [self._columns[name] for name in op.inputs]
        starts = {f"{op.output}[{i}]": sum(widths[:i]) for i in range(len(widths))}  # of each part
        self._out.slices |= {part: (op.output, column) for part, column in starts.items()}
        self._columns |= dict(zip(starts, widths, strict=True))
        self._emit(steps.Copy(op.inputs, tuple(starts)))

    def _select(self, op: ops.SelectRows) -> None:
        if op.which == "last":
            self._out.single.add(op.output)
            self._emit(steps.Last(op.inputs, (op.output,)))
        else:  # every row goes through the head; row 0, the anchor's, is left out when the result is read
            self._out.slices[op.output] = (op.inputs[0], 0)
            self._made(op.output)


def strides_of_blocks(schedule: Schedule, window: Callable[[Stack], int]) -> dict[str, int]:
    """Row strides of the root tensors in blocks, the order in which kernels/linear_hopper.cu multiplies them.

    Such a tensor is copied to shared memory as it lies. Everybody who writes it takes the order, and nobody but linears
    of one window reads it; all others lie in rows. A Matrix in blocks has a row stride below 0: minus the window.
    ``window``: of the order that a stack's kernel reads; 0: rows.
    """
    ways: dict[str, set[int]] = {}  # windows that readers want; 0 of everybody who takes rows only
    written: set[str] = set()

    def see(name: str, way: int) -> str:
        root, column = schedule.place(name)
        whole = column == 0 and schedule.widths[name] == schedule.columns[root]
        ways.setdefault(root, set()).add(way if whole else 0)
        return root

    for step in schedule.steps:
        x, free = _forms(step, window)
        for i, name in enumerate(step.reads):
            see(name, 0 if i else x)
        for name in step.writes:
            if name == free:
                written.add(see(name, -1))
            else:
                see(name, 0)
    kept = {*schedule.program.outputs.values(), *schedule.single}
    found = {}
    for root in written - {schedule.place(name)[0] for name in kept}:
        windows = ways[root] - {-1}
        if len(windows) == 1 and 0 not in windows and schedule.columns[root] % BLOCK_K == 0:
            found[root] = -windows.pop()
    return found


def _forms(step: PassStep, window: Callable[[Stack], int]) -> tuple[int, str | None]:
    """The window in which a step wants its first tensor, and the tensor that it writes in any order."""
    x = window(step.stack) if isinstance(step, steps.Multiply | steps.Head | steps.Project) else 0
    match step:
        case steps.Multiply() if x and step.stack.layout.swiglu:
            return x, step.writes[0]
        case steps.Convolve(reads=(_, _), norm=None) | steps.Normalise() | steps.State(op=ops.GatedDelta()):
            return 0, step.writes[0]
        case steps.BeforeNorm() if step.norm:
            return x, step.writes[1]
        case _:
            return x, None


def place(schedule: Schedule, rows: int, kept: Collection[str] = ()) -> tuple[dict[str, Placement], int]:
    """Places of all root tensors for passes of ``rows`` (as allocated), and the arena's size.

    Tensors ``kept`` stay as they are until the pass has ended.
    """
    lives = _lives(schedule)
    for name in kept:
        root, _ = schedule.place(name)
        lives[root] = lives[root][0], len(schedule.steps)
    places: dict[str, Placement] = {}
    size = 0
    for name in sorted(lives, key=lambda n: lives[n]):
        stride = -(-schedule.columns[name] // PADDING) * PADDING
        nbytes = aligned(2 * rows * stride)
        first, last = lives[name]
        meeting = (places[other] for other in places if first <= lives[other][1] and lives[other][0] <= last)
        offset = 0
        for begin, end in sorted((other.offset, other.offset + other.nbytes) for other in meeting):
            if offset + nbytes <= begin:
                break
            offset = max(offset, end)
        places[name] = Placement(offset, stride, nbytes)
        size = max(size, offset + nbytes)
    return places, size


def _lives(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last step that touches each tensor; logits lie elsewhere."""
    lives: dict[str, tuple[int, int]] = {}
    logits = schedule.program.outputs.get("logits")
    for index, step in enumerate(schedule.steps):
        for name in (*step.reads, *step.writes):
            root, _ = schedule.place(name)
            if root != logits:
                first, _ = lives.get(root, (index, index))
                lives[root] = (first, index)
    return lives
