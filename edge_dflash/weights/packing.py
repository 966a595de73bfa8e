"""Stacks packed and unpacked a block of rows at a time, so that no build and no start holds a large one several times.

Units are independent of each other: the streaming form of a stack is that of its row blocks, one behind the other. Back
goes one matrix at a time, in checkpoint order: it has whole units, or, gate and up, every other group of 8 rows of each
unit; so no matrix is read for another. Experts go one by one, each a small stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from edge_dflash.weights.formats import BLOCK, FORMATS, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.layout import (
    E4M3_CODE,
    FP8_ORDER,
    NVFP4_EXPONENT,
    UNIT_BYTES,
    UNIT_ROWS,
    WINDOW,
    Bytes,
    Layout,
    Repacked,
    repack,
)
from edge_dflash.weights.safetensors import forget_pages
from edge_dflash.weights.stacks import AnyStack, Stack
from edge_dflash.weights.words import Words, to_packed, words_of

BLOCK_BYTES = 8 << 20  # of source rows in a block


def row_blocks(weights: Sequence[Weight], layout: Layout, nbytes: int = BLOCK_BYTES) -> Iterator[tuple[Weight, ...]]:
    """Views of a stack's rows whose :func:`pack` results, one behind the other, are the whole stack's.

    ``weights`` are those of ``layout``, in order. A block has about ``nbytes`` of source.
    """
    groups = (tuple(weights),) if layout.swiglu else tuple((weight,) for weight in weights)
    for group in groups:
        rows, size = group[0].shape[0], sum(weight.nbytes for weight in group)
        unit = UNIT_ROWS // len(group)  # rows of each matrix in a unit
        step = max(1, nbytes * rows // max(1, size) // unit) * unit
        for first in range(0, rows, step):
            yield tuple(weight.rows(slice(first, first + step)) for weight in group)


def pack(block: tuple[Weight, ...], words: Words = "shared") -> Repacked:
    """Streaming form of one of :func:`row_blocks`; drops the mapped pages under it. Raises BackendError."""
    packed = repack(block, swiglu=len(block) == 2, words=words)
    for weight in block:
        for _, array in weight.parts().values():
            forget_pages(array)
    return packed


def member(repacked: Repacked, index: int) -> Repacked:
    """One of the stacks of an :class:`~edge_dflash.weights.stacks.ExpertStack`."""
    layout = repacked.layout
    rows = layout.units * UNIT_ROWS
    return replace(
        repacked,
        data=repacked.data[index * layout.nbytes : (index + 1) * layout.nbytes],
        scale=repacked.scale[index * rows : (index + 1) * rows],
    )


def shared_part(weights: tuple[Weight, ...], layout: Layout, index: int) -> tuple[Weight, ...]:
    """What a member of ``layout`` holds of a shared expert: rows of gate and up, or columns of down."""
    if layout.swiglu:
        n = layout.columns[0]
        return tuple(weight.rows(slice(index * n, (index + 1) * n)) for weight in weights)
    return tuple(_columns(weight, slice(index * layout.k, (index + 1) * layout.k)) for weight in weights)


def unpack_weight(stack: AnyStack, repacked: Repacked, index: int) -> Weight:
    """Weight ``index`` of a stack, as :func:`unpack_matrix`; a shared expert's parts are put together."""
    if isinstance(stack, Stack):
        return unpack_matrix(repacked, index)
    expert, matrix = divmod(index, len(stack.layout.columns))
    if expert < stack.experts:
        return unpack_matrix(member(repacked, expert), matrix)
    parts = tuple(unpack_matrix(member(repacked, expert + part), matrix) for part in range(stack.parts))
    return _joined(parts, axis=0 if stack.layout.swiglu else 1)


