"""Walks a TensorRT pass without a device: every tensor that a step reads must have been written whole before it, at the
address that is read, and by nothing else since; every input and output of an engine must be bound exactly once, with
the type, columns and rows that the engine was built for; every op of the Program must have run exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from edge_dflash.backends.cuda.steps import Convolve, Draft, Last, State
from edge_dflash.backends.tensorrt.runs import Address, EnginePass, RunEngine, RunExperts
from edge_dflash.backends.tensorrt.units import CHOICES, LOGITS, Binding, Run, Unit
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import SelectRows

ALIGNMENT = 256  # bytes; what TensorRT asks of an address


@dataclass(frozen=True)
class Range:
    """Bytes of a buffer."""

    buffer: str
    first: int
    stop: int

    def meets(self, other: Range) -> bool:
        """Whether the two have bytes in common."""
        return self.buffer == other.buffer and self.first < other.stop and other.first < self.stop


@dataclass
class Report:
    """What was walked."""

    engines: int = 0
    states: int = 0
    bindings: int = 0
    tensors: set[str] = field(default_factory=set)


def dry_run(units: Mapping[str, Unit], each: EnginePass) -> Report:
    """Walk one pass. ``units``: what each engine says of itself."""
    walk = _Walk(units, each)
    for index in range(len(each.schedule.steps)):
        walk.step(index)
    walk.finish()
    return walk.report


class _Walk:
    def __init__(self, units: Mapping[str, Unit], each: EnginePass) -> None:
        self._units, self._pass = units, each
        self._program = each.schedule.program
        self._where = self._program.name
        self._intact: dict[str, Range] = {"ids": Range("ids", 0, 4 * each.rows)}  # by root tensor
        self._done: list[str] = []  # outputs of ops that ran
        self.report = Report()

    def step(self, index: int) -> None:
        step = self._pass.schedule.steps[index]
        self._where = f"{self._program.name}, step {index}"
        match step:
            case RunEngine():
                self._bindings(step)
                self._reads(tuple(tensor for _, tensor in step.run.reads))
                self._writes(index, tuple(tensor for _, tensor in step.run.writes))
                self._ran(step.run)
            case State():
                self._reads(step.op.inputs)
                self._writes(index, step.writes)
                self._done.append(step.op.output)
                self.report.states += 1
            case Last() | Convolve() | RunExperts():
                self._reads(step.reads)
                self._writes(index, step.writes)
                self._done += step.writes
            case Draft():
                self._reads(step.op.inputs)
                self._done.append(step.op.output)
            case _:
                self._fail(f"{type(step).__name__} is no step of a TensorRT pass")

    def finish(self) -> None:
        """What must be true behind the last step."""
        self._where = self._program.name
        views = [o.output for o in self._program.ops if isinstance(o, SelectRows) and o.output not in self._done]
        wrong = [name for name in views if name not in self._pass.schedule.slices]
        wanted = sorted(op.output for op in self._program.ops)
        found = sorted(self._done + views)
        if wrong or found != wanted:
            differing = wrong or sorted(set(found) ^ set(wanted)) or [n for n in found if found.count(n) > 1]
            self._fail(f"{differing[0]} is not made exactly once")
        for name in (self._program.outputs[LOGITS], CHOICES):
            if name not in self._intact:
                self._fail(f"{name} is not there at the end")

    def _bindings(self, step: RunEngine) -> None:
        unit = self._units.get(step.run.key)
        if unit is None:
            self._fail(f"there is no plan {step.run.key}")
        bound = self._pass.bound(step)
        for sides, run in ((unit.inputs, step.run.reads), (unit.outputs, step.run.writes)):
            names = [name for name, _ in run]
            if sorted(names) != sorted(b.name for b in sides):
                self._fail(f"plan {unit.key} has {[b.name for b in sides]}, bound are {names}")
            for binding in sides:
                self._fits(unit, binding, dict(run)[binding.name])
        addresses = dict(bound.addresses)
        if len(addresses) != len(bound.addresses):
            self._fail(f"plan {unit.key} has a tensor that is bound twice")
        for name, address in addresses.items():
            if address.offset % ALIGNMENT:
                self._fail(f"{name} lies at {address}, wanted a multiple of {ALIGNMENT}")
        if bound.profile >= len(unit.profiles):
            self._fail(f"plan {unit.key} has {len(unit.profiles)} profiles, the pass needs profile {bound.profile}")
        rows, most = unit.profiles[bound.profile], bound.rows or self._pass.rows
        least = most if bound.rows or bound.profile == 0 else 1
        if not rows.low <= least <= most <= rows.high:
            self._fail(f"plan {unit.key} takes {rows.low} to {rows.high} rows, the pass has {least} to {most}")
        self.report.engines += 1
        self.report.bindings += len(addresses)

    def _fits(self, unit: Unit, binding: Binding, tensor: str) -> None:
        found = ("int32", None) if tensor in ("ids", CHOICES) else ("bf16", self._pass.schedule.widths.get(tensor))
        if (binding.dtype, binding.columns) != found:
            self._fail(
                f"{unit.key}.{binding.name} is {binding.dtype} of {binding.columns} columns, {tensor} is {found}"
            )

    def _reads(self, tensors: tuple[str, ...]) -> None:
        for tensor in tensors:
            root, where = self._range(tensor)
            if self._intact.get(root) != where:
                self._fail(f"{tensor} is read, but it is not there: it was not written yet, or written over")

    def _writes(self, index: int, tensors: tuple[str, ...]) -> None:
        later = self._read_from(index)
        fresh = {self._range(tensor)[0] for tensor in tensors}
        for tensor in tensors:
            root, where = self._range(tensor)
            for other, taken in list(self._intact.items()):
                if other != root and where.meets(taken):
                    if other in later or other in fresh:
                        self._fail(f"{tensor} is written over {other}, which is still needed")
                    del self._intact[other]
            if root in self._intact:
                self._fail(f"{tensor} is written twice")
            self._intact[root] = where
            self.report.tensors.add(root)

    def _ran(self, run: Run) -> None:
        """Note the ops of an engine by the tensors that they make in this pass."""
        tensors = dict(run.writes)
        self._done += [tensors.get(op.output, op.output) for op in self._units[run.key].ops]

    def _read_from(self, index: int) -> set[str]:
        """Tensors with memory that this step or a later one reads, or the pass gives back."""
        steps = self._pass.schedule.steps[index:]
        read = {self._pass.schedule.place(name)[0] for step in steps for name in step.reads}
        return read | {self._program.outputs[LOGITS], CHOICES, "ids"}

    def _range(self, tensor: str) -> tuple[str, Range]:
        """Root tensor that holds a tensor, and all its bytes."""
        address: Address = self._pass.address(tensor)
        if address.buffer != "arena":
            return (self._program.outputs[LOGITS] if address.buffer == "logits" else address.buffer), Range(
                address.buffer, address.offset, address.offset + 4 * self._pass.rows
            )
        root, _ = self._pass.schedule.place(tensor)
        place, columns = self._pass.places[root], self._pass.schedule.columns[root]
        size = 2 * columns * max(self._pass.rows, self._pass.block)
        if place.stride != columns or size > place.nbytes or place.offset + place.nbytes > self._pass.arena:
            self._fail(f"{root} has {size} bytes without gaps, its place is {place} in {self._pass.arena} bytes")
        return root, Range("arena", place.offset, place.offset + size)

    def _fail(self, what: str) -> NoReturn:
        raise BackendError(f"{self._where}: {what}; the schedule is wrong, report it")
