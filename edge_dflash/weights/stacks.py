"""Which linears one launch computes: matrices with a common input and format follow each other in memory.

Derived from the Programs and the weights' formats alone, so a build and a runtime find the same stacks. A weight that
two passes use with different neighbours (the drafter's k and v) is in two stacks and stored twice.

The experts of a mixture are one :class:`ExpertStack` of gate and up and one of down: launches find an expert by its
place in one array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Experts, Linear, SwiGlu
from edge_dflash.model.program import PairPrograms, Program, WeightSpec
from edge_dflash.weights.formats import BLOCK, FORMATS, TIED, Weight, WeightFormat, read_as
from edge_dflash.weights.layout import UNIT_ROWS, Format, Layout, Repacked, joined, member, unpack_matrix

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

    @property
    def members(self) -> int:
        """Stacks of :attr:`layout` in the array."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.members * self.layout.nbytes

    @property
    def rows(self) -> int:
        """Rows with those that fill units up: as many as factors of sums."""
        return self.members * self.layout.units * UNIT_ROWS


@dataclass(frozen=True)
class ExpertStack(Stack):
    """Gate and up, or down, of a layer's experts: a stack for each, its *member*, one after the other in one array.

    Names are those of each expert, then of the shared one; the layout is that of a member. A shared expert that is
    ``parts`` times as wide is the last ``parts`` members: slices of its gate and up rows, and of its down columns,
    whose products add up to its own.
    """

    experts: int  # members before those of the shared expert
    parts: int  # 0: no shared expert

    @property
    def members(self) -> int:
        """Stacks of :attr:`layout` in the array."""
        return self.experts + self.parts

    def expert(self, index: int) -> tuple[str, ...]:
        """Names of an expert's matrices: gate and up, or down. The last index is the shared one's."""
        each = len(self.layout.columns)
        return self.names[index * each : (index + 1) * each]


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
    """All stacks of a pair but its tower's and its experts' by key; passes share what is equal."""
    return {stack.key: stack for one in _passes(programs) for stack in program_stacks(one, formats)}


def expert_stacks(program: Program, formats: Mapping[str, WeightFormat]) -> dict[str, tuple[ExpertStack, ExpertStack]]:
    """Gate and up, and down, of each mixture of a pass, by the output of its op. Raises BackendError."""
    return {op.output: _experts(op, program.weights, formats) for op in program.ops if isinstance(op, Experts)}


def pair_experts(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, ExpertStack]:
    """All of a pair by key; passes share them."""
    found = (pair for one in _passes(programs) for pair in expert_stacks(one, formats).values())
    return {stack.key: stack for pair in found for stack in pair}


def _passes(programs: PairPrograms) -> tuple[Program, ...]:
    return (programs.prefill, programs.verify, programs.propose)


def _experts(
    op: Experts, weights: Mapping[str, WeightSpec], formats: Mapping[str, WeightFormat]
) -> tuple[ExpertStack, ExpertStack]:
    inner, hidden = weights[op.gates[0]].shape
    wide = weights[op.shared.gate].shape[0] if op.shared else 0
    if inner % BLOCK or wide % inner:
        raise BackendError(
            f"{op.gates[0]} has {inner} rows, the shared expert {wide}; the native kernels need a multiple of {BLOCK}, "
            "and a shared expert as wide as some of the others together"
        )
    pairs = tuple(name for pair in zip(op.gates, op.ups, strict=True) for name in pair)
    first = (*pairs, op.shared.gate, op.shared.up) if op.shared else pairs
    second = (*op.downs, op.shared.down) if op.shared else op.downs
    count, parts = len(op.gates), wide // inner
    return (
        ExpertStack(first, Layout(_one_form(first, formats), (inner, inner), hidden, swiglu=True), count, parts),
        ExpertStack(second, Layout(_one_form(second, formats), (hidden,), inner), count, parts),
    )


def _one_form(names: tuple[str, ...], formats: Mapping[str, WeightFormat]) -> Format:
    """The format of all experts of a layer."""
    form = _form(names[0], formats)
    for name in names:
        if (other := _form(name, formats)) != form:
            raise BackendError(
                f"{name} is {other}, {names[0]} is {form}; the native kernels read the experts of a layer, its shared "
                "one with them, in one format: give them one in the recipe, or take a checkpoint that does"
            )
    return form


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
        raise BackendError(
            f"{name} is stored as {formats[name]!r}, the native kernels take {', '.join(STREAMED)}: choose one of them "
            "in the recipe, or build it with --backend reference --arch cpu"
        )
    return form


def _stack(program: Program, names: tuple[str, ...], formats: Mapping[str, WeightFormat], *, swiglu: bool) -> Stack:
    shapes = [program.weights[name].shape for name in names]
    layout = Layout(_form(names[0], formats), tuple(shape[0] for shape in shapes), shapes[0][1], swiglu)
    return Stack(names, layout)


def unpack_weight(stack: Stack, repacked: Repacked, index: int) -> Weight:
    """Weight ``index`` of a stack, as :func:`unpack_matrix`; a shared expert's parts are put together."""
    if not isinstance(stack, ExpertStack):
        return unpack_matrix(repacked, index)
    expert, matrix = divmod(index, len(stack.layout.columns))
    if expert < stack.experts:
        return unpack_matrix(member(repacked, expert), matrix)
    parts = tuple(unpack_matrix(member(repacked, expert + part), matrix) for part in range(stack.parts))
    return joined(parts, axis=0 if stack.layout.swiglu else 1)