def _columns(weight: Weight, part: slice) -> Weight:
    """Views of some columns, a multiple of BLOCK each."""
    match weight:
        case Nvfp4Weight():
            packed, blocks = (slice(part.start // n, part.stop // n) for n in (2, BLOCK))
            return replace(weight, packed=weight.packed[:, packed], block_scale=weight.block_scale[:, blocks])
        case Fp8Weight():
            return replace(weight, data=weight.data[:, part])
        case WideWeight():
            return WideWeight(weight.data[:, part])
        case _:
            raise TypeError(f"no columns are taken of {weight.format} codes")


def _joined(parts: tuple[Weight, ...], axis: int) -> Weight:
    """One matrix of parts of its rows or columns, all of one format."""
    match parts[0]:
        case Nvfp4Weight() as first:
            codes = [(part.packed, part.block_scale) for part in parts if isinstance(part, Nvfp4Weight)]
            packed, blocks = (np.concatenate(arrays, axis) for arrays in zip(*codes, strict=True))
            return replace(first, packed=packed, block_scale=blocks)
        case Fp8Weight() as first:
            fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
            data, scale = np.concatenate([part.data for part in fp8], axis), first.scale
            if axis == 0 and any(not np.array_equal(part.scale, scale) or part.scale.size > 1 for part in fp8):
                scale = np.concatenate([np.broadcast_to(part.scale, part.shape[:1]) for part in fp8])
            return replace(first, data=data, scale=scale)
        case _:
            return WideWeight(np.concatenate([part.data for part in parts if isinstance(part, WideWeight)], axis))


def data_for(repacked: Repacked, sm: int) -> Bytes:
    """A stack's bytes as the kernels for compute capability ``sm`` read them; a copy where the words are others."""
    layout = repacked.layout
    if layout.format != "nvfp4" or repacked.words == words_of(sm):
        return repacked.data
    members = (member(repacked, index) for index in range(repacked.data.size // layout.nbytes))
    return np.concatenate([repack(unpack(one), swiglu=layout.swiglu, words=words_of(sm)).data for one in members])


AT_ONCE = 1 << 20  # bytes of pieces: what a cache holds, several times over
_CODES = UNIT_ROWS * WINDOW["nvfp4"] // 2  # bytes of a piece of NVFP4 before its scales


def unpack(repacked: Repacked) -> tuple[Weight, ...]:
    """All matrices of a stack. See :func:`unpack_matrix`."""
    return tuple(unpack_matrix(repacked, index) for index in range(len(repacked.layout.columns)))


def unpack_matrix(repacked: Repacked, index: int) -> Weight:
    """Matrix ``index`` of a stack: the same codes and scales.

    NVFP4 blocks of scale zero come back as zero codes, equal scales of all FP8 rows as one for the matrix.
    """
    layout = repacked.layout
    n, halves = layout.columns[index], slice(index, index + 1) if layout.swiglu else slice(0, 2)
    first, last = (0, layout.units) if layout.swiglu else layout.starts[index : index + 2]
    values = layout.k * FORMATS[layout.format].bits // 8  # bytes of a row
    codes = np.empty((n, values), np.uint8)
    scales = np.empty((n, layout.k // BLOCK if layout.format == "nvfp4" else 0), np.uint8)
    pieces = repacked.data.reshape(layout.units, layout.windows, UNIT_BYTES[layout.format])
    step = max(1, AT_ONCE // (layout.windows * UNIT_BYTES[layout.format]))
    rows = UNIT_ROWS // 2 if layout.swiglu else UNIT_ROWS  # of this matrix in a unit
    for unit in range(first, last, step):
        block = pieces[unit : min(unit + step, last)]
        out = slice((unit - first) * rows, min((unit - first + len(block)) * rows, n))
        count = out.stop - out.start
        codes[out] = _codes(block, layout, halves, repacked.words)[:count, :values]
        if layout.format == "nvfp4":
            scales[out] = _scales(block, halves)[:count, : scales.shape[1]]
        forget_pages(block)
    factor = repacked.scale.reshape(layout.units, 2, 2, 8)[first:last, :, halves].reshape(-1)[:n]
    match layout.format:
        case "nvfp4":
            return Nvfp4Weight(codes, scales, float(np.ldexp(factor[0], -NVFP4_EXPONENT)))
        case "fp8":
            return Fp8Weight(codes, factor[:1] if (factor == factor[0]).all() else factor)
        case "bf16":
            return WideWeight(codes.view(np.uint16))


def _codes(pieces: Bytes, layout: Layout, halves: slice, order: Words) -> Bytes:
    """Bytes along K of the rows of some units: packed pairs, codes, or BF16."""
    if layout.format != "nvfp4":
        lanes = pieces.reshape(*pieces.shape[:2], 2, 2, 8, 4, 16)[:, :, :, halves]  # unit, window, tile, half, g, t
        if layout.format == "fp8":
            lanes = lanes.reshape(*lanes.shape[:-1], 4, 4)[..., np.argsort(FP8_ORDER)].reshape(lanes.shape)
        return _unlaned(lanes)
    stored = pieces.view(np.uint32)[..., : _CODES // 4].reshape(*pieces.shape[:2], 2, 8, 4, 2, 2)
    words = stored[..., halves, :].transpose(0, 1, 2, 5, 3, 4, 6)  # unit, window, tile, half, g, t, word
    return _unlaned(cast(Bytes, to_packed(words, order))).view(np.uint8)


def _scales(pieces: Bytes, halves: slice) -> Bytes:
    """E4M3 block scales of the rows of some units."""
    stored = pieces[..., _CODES:].reshape(*pieces.shape[:2], 8, 4, 2, 2)[..., halves]  # unit, window, g, t, tile, half
    return _unlaned(E4M3_CODE[stored.transpose(0, 1, 4, 5, 2, 3)][..., None])


def _unlaned(lanes: Bytes) -> Bytes:
    """[unit, window, tile, half, g, t, x] -> [rows, x along K]."""
    units, _, tiles, halves, groups, *_ = lanes.shape
    return np.ascontiguousarray(lanes.transpose(0, 2, 3, 4, 1, 5, 6)).reshape(units * tiles * halves * groups, -1)
