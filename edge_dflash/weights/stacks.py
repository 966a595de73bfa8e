"""Which linears one launch computes: matrices with a common input and format lie behind each other in memory.

Derived from the Programs and the weights' formats alone, so a build and a runtime find the same stacks. A weight that
two passes use with different neighbours (the drafter's k and v) is in two stacks and stored twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Linear, SwiGlu
from edge_dflash.model.program import PairPrograms, Program, WeightSpec
from edge_dflash.weights.formats import FORMATS, TIED, WeightFormat, read_as
from edge_dflash.weights.layout import UNIT_ROWS, Format, Layout

PARTS = 4  # most matrices of a stack with an output each; more need one output for all
STREAMED: Mapping[WeightFormat, Format] = {
    word: cast(Format, read_as(word).streamed)
    for word in (*sorted(FORMATS, key=lambda name: FORMATS[name].bits), TIED)
    if read_as(word).streamed
}


@dataclass(frozen=True)
class Stack:
    """Matrices that one launch reads."""

    names: tuple[str, ...]  # canonical names of the weights, in order
    layout: Layout

    @property
    def key(self) -> str:
        """Name of the stack: its first weight and how many follow."""
        return f"{self.names[0]}+{len(self.names) - 1}"

    @property
    def joined(self) -> bool:
        """Whether the outputs may lie side by side in one matrix."""
        return not self.layout.swiglu and all(n % UNIT_ROWS == 0 for n in self.layout.columns[:-1])


def program_stacks(program: Program, formats: Mapping[str, WeightFormat]) -> tuple[Stack, ...]:
    """Stacks of one pass, in the order of their first op. Raises BackendError for a format without a kernel."""
    gated = {op.inputs for op in program.ops if isinstance(op, SwiGlu)}
    linears = [op for op in program.ops if isinstance(op, Linear)]
    by_output = {op.output: op for op in linears}
    pairs = {name: pair for pair in gated for name in pair}
    groups: dict[tuple[str, ...], list[Linear]] = {}
    for op in linears:
        pair = pairs.get(op.output)
        if pair is not None and _alike([by_output[name] for name in pair], program.weights, formats):
            key: tuple[str, ...] = ("gated", *pair)
        else:
            key = (op.inputs[0], _form(op.weight, formats), program.weights[op.weight].module)
        groups.setdefault(key, []).append(op)
    stacks: list[Stack] = []
    for key, ops in groups.items():
        names = tuple(op.weight for op in ops)
        stacks += [_stack(program, part, formats, swiglu=key[0] == "gated") for part in _parts(names, program.weights)]
    return tuple(stacks)


def pair_stacks(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, Stack]:
    """All stacks of a pair by key; passes share what is equal."""
    found = (
        stack for p in (programs.prefill, programs.verify, programs.propose) for stack in program_stacks(p, formats)
    )
    return {stack.key: stack for stack in found}


def _parts(names: tuple[str, ...], weights: Mapping[str, WeightSpec]) -> list[tuple[str, ...]]:
    """Matrices by stack: all in one when their outputs can lie side by side, else at most PARTS in each."""
    if all(weights[name].shape[0] % UNIT_ROWS == 0 for name in names[:-1]):
        return [names]
    return [names[i : i + PARTS] for i in range(0, len(names), PARTS)]


def _alike(ops: list[Linear], weights: Mapping[str, WeightSpec], formats: Mapping[str, WeightFormat]) -> bool:
    return len({(op.inputs, _form(op.weight, formats), weights[op.weight].shape) for op in ops}) == 1


def _form(name: str, formats: Mapping[str, WeightFormat]) -> Format:
    form = STREAMED.get(formats[name])
    if form is None:
        raise BackendError(f"{name} is stored as {formats[name]!r}, the native kernels take {', '.join(STREAMED)}")
    return form


def _stack(program: Program, names: tuple[str, ...], formats: Mapping[str, WeightFormat], *, swiglu: bool) -> Stack:
    shapes = [program.weights[name].shape for name in names]
    layout = Layout(_form(names[0], formats), tuple(shape[0] for shape in shapes), shapes[0][1], swiglu)
    return Stack(names, layout)
