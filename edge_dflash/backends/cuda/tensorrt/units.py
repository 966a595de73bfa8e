"""Which dense ops of a pair become one engine, and the steps of its passes. Pure, no TensorRT.

The steps are the native engine's, with runs of engines in the place of launches of linears, norms and elementwise ops.
A segment becomes one engine, or several between the convolutions and experts in it, which are our kernels'. The output
head is an engine by itself, because all passes and both models read it; the embedding is gathered by a kernel. No
weight but the drafter's k and v (which two passes use with different neighbours) is in two engines. Prefill and verify
share engines; to that end the final norm of a prefill runs before its last row is selected, which for an op that works
row by row is the same. SelectRows is no layer: the run time copies the last row, and drafts are read from the second
row on. So the head always runs on as many rows as a verify pass has, by one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.backends.cuda import steps
from edge_dflash.backends.cuda.kernels.tower import most_patches
from edge_dflash.backends.cuda.schedule import Schedule
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.bundle.manifest import ENGINES
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import DenseOp, Embed, Experts, GroupedConv, RmsNorm, SelectRows, Walk
from edge_dflash.model.program import PairPrograms, Program, Segment, segments
from edge_dflash.model.specs import PairSpec, VisionSpec
from edge_dflash.weights.formats import WeightFormat
from edge_dflash.weights.stacks import expert_stacks

HEAD, TOWER = "head", "vision"
STATE_UNITS = ("attend", "conv", "cycle", "delta", "sample", "small", "walk")
"""Compilation units of kernels that run between engines."""
BEST_PATCHES = 1900  # what a tower's engine is fastest with: a picture of 800 x 600
_TOWER_INPUTS: Mapping[str, Literal["bf16", "f32", "int32"]] = {
    "patches": "bf16",
    "corners": "int32",
    "shares": "f32",
    "cos": "f32",
    "sin": "f32",
}
HEAD_INPUT, LOGITS, CHOICES = "rows", "logits", "choices"


@dataclass(frozen=True)
class Binding:
    """An input or output of an engine. ``columns`` None is a vector [rows]; else [rows, columns], rows without gaps."""

    name: str
    dtype: Literal["bf16", "f32", "int32"]
    columns: int | None


@dataclass(frozen=True)
class RowRange:
    """Rows of an optimization profile: fewest, those to be fastest with, most."""

    low: int
    best: int
    high: int


@dataclass(frozen=True)
class Unit:
    """Dense ops of one engine, what goes in and out, and the rows it runs with. Profile 0 is that of a block."""

    key: str
    ops: tuple[DenseOp, ...]
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    profiles: tuple[RowRange, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """Canonical names of the weights in the engine."""
        return tuple(dict.fromkeys(name for op in self.ops for name in op.weights))


@dataclass(frozen=True)
class RunEngine(PassStep):
    """An engine on tensors of the pass. ``reads`` and ``writes`` are those in the arena, and the logits."""

    key: str
    inputs: tuple[tuple[str, str], ...]  # (name in the engine, tensor of the pass)
    outputs: tuple[tuple[str, str], ...]
    profile: int
    rows: int  # most of the pass; of the head always a block

    @property
    def label(self) -> str:
        """What profiles call it."""
        return f"plan {self.key}"


@dataclass(frozen=True)
class PairUnits:
    """Engines of a pair by key, and the steps of each pass (by name)."""

    units: Mapping[str, Unit]
    schedules: Mapping[str, Schedule]


def pair_units(
    programs: PairPrograms,
    formats: Mapping[str, WeightFormat],
    block_rows: int,
    prefill_chunk: int,
    draft_rows: int | None = None,
) -> PairUnits:
    """Cut a pair into engines; ``block_rows`` of a verify, ``draft_rows`` of a propose pass. Raises BackendError."""
    draft_rows = draft_rows or block_rows
    block, chunk = RowRange(block_rows, block_rows, block_rows), RowRange(1, prefill_chunk, prefill_chunk)
    drafts = RowRange(draft_rows, draft_rows, draft_rows)
    units: dict[str, Unit] = {}
    schedules: dict[str, Schedule] = {}
    for program, rows, profiles in (
        (programs.prefill, prefill_chunk, (block, chunk)),
        (programs.verify, block_rows, (block, chunk)),
        (programs.propose, draft_rows, (drafts,)),
    ):
        cut = _Cut(norms_before_rows(program), formats, rows, profiles, block)
        schedules[program.name] = cut.run()
        for unit in cut.units:
            known = units.setdefault(unit.key, unit)
            if known.ops != unit.ops or known.outputs != unit.outputs:
                raise BackendError(f"{program.name}: plan {unit.key} differs from that of another pass; make it two")
    return PairUnits(units, schedules)


def engine_file(key: str) -> str:
    """Path of an engine in a bundle."""
    return f"{ENGINES}{key}.plan"


def bundle_units(pair: PairSpec, formats: Mapping[str, WeightFormat], prefill_chunk: int) -> PairUnits:
    """Dense ops of a pair as units, and the tower of one that sees. Raises BackendError."""
    programs, vision = pair_programs(pair), pair.target.vision
    found = pair_units(programs, formats, pair.verify_rows, prefill_chunk, pair.block_size)
    if vision is None or programs.see is None:
        return found
    return replace(found, units={**found.units, TOWER: tower_unit(vision, programs.see)})


def tower_unit(spec: VisionSpec, program: Program) -> Unit:
    """The whole pass ``see`` as one engine; its rows are patches, and rows of the language model in what it gives."""
    inputs = tuple(Binding(name, _TOWER_INPUTS[name], program.columns[name]) for name in program.inputs)
    most = most_patches(spec)
    patches = RowRange(spec.patches.merge**2, min(BEST_PATCHES, most), most)
    outputs = (Binding(program.outputs["rows"], "bf16", spec.out),)
    ops = tuple(op for op in program.ops if isinstance(op, DenseOp))
    return Unit(TOWER, ops, inputs, outputs, (patches,))


def engine_units(units: Mapping[str, Unit]) -> dict[str, Unit]:
    """Units by the path of their engine; the head, which takes longest to build, is first."""
    return {engine_file(key): units[key] for key in sorted(units, key=lambda key: key != HEAD)}


def norms_before_rows(program: Program) -> Program:
    """The same pass with every RmsNorm of selected rows moved before the selection (both work row by row)."""
    ops = list(program.ops)
    renamed: dict[str, str] = {}
    for index, op in enumerate(ops):
        readers = [other for other in ops if op.output in other.inputs]
        if isinstance(op, SelectRows) and len(readers) == 1 and isinstance(readers[0], RmsNorm):
            norm, at = readers[0], ops.index(readers[0])
            ops[index] = replace(norm, inputs=op.inputs)
            ops[at] = replace(op, inputs=(norm.output,))
            renamed[norm.output] = op.output
            for later in range(at + 1, len(ops)):
                ops[later] = replace(ops[later], inputs=tuple(renamed.get(name, name) for name in ops[later].inputs))
    outputs = {role: renamed.get(name, name) for role, name in program.outputs.items()}
    return replace(program, ops=tuple(ops), outputs=outputs)


class _Cut:
    """One pass: its engines, and its steps."""

    def __init__(
        self,
        program: Program,
        formats: Mapping[str, WeightFormat],
        rows: int,
        profiles: tuple[RowRange, ...],
        block: RowRange,
    ) -> None:
        self._program, self._rows, self._profiles, self._block = program, rows, profiles, block
        self._experts = expert_stacks(program, formats)
        self._out = Schedule(program, widths=dict(program.columns))
        self._made: set[str] = set()  # root tensors that exist by now
        self.units: list[Unit] = []

    def run(self) -> Schedule:
        for level, segment in enumerate(segments(self._program)):
            self._dense(level, segment)
            for op in segment.state:
                self._emit(steps.State(op.inputs, (op.output,) if self._program.columns[op.output] else (), op))
        return self._out

    def _dense(self, level: int, segment: Segment) -> None:
        body, number, last = list[DenseOp](), 0, list[DenseOp]()
        for op in segment.dense:
            match op:
                case Embed():
                    self._emit(steps.Gather((), (op.output,), op.weight))
                case GroupedConv() | Experts():
                    self._engine(level, number, body)
                    body, number = [], number + 1
                    self._ours(op)
                case _ if isinstance(op, SelectRows | Walk) or op.output == self._program.outputs.get("logits"):
                    last.append(op)
                case _:
                    body.append(op)
        self._engine(level, number, body)
        for op in last:
            self._last(op)

    def _ours(self, op: GroupedConv | Experts) -> None:
        if isinstance(op, GroupedConv):
            self._emit(steps.Convolve(op.inputs, (op.output,), op))
        else:
            self._emit(steps.Mix(op.inputs, (op.output,), op, *self._experts[op.output]))

    def _last(self, op: DenseOp) -> None:
        """Selected rows, the head, the walk."""
        match op:
            case SelectRows(which="drafts"):  # the head runs on every row; row 0 is left out when its result is read
                self._out.slices[op.output] = (op.inputs[0], 0)
            case SelectRows():
                self._out.single.add(op.output)
                self._emit(steps.Last(op.inputs, (op.output,)))
            case Walk():
                self._emit(steps.Draft(op.inputs[:1], (), op, int(op.inputs[0] in self._out.slices)))
            case _:
                self._head(op)

    def _engine(self, level: int, number: int, ops: Sequence[DenseOp]) -> None:
        """An engine of ``ops``, which read each other and tensors of the pass under their own names."""
        if not ops:
            return
        made, inside = [op.output for op in ops], {id(op) for op in ops}
        read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
        outside = {name for op in self._program.ops if id(op) not in inside for name in op.inputs}
        inputs, outputs = (
            tuple(Binding(name, "bf16", self._program.columns[name]) for name in names)
            for names in (read, [name for name in made if name in outside])
        )
        model = "drafter" if self._program.name == "propose" else "target"
        key = f"{model}-{level:03d}-{number}" if number else f"{model}-{level:03d}"
        self._run(Unit(key, tuple(ops), inputs, outputs, self._profiles), int(self._program.commits), self._rows)

    def _head(self, op: DenseOp) -> None:
        """Logits and the lowest id of each row's largest. A prefill runs it on a block too, of which row 0 counts."""
        own, columns = replace(op, inputs=(HEAD_INPUT,), output=LOGITS), self._program.columns
        inputs = (Binding(HEAD_INPUT, "bf16", columns[op.inputs[0]]),)
        outputs = (Binding(LOGITS, "bf16", columns[op.output]), Binding(CHOICES, "int32", None))
        names = {HEAD_INPUT: op.inputs[0], LOGITS: op.output}
        self._run(Unit(HEAD, (own,), inputs, outputs, (self._block,)), 0, self._block.high, names)

    def _run(self, unit: Unit, profile: int, rows: int, names: Mapping[str, str] = {}) -> None:
        """Run an engine. ``names``: of the pass's tensors, where they have others in the engine."""
        self.units.append(unit)
        inputs, outputs = (
            tuple((binding.name, names.get(binding.name, binding.name)) for binding in side)
            for side in (unit.inputs, unit.outputs)
        )
        reads, writes = (tuple(name for _, name in side if name != CHOICES) for side in (inputs, outputs))
        self._emit(RunEngine(reads, writes, unit.key, inputs, outputs, profile, rows))

    def _emit(self, step: PassStep) -> None:
        """Append a step. Raises BackendError when it reads what no earlier one wrote."""
        if missing := [name for name in step.reads if self._out.place(name)[0] not in self._made]:
            raise BackendError(
                f"{self._program.name}: {missing[0]} is read before it is made: only the head may follow selected rows"
            )
        self._made |= set(step.writes)
        self._out.columns |= {name: self._out.widths[name] for name in step.writes}
        self._out.steps.append(step)
