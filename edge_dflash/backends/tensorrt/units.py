"""Which dense ops become one engine, and the order of engines and state ops in a pass. Pure, no TensorRT.

A segment becomes one engine, or several between the convolutions and experts in it, which are our kernels'. The
embedding and the output head are engines by themselves, because all passes and both models read them: no weight but the
drafter's k and v (which two passes use with different neighbours) is in two engines. Prefill and verify share engines;
to that end the final norm of a prefill runs before its last row is selected, which for an op that works row by row is
the same. SelectRows is no layer: the run time copies the last row, and drafts are read from the second row on. So the
head always runs on as many rows as a verify pass has, by one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.backends.cuda.kernels.tower import most_patches
from edge_dflash.bundle.manifest import ENGINES
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import (
    DenseOp,
    Embed,
    Experts,
    GroupedConv,
    RmsNorm,
    SelectRows,
    StateOp,
    Walk,
)
from edge_dflash.model.program import PairPrograms, Program, segments
from edge_dflash.model.specs import PairSpec, VisionSpec

EMBEDDING, HEAD, TOWER = "embedding", "head", "vision"
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
class Run:
    """One run of an engine: the tensor of the pass that each input and output of the engine is bound to."""

    key: str
    reads: tuple[tuple[str, str], ...]  # (name in the engine, tensor)
    writes: tuple[tuple[str, str], ...]


Own = GroupedConv | Experts
"""Dense ops that our kernels compute between engines."""

PassStep = Run | SelectRows | StateOp | Own | Walk


@dataclass(frozen=True)
class PairUnits:
    """Engines of a pair by key, and of each pass (by name) what runs in which order."""

    units: Mapping[str, Unit]
    passes: Mapping[str, tuple[PassStep, ...]]
    programs: Mapping[str, Program]  # as run: norms before selected rows


def pair_units(programs: PairPrograms, block_rows: int, prefill_chunk: int, draft_rows: int | None = None) -> PairUnits:
    """Cut a pair into engines. ``block_rows``: of a verify pass; ``draft_rows``: of a propose pass, if others.

    Raises BackendError.
    """
    block, chunk = RowRange(block_rows, block_rows, block_rows), RowRange(1, prefill_chunk, prefill_chunk)
    drafts = block if draft_rows is None else RowRange(draft_rows, draft_rows, draft_rows)
    gathered = replace(block, low=min(drafts.low, block.low)), chunk
    units: dict[str, Unit] = {}
    passes: dict[str, tuple[PassStep, ...]] = {}
    run = {}
    of_target, of_drafter = (block, chunk), (drafts,)
    for program, profiles in (
        (programs.prefill, of_target),
        (programs.verify, of_target),
        (programs.propose, of_drafter),
    ):
        program = norms_before_rows(program)
        found, steps = _cut(program, profiles, gathered, block)
        for unit in found:
            known = units.setdefault(unit.key, unit)
            if known.ops != unit.ops or known.outputs != unit.outputs:
                raise BackendError(f"{program.name}: plan {unit.key} differs from that of another pass; make it two")
        passes[program.name], run[program.name] = steps, program
    return PairUnits(units, passes, run)


def engine_file(key: str) -> str:
    """Path of an engine in a bundle."""
    return f"{ENGINES}{key}.plan"


def bundle_units(pair: PairSpec, prefill_chunk: int) -> PairUnits:
    """Dense ops of a pair as units, and the tower of one that sees. Raises BackendError."""
    programs, vision = pair_programs(pair), pair.target.vision
    found = pair_units(programs, pair.verify_rows, prefill_chunk, pair.block_size)
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
    """Units that become engines, by path: all but the embedding, whose rows a kernel gathers.

    The head is first: its engine takes longest to build, and nothing should wait for it in the end.
    """
    found = {engine_file(key): unit for key, unit in units.items() if key != EMBEDDING}
    return dict(sorted(found.items(), key=lambda item: item[1].key != HEAD))


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


def _cut(
    program: Program, profiles: tuple[RowRange, ...], gathered: tuple[RowRange, ...], block: RowRange
) -> tuple[list[Unit], tuple[PassStep, ...]]:
    units: list[Unit] = []
    steps: list[PassStep] = []
    model = "drafter" if program.name == "propose" else "target"
    for level, segment in enumerate(segments(program)):
        parts: list[list[DenseOp]] = [[]]  # of the segment: ops of an engine each
        between: list[Own] = []  # behind each part but the last
        behind: list[PassStep] = []
        for op in segment.dense:
            if isinstance(op, Embed):
                units.append(_embedding(op, program.columns, gathered))
                steps.append(Run(EMBEDDING, (("ids", "ids"),), ((units[-1].outputs[0].name, op.output),)))
            elif isinstance(op, SelectRows | Walk):
                behind.append(op)
            elif isinstance(op, Own):
                between.append(op)
                parts.append([])
            elif op.output == program.outputs.get("logits"):
                units.append(_head(op, program.columns, block))
                behind.append(Run(HEAD, ((HEAD_INPUT, op.inputs[0]),), ((LOGITS, op.output), (CHOICES, CHOICES))))
            else:
                parts[-1].append(op)
        for number, body in enumerate(parts):
            if body:
                key = f"{model}-{level:03d}-{number}" if number else f"{model}-{level:03d}"
                units.append(_body(key, body, program, profiles))
                names = [tuple((b.name, b.name) for b in side) for side in (units[-1].inputs, units[-1].outputs)]
                steps.append(Run(units[-1].key, names[0], names[1]))
            steps += between[number : number + 1]
        steps += [*behind, *segment.state]
    _check_order(program, units, steps)
    return units, tuple(steps)


def _embedding(op: Embed, columns: Mapping[str, int], profiles: tuple[RowRange, ...]) -> Unit:
    own = replace(op, inputs=("ids",), output=EMBEDDING)
    outputs = (Binding(EMBEDDING, "bf16", columns[op.output]),)
    return Unit(EMBEDDING, (own,), (Binding("ids", "int32", None),), outputs, profiles)


def _head(op: DenseOp, columns: Mapping[str, int], block: RowRange) -> Unit:
    """Logits and the lowest id of each row's largest. A prefill runs it on a block too, of which row 0 counts."""
    own = replace(op, inputs=(HEAD_INPUT,), output=LOGITS)
    outputs = (Binding(LOGITS, "bf16", columns[op.output]), Binding(CHOICES, "int32", None))
    return Unit(HEAD, (own,), (Binding(HEAD_INPUT, "bf16", columns[op.inputs[0]]),), outputs, (block,))


def _body(key: str, ops: list[DenseOp], program: Program, profiles: tuple[RowRange, ...]) -> Unit:
    made = [op.output for op in ops]
    inside = {id(op) for op in ops}
    read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
    outside = {name for op in program.ops if id(op) not in inside for name in op.inputs}

    def bindings(names: list[str]) -> tuple[Binding, ...]:
        return tuple(Binding(name, "bf16", program.columns[name]) for name in names)

    return Unit(key, tuple(ops), bindings(list(read)), bindings([n for n in made if n in outside]), profiles)


def _check_order(program: Program, units: list[Unit], steps: list[PassStep]) -> None:
    """Raise BackendError when a step reads what no earlier one wrote: an op behind the head or behind selected rows."""
    there = {"ids"}
    for step in steps:
        reads = [tensor for _, tensor in step.reads] if isinstance(step, Run) else list(step.inputs)
        if missing := [name for name in reads if name not in there]:
            raise BackendError(
                f"{program.name}: {missing[0]} is read before it is made: only the head may follow selected rows"
            )
        there |= {tensor for _, tensor in step.writes} if isinstance(step, Run) else {step.output}
