"""The TensorRT backend's run time with our kernels in the place of engines: everything of it but execute_async_v3.

Each run of an engine becomes one launch (or two) for each of its ops, on the tensors at the addresses where the engine
would be bound: rows without gaps. Tensors inside a unit, and outputs whose rows are no multiple of 16 values, lie
beside.
Blocks have 16 or 32 rows here, because these kernels write so many.
"""

from dataclasses import dataclass, field, replace

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.kernels.linear import Linears
from edge_dflash.backends.cuda.memory import PADDING, Placement, aligned
from edge_dflash.backends.cuda.passes import Pass, PassBase
from edge_dflash.backends.cuda.schedule import Schedule
from edge_dflash.backends.cuda.steps import Columns, Copy, Head, Multiply, Normalise
from edge_dflash.backends.cuda.tensorrt.dense import layout_of
from edge_dflash.backends.cuda.tensorrt.units import LOGITS, RunEngine, pair_units
from edge_dflash.model.ops import Add, Concat, Linear, RmsNorm, SwiGlu
from edge_dflash.weights.layout import Layout
from edge_dflash.weights.stacks import STREAMED, Stack


@dataclass
class Expanded:
    """A pass's schedule and places with the tensors that engines keep to themselves, and the launches of each plan."""

    schedule: Schedule
    places: dict[str, Placement]
    end: int  # of the arena
    rows: int
    steps: dict[RunEngine, list] = field(default_factory=dict)

    def inside(self, name, columns):
        """Memory behind the arena for a tensor of its own."""
        self.schedule.widths[name] = self.schedule.columns[name] = columns
        stride = -(-columns // PADDING) * PADDING
        nbytes = aligned(2 * self.rows * stride)
        self.places[name] = Placement(self.end, stride, nbytes)
        self.end += nbytes


class SegmentPass(PassBase):
    """A pass of the TensorRT mode; ``steps``: the launches of each run of an engine."""

    def __init__(self, common, name, launches, steps):
        super().__init__(common, name)
        self.launches, self.steps = launches, steps

    def _dense(self, step, logits):
        for each in self.steps[step]:
            self.launches._dense(each, True)


class NativeSegments:
    """Takes the place of EngineOps."""

    most_rows = 0  # as engines, which are built for the rows of one slot

    def __init__(self, weights, cubin):
        self._weights, self._cubin = weights, cubin

    def lay_out(self, programs, precision, sizes):
        assert sizes.rows in (16, 32)
        self._pair = pair_units(programs, self._weights.formats, sizes.rows, sizes.prefill_rows)
        self._specs, self._stacks = programs.weights, {}
        layout = layout_of(programs, precision, sizes, self._pair)
        self._expanded = {name: self._expand(layout, name) for name in layout.schedules}
        arena = max(each.end for each in self._expanded.values())
        return replace(layout, arena_bytes=arena)

    def open(self, gpu, layout):
        self._gpu, self._linears = gpu, Linears(gpu, self._cubin)
        (head,) = [s for s in self._stacks.values() if s.names == ("target.lm_head",)]
        return self._linears.choose(head.layout, layout.sizes.rows).rank_bytes

    def close(self):
        pass

    def count(self, memory):
        memory.count("target weights", sum(stack.layout.nbytes for stack in self._stacks.values()))

    def load(self, memory, common):
        for unit in self._pair.units.values():
            for op in unit.ops:
                if isinstance(op, RmsNorm):
                    common.states.norm(op.weight, plus_one=op.plus_one)
        self.count(memory)
        loaded = {key: self._weights.stack(self._gpu, stack) for key, stack in self._stacks.items()}
        return {name: self._pass(name, common, loaded) for name in self._expanded}

    def _pass(self, name, common, loaded):
        each, layout = self._expanded[name], common.layout
        schedules, places = layout.schedules | {name: each.schedule}, layout.places | {name: each.places}
        beside = replace(common, layout=replace(layout, schedules=schedules, places=places))
        return SegmentPass(common, name, Pass(beside, name, self._linears, loaded), each.steps)

    def _expand(self, layout, name):
        old, rows = layout.schedules[name], max(layout.sizes.of_pass(name), layout.sizes.rows)
        schedule = Schedule(old.program, [], dict(old.columns), dict(old.widths), dict(old.slices), set(old.single))
        found = Expanded(schedule, dict(layout.places[name]), layout.arena_bytes, rows)
        for step in old.steps:
            if isinstance(step, RunEngine):
                names = dict((*step.inputs, *step.outputs))
                found.steps[step] = []
                for op in self._pair.units[step.key].ops:
                    found.steps[step] += self._launches(op, names, found)
        return found

    def _launches(self, op, names, found):
        """Steps of one op; ``names`` turns the unit's tensors into the pass's."""
        reads, out = tuple(names.get(x, x) for x in op.inputs), names.get(op.output, op.output)
        schedule = found.schedule
        width = schedule.widths[out]
        if op.output != LOGITS and schedule.place(out)[0] not in found.places:
            found.inside(out, width)
        match op:
            case Linear() if op.output == LOGITS:
                return [Head(reads, (out,), self._stack(op.weight))]
            case Linear() if width % PADDING and found.places[schedule.place(out)[0]].stride == width:
                found.inside(f"{out} apart", width)
                return [Multiply(reads, (f"{out} apart",), self._stack(op.weight)), Copy((f"{out} apart",), (out,))]
            case Linear():
                return [Multiply(reads, (out,), self._stack(op.weight))]
            case RmsNorm():
                return [Normalise(reads, (out,), op)]
            case Add():
                return [Columns(reads, (out,), Add)]
            case SwiGlu():
                return [Columns(reads, (out,), SwiGlu)]
            case Concat():
                return list(self._copies(reads, out, schedule))
        raise TypeError(type(op).__name__)

    def _copies(self, reads, out, schedule):
        column = 0
        for x in reads:
            part = f"{out}[{column}]"
            schedule.slices[part], schedule.widths[part] = (out, column), schedule.widths[x]
            yield Copy((x,), (part,))
            column += schedule.widths[x]

    def _stack(self, weight):
        n, k = self._specs[weight].shape
        stack = Stack((weight,), Layout(STREAMED[self._weights.formats[weight]], (n,), k, False))
        return self._stacks.setdefault(stack.key, stack)


def scheduled_backend(pair, weights, precision, cubin, **sizes):
    """The pair on the device, with the TensorRT backend's passes and our kernels."""
    return NativeBackend(pair, weights, precision, cubin=cubin, dense=NativeSegments(weights, cubin), **sizes)
