"""Linears of 4-bit integers (compressed-tensors "pack-quantized", W4A16), read as the BF16 values that they stand for.

No kernel computes with them: to a recipe they are BF16. ``weight_packed`` int32 holds eight integers plus 8 each, the
first in the lowest bits; ``weight_scale`` [out, groups] belongs to ``in / groups`` inputs that follow each other.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from edge_dflash.weights.formats import Array, WideWeight

NAME = "int4"  # in messages, beside the names of formats
BITS, KIND = 4, "int"  # num_bits and type of compressed-tensors
SPELLED = "num_bits 4 and type int (W4A16, of drafters)"
PER_WORD = 8
_ZERO = 8  # code of 0
_VALUES = 1 << 22  # made at a time


def in_groups(size: int) -> str:
    """How messages call integers with a scale for so many inputs; a scale for a row is plain NAME."""
    return f"{NAME} in groups of {size}"


class Int4Weight(WideWeight):
    """A linear [out, in]; ``data`` is made when it is first asked for."""

    def __init__(self, packed: Array, scale: Array) -> None:
        """``packed`` int32 [out, in / 8]; ``scale`` float32 [out, groups]."""
        object.__setattr__(self, "packed", packed)
        object.__setattr__(self, "scale", scale)

    packed: Array
    scale: Array

    @property
    def format(self) -> str:
        """That of the values."""
        return "bf16"

    @property
    def storage(self) -> str:
        """Ways to say how it is stored, " or " between them: one group is a whole row."""
        groups = self.scale.shape[1]
        grouped = in_groups(self.shape[1] // groups)
        return grouped if groups > 1 else f"{grouped} or {NAME}"

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`~edge_dflash.weights.formats.Weight`."""
        return (self.packed.shape[0], self.packed.shape[1] * PER_WORD)

    @cached_property
    def data(self) -> Array:
        """BF16 bit patterns [out, in]: code times scale, rounded to nearest even as engines that compute in BF16 do."""
        rows, columns = self.shape
        values = np.empty((rows, columns), np.uint16)
        step = max(1, _VALUES // max(columns, 1))
        for first in range(0, rows, step):
            part = slice(first, first + step)
            values[part] = _values(self.packed[part], self.scale[part])
        return values

    def rows(self, rows: slice) -> WideWeight:
        """Some rows."""
        return Int4Weight(self.packed[rows], self.scale[rows])


def _values(packed: Array, scale: Array) -> Array:
    pairs = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(packed), -1)
    groups = codes.reshape(len(packed), scale.shape[1], -1).astype(np.float32) - _ZERO
    bits = (groups * scale[:, :, None]).reshape(codes.shape).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
