"""Which file of a bundle holds what.

A bundle that the native backend reads holds its linears repacked as stacks, whatever else is aboard: each as the
tensors ``KEY.data`` (bytes) and ``KEY.scale`` (FP32 factors of the rows' sums). Others hold every weight by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_dflash.bundle.parts import part_of
from edge_dflash.model.program import PairPrograms
from edge_dflash.weights.formats import FORMATS, TIED, Array, WeightFormat
from edge_dflash.weights.layout import UNIT_ROWS, Repacked
from edge_dflash.weights.stacks import Stack, pair_stacks

DATA, SCALE = "data", "scale"


@dataclass(frozen=True)
class Part:
    """Contents of one weight file."""

    names: tuple[str, ...] = ()  # weights that are stored by themselves
    stacks: tuple[Stack, ...] = ()


def bundle_parts(programs: PairPrograms, formats: Mapping[str, WeightFormat], *, stacked: bool) -> dict[str, Part]:
    """Weight files of a bundle, by path. A tied lm_head is in none: it is the embedding.

    Raises BackendError for a format that the native kernels do not take.
    """
    stacks = native_stacks(programs, formats) if stacked else {}
    inside = {name for stack in stacks.values() for name in stack.names}
    names: dict[str, list[str]] = {}
    held: dict[str, list[Stack]] = {}
    for name in (name for name, form in formats.items() if form != TIED and name not in inside):
        names.setdefault(part_of(name), []).append(name)
    for stack in stacks.values():
        held.setdefault(stack_part(stack), []).append(stack)
    return {path: Part(tuple(names.get(path, ())), tuple(held.get(path, ()))) for path in (names | held)}


def native_stacks(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, Stack]:
    """Stacks that a native bundle stores, by key: all but that of a tied lm_head. Raises BackendError."""
    stacks = pair_stacks(programs, formats)
    return {key: stack for key, stack in stacks.items() if all(formats[name] != TIED for name in stack.names)}


def stack_part(stack: Stack) -> str:
    """File of a stack: that of its weights, or the model's context file when they are of several layers."""
    parts = {part_of(name) for name in stack.names}
    return parts.pop() if len(parts) == 1 else part_of(f"{stack.names[0].partition('.')[0]}.hidden_norm")


def stack_bytes(stack: Stack) -> int:
    """Bytes of a stack in its file."""
    return stack.layout.nbytes + 4 * stack.layout.units * UNIT_ROWS


def weight_bytes(shape: tuple[int, ...], form: WeightFormat) -> int:
    """Bytes of a weight that is stored by itself."""
    return 0 if form == TIED else FORMATS[form].nbytes(shape)


def repacked_of(stack: Stack, tensors: Mapping[str, tuple[str, Array]]) -> Repacked:
    """A stack over the tensors of its file, as views. Raises ValueError saying what was found and what is wanted."""
    wanted = {
        f"{stack.key}.{DATA}": ("U8", (stack.layout.nbytes,)),
        f"{stack.key}.{SCALE}": ("F32", (stack.layout.units * UNIT_ROWS,)),
    }
    for name, (kind, shape) in wanted.items():
        found, array = tensors.get(name, ("nothing", None))
        size = list(array.shape) if array is not None else []
        if (found, size) != (kind, list(shape)):
            raise ValueError(f"{name} is {found} {size}, wanted {kind} {list(shape)}")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{extra[0]} is not part of a stack")
    data, scale = (tensors[name][1] for name in wanted)
    return Repacked(stack.layout, data, scale)
