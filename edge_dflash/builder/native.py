"""The files of a native bundle: linears converted and repacked one stack at a time, and the kernels of an arch.

Knows how a stack is made of checkpoint weights; what the kernels take is :mod:`edge_dflash.backends.cuda.support`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path

import numpy as np

from edge_dflash.builder.convert import convert
from edge_dflash.bundle.manifest import FileEntry
from edge_dflash.bundle.parts import Advance, Tensor, whole, wide_first, write_tensors
from edge_dflash.bundle.stored import DATA, SCALE, Part
from edge_dflash.errors import BackendError, CheckpointError
from edge_dflash.weights.formats import Array, Weight, WeightFormat, WeightStore
from edge_dflash.weights.layout import UNIT_ROWS
from edge_dflash.weights.packing import pack, row_blocks
from edge_dflash.weights.quantize import fused_group
from edge_dflash.weights.stacks import Stack

AT_ONCE = 4  # blocks of rows that are repacked before the first of them is written


def write_native_part(
    path: Path,
    part: Part,
    store: WeightStore,
    formats: Mapping[str, WeightFormat],
    pool: Executor,
    advance: Advance,
) -> FileEntry:
    """Write one weight file of a native bundle, durably; never holds more than one stack.

    Raises CheckpointError and BuildError as :func:`~edge_dflash.builder.convert.convert`, and OSError.
    """
    weights = convert(store, part.names, formats, {}, pool.map)
    single = sorted((t for name, weight in weights.items() for t in whole(name, weight)), key=wide_first)
    stacks = [tensor for stack in part.stacks for tensor in _StackSource(stack, store, formats, pool).tensors]
    split = sum(tensor.kind == "F32" for tensor in single)  # two-byte vectors come last: scales stay aligned
    return write_tensors(path, [*single[:split], *stacks, *single[split:]], advance)


def stack_weights(
    stack: Stack, store: WeightStore, formats: Mapping[str, WeightFormat], pool: Executor
) -> tuple[Weight, ...]:
    """A stack's weights in their formats, with the global scales that they share with weights of other stacks."""
    made: dict[str, Weight] = {}
    for name in stack.names:
        if name not in made:
            group = tuple(member for member in fused_group(name) if member in formats)
            converted = convert(store, group, formats, {}, pool.map)
            made |= {member: weight for member, weight in converted.items() if member in stack.names}
    return tuple(made[name] for name in stack.names)


class _StackSource:
    """Makes a stack's bytes when they are written; its scales are known when all bytes are."""

    def __init__(self, stack: Stack, store: WeightStore, formats: Mapping[str, WeightFormat], pool: Executor) -> None:
        self._stack, self._store, self._formats, self._pool = stack, store, formats, pool
        self._scales: list[Array] = []

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Bytes and scales, to be written in this order."""
        layout = self._stack.layout
        return (
            Tensor(f"{self._stack.key}.{DATA}", "U8", (layout.nbytes,), self._data),
            Tensor(f"{self._stack.key}.{SCALE}", "F32", (layout.units * UNIT_ROWS,), self._scale),
        )

    def _data(self) -> Iterator[Array]:
        self._scales = []
        weights = stack_weights(self._stack, self._store, self._formats, self._pool)
        blocks = row_blocks(weights, self._stack.layout)
        try:
            while batch := tuple(islice(blocks, AT_ONCE)):
                for packed in self._pool.map(pack, batch):
                    self._scales.append(packed.scale)
                    yield packed.data
        except BackendError as error:  # what the plan could not see: block scales
            raise CheckpointError(f"{self._stack.names[0]}: {error}") from None

    def _scale(self) -> tuple[Array]:
        return (np.concatenate(self._scales),)
