"""Walks a pass with engines without a device.

What a step reads was written whole before it, at the address that is read, and by nothing since; an engine has the rows
and types that it was built for; every op ran exactly once.
"""

from dataclasses import dataclass

from edge_dflash.backends.cuda.steps import Draft, Gather
from edge_dflash.backends.cuda.tensorrt.units import CHOICES, LOGITS, RunEngine
from edge_dflash.model.ops import SelectRows

ALIGNMENT = 256  # bytes; what TensorRT asks of an address


def address(schedule, places, tensor):
    """Where a tensor of a pass lies: in "arena", "logits" or "choices", and how many bytes from its start."""
    root, column = schedule.place(tensor)
    if tensor == CHOICES or root == schedule.program.outputs[LOGITS]:
        return ("choices" if tensor == CHOICES else "logits"), 0
    return "arena", places[root].offset + 2 * column


@dataclass(frozen=True)
class Range:
    """Bytes of a buffer."""

    buffer: str
    first: int
    stop: int

    def meets(self, other):
        return self.buffer == other.buffer and self.first < other.stop and other.first < self.stop


def dry_run(units, layout, which):
    """Walk one pass; AssertionError says what is wrong."""
    _Walk(units, layout, which).run()


class _Walk:
    def __init__(self, units, layout, which):
        self.units, self.schedule, self.places = units, layout.schedules[which], layout.places[which]
        self.rows, self.block, self.arena = layout.sizes.of_pass(which), layout.sizes.rows, layout.arena_bytes
        self.intact, self.done = {}, []  # ranges by root tensor; outputs of ops that ran

    def run(self):
        for index, step in enumerate(self.schedule.steps):
            reads, writes = step.reads, step.writes
            if isinstance(step, RunEngine):
                self.engine(step)
                writes = tuple(tensor for _, tensor in step.outputs)
            for tensor in step.op.inputs if isinstance(step, Draft) else reads:
                root, where = self.range(tensor)
                assert self.intact.get(root) == where, f"{tensor} is not there: not written yet, or written over"
            self.write(index, writes)
            if not isinstance(step, RunEngine):
                self.done += step.writes if not hasattr(step, "op") or isinstance(step, Gather) else [step.op.output]
        program = self.schedule.program
        views = [o.output for o in program.ops if isinstance(o, SelectRows) and o.output in self.schedule.slices]
        assert sorted([*self.done, *views]) == sorted(op.output for op in program.ops), "not once each"
        assert {program.outputs[LOGITS], CHOICES} <= self.intact.keys()

    def engine(self, step):
        unit, program = self.units[step.key], self.schedule.program
        bound = dict((*step.inputs, *step.outputs))
        assert len(bound) == len(unit.inputs) + len(unit.outputs)
        for binding in (*unit.inputs, *unit.outputs):
            tensor = bound[binding.name]
            wanted = ("int32", None) if tensor == CHOICES else ("bf16", self.schedule.widths[tensor])
            assert (binding.dtype, binding.columns) == wanted, f"{unit.key}.{binding.name} for {tensor}"
            assert self.range(tensor)[1].first % ALIGNMENT == 0, f"{tensor} is not aligned"
        rows = unit.profiles[step.profile]
        least = 1 if program.commits and step.rows == self.rows else step.rows
        assert rows.low <= least <= step.rows <= rows.high
        assert step.rows == (self.block if program.outputs[LOGITS] in step.writes else self.rows)
        self.done += [bound.get(op.output, op.output) for op in unit.ops]

    def write(self, index, tensors):
        later = {self.schedule.place(name)[0] for step in self.schedule.steps[index:] for name in step.reads}
        later |= {self.schedule.program.outputs[LOGITS], CHOICES, *(self.range(name)[0] for name in tensors)}
        for tensor in tensors:
            root, where = self.range(tensor)
            for other, taken in list(self.intact.items()):
                if other != root and where.meets(taken):
                    assert other not in later, f"{tensor} is written over {other}, which is still needed"
                    del self.intact[other]
            assert root not in self.intact, f"{tensor} is written twice"
            self.intact[root] = where

    def range(self, tensor):
        """Root tensor that holds a tensor, and all its bytes."""
        buffer, _ = address(self.schedule, self.places, tensor)
        if buffer != "arena":
            return self.schedule.program.outputs[LOGITS] if buffer == "logits" else CHOICES, Range(buffer, 0, 1)
        root, _ = self.schedule.place(tensor)
        place, columns = self.places[root], self.schedule.columns[root]
        size = 2 * columns * max(self.rows, self.block)
        assert place.stride == columns, f"{root} has gaps"
        assert size <= place.nbytes, f"{root} has too little room"
        assert place.offset + place.nbytes <= self.arena, f"{root} is past the arena"
        return root, Range("arena", place.offset, place.offset + size)
