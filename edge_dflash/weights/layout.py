"""Weights in the order in which the matrix kernels stream them: built offline and stored in bundles.

A stack of matrices with a common input (q, k, v; gate and up) becomes one byte array. Rows are cut into *units* of 32,
K into *windows* of WINDOW; the piece of unit u and window v lies at (u * windows + v) * UNIT_BYTES. Matrices start at
unit borders; missing rows and columns are zero. With ``swiglu``, gate and up are interleaved by 8 rows, so that one
tile of 16 rows holds 8 gate rows and their 8 up rows.

Inside a piece everything is in lane order, lane = 4 g + t, for the tensor-core step m16n8k16: a tile is 16 rows, lane
(g, t) holds rows g and g + 8. K is permuted within the window: lane t owns K values 16 t .. 16 t + 15 (BF16: 8 t ..
8 t + 7), step j multiplies its values 4 j .. 4 j + 3::

    NVFP4, WINDOW 64, 1152 bytes            FP8, WINDOW 64 | BF16, WINDOW 32: 2048 bytes
    [tile 0  32 lanes x 16 bytes]           [tile 0 row g      32 lanes x 16 bytes]
    [tile 1  32 lanes x 16 bytes]           [tile 0 row g + 8  same]
    [scales  32 lanes x 4 bytes ]           [tile 1 row g      same]
                                            [tile 1 row g + 8  same]
    16 bytes of an NVFP4 lane: row g codes 0-7, row g codes 8-15, row g+8 codes 0-7, row g+8 codes 8-15
    4 scale bytes: tile 0 row g, tile 0 row g + 8, tile 1 row g, tile 1 row g + 8

An FP8 word holds codes 2 0 3 1 in its bytes 0..3.

An NVFP4 word of 32 bits holds the eight codes of four pairs along K, by :data:`Words`. ``shared`` is for masks and
shifts: each pair comes out as two BF16 values times 2^-126, sign at 15 and magnitude at 8..6 of its half, by
:func:`bf16_pairs`. Some bits of a word serve two pairs, so that four masks, one rotation and three shifts suffice; a
word follows from its codes by exclusive or. ``bytes`` is for architectures that convert a byte of two codes in one
instruction: byte i holds pair i, the even code in its low bits.

A block scale byte is E4M3 re-encoded with 5 exponent bits (value = 2^(e-10) (1 + m/8), never subnormal); a block of
scale zero keeps no codes: it is zero.

Units are independent of each other, so a stack is packed and unpacked a block of rows at a time, and no build and no
start holds a large one several times: the streaming form of a stack is that of its row blocks, one after the other.
Back goes one matrix at a time, in checkpoint order: it has whole units, or, gate and up, every other group of 8 rows of
each unit; so no matrix is read for another. Experts go one by one, each a small stack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK, FORMATS, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.safetensors import forget_pages

Bytes = npt.NDArray[np.uint8]
Words = Literal["shared", "bytes"]
Array32 = npt.NDArray[np.uint32]


def _scale_codes() -> tuple[Bytes, Bytes]:
    """E4M3 byte 0..0x7E -> 5-bit-exponent byte, and back (0 stands for zero in both)."""
    value = np.arange(1, 0x7F)
    exponent, mantissa = value >> 3, value & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    fraction, power = np.frexp(size)  # size = fraction * 2^power, fraction in [0.5, 1)
    code = ((power + 9) << 3) + np.round((2 * fraction - 1) * 8).astype(np.int64)
    forward, back = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    forward[value], back[code] = code, value
    return forward, back


SCALE_CODE, E4M3_CODE = _scale_codes()


Format = Literal["nvfp4", "fp8", "bf16"]  # those that kernels stream

UNIT_ROWS = 32
WINDOW: dict[Format, int] = {"nvfp4": 64, "fp8": 64, "bf16": 32}
UNIT_BYTES: dict[Format, int] = {form: FORMATS[form].row_bytes(window) * UNIT_ROWS for form, window in WINDOW.items()}
NVFP4_EXPONENT = 19  # the kernel's products are 2^-19 times e2m1 * e4m3: the row scales carry 2^19

FP8_ORDER = (2, 0, 3, 1)  # code in byte 0, 1, 2, 3 of a word


@dataclass(frozen=True)
class Layout:
    """What a stack's bytes mean. ``columns`` are the output columns of each matrix, in order."""

    format: Format
    columns: tuple[int, ...]
    k: int
    swiglu: bool = False

    @property
    def starts(self) -> tuple[int, ...]:
        """First unit of each matrix (of the one interleaved matrix when ``swiglu``), then the number of units."""
        sizes = (2 * -(-self.columns[0] // 8) * 8,) if self.swiglu else self.columns
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // UNIT_ROWS))
        return tuple(starts)

    @property
    def units(self) -> int:
        """Units of 32 rows."""
        return self.starts[-1]

    @property
    def windows(self) -> int:
        """Windows along K."""
        return -(-self.k // WINDOW[self.format])

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.units * self.windows * UNIT_BYTES[self.format]


@dataclass(frozen=True)
class Repacked:
    """A stack ready to be streamed."""

    layout: Layout
    data: Bytes  # [layout.nbytes]
    scale: npt.NDArray[np.float32]  # [units * 32]: factor of each row's sum
    words: Words = "shared"  # of NVFP4


def repack(weights: Weight | Sequence[Weight], *, swiglu: bool = False, words: Words = "shared") -> Repacked:
    """Streaming form of one matrix [N, K] or of a stack with a common K and format; ``swiglu``: (gate, up).

    Exact and deterministic. Raises BackendError for a mixed stack, a K that is not a multiple of 16, wide values that
    are not BF16, and NVFP4 weights that want NVFP4 activations. A weight must not be :meth:`Weight.damaged`.
    """
    stack = (weights,) if isinstance(weights, Weight) else tuple(weights)
    formats = {FORMATS[w.format].streamed or w.format for w in stack}
    if len(formats) != 1 or len({w.shape[1] for w in stack}) != 1:
        found = ", ".join(f"{FORMATS[w.format].streamed or w.format} {list(w.shape)}" for w in stack)
        raise BackendError(f"a stack of linears needs one format and one input size, found {found}: launch them apart")
    layout = Layout(cast(Format, formats.pop()), tuple(w.shape[0] for w in stack), stack[0].shape[1], swiglu)
    if layout.k % BLOCK:
        raise BackendError(f"a linear has {layout.k} inputs; the native kernels need a multiple of {BLOCK}")
    if swiglu and (len(stack) != 2 or len(set(layout.columns)) != 1):
        raise BackendError(f"a gated pair needs two matrices of one shape, found {layout.columns} columns")
    codes, block_scales = zip(*(_codes(w) for w in stack), strict=True)
    scales = [_row_scale(w) for w in stack]
    data = _pieces(_stacked(codes, layout), _stacked(block_scales, layout), layout, words)
    return Repacked(layout, data, np.ascontiguousarray(_stacked(scales, layout)[:, 0]), words)


def _codes(weight: Weight) -> tuple[Bytes, Bytes]:
    """Bytes along K of each row (packed pairs, codes, or BF16), and block scale bytes ([N, 0] for formats without)."""
    none = np.zeros((weight.shape[0], 0), np.uint8)
    match weight:
        case Nvfp4Weight():
            if weight.input_scale is not None:
                raise BackendError(
                    f"an NVFP4 linear {list(weight.shape)} wants NVFP4 activations; the native backend keeps them "
                    "BF16: build with a recipe that drops the input scale"
                )
            zero = np.repeat(weight.block_scale == 0, BLOCK // 2, axis=1)
            packed = np.where(zero, np.uint8(0), weight.packed) if zero.any() else weight.packed
            return packed, SCALE_CODE[weight.block_scale]
        case Fp8Weight():
            return weight.data, none
        case WideWeight():
            if (data := weight.bf16()) is None:
                raise BackendError(f"a linear {list(weight.shape)} holds float32 values that BF16 cannot hold")
            return data.view(np.uint8), none
        case _:
            raise BackendError(f"a linear is {weight.format}; the native kernels do not take it")


def _row_scale(weight: Weight) -> npt.NDArray[np.float32]:
    """Factor of each row's sum, [N, 1] float32."""
    n = weight.shape[0]
    match weight:
        case Nvfp4Weight():
            return np.full((n, 1), np.ldexp(np.float32(weight.global_scale), NVFP4_EXPONENT), np.float32)
        case Fp8Weight():
            return np.broadcast_to(np.asarray(weight.scale, np.float32).reshape(-1, 1), (n, 1))
        case _:
            return np.ones((n, 1), np.float32)


def _stacked(parts: Sequence[npt.NDArray[Any]], layout: Layout) -> npt.NDArray[Any]:
    """Rows of all matrices in streaming order, zero rows where a unit is not full."""
    if layout.swiglu:
        n = layout.columns[0]
        groups = np.zeros((-(-n // 8), 2, 8, parts[0].shape[1]), parts[0].dtype)
        for which, part in enumerate(parts):
            padded = np.zeros((groups.shape[0] * 8, part.shape[1]), part.dtype)
            padded[:n] = part
            groups[:, which] = padded.reshape(groups[:, which].shape)
        parts = (groups.reshape(groups.shape[0] * 16, groups.shape[-1]),)
    out = np.zeros((layout.units * UNIT_ROWS, parts[0].shape[1]), parts[0].dtype)
    for start, part in zip(layout.starts, parts, strict=False):
        out[start * UNIT_ROWS : start * UNIT_ROWS + part.shape[0]] = part
    return out


def _in_lanes(rows: Bytes, layout: Layout, lane_bytes: int) -> Bytes:
    """[rows, bytes along K] -> [units, windows, tile, row g or g + 8, lane, lane_bytes]; ``rows`` is padded along K."""
    row_bytes = layout.windows * 4 * lane_bytes
    if rows.shape[1] != row_bytes:
        rows = np.pad(rows, ((0, 0), (0, row_bytes - rows.shape[1])))
    split = rows.reshape(layout.units, 2, 2, 8, layout.windows, 4, lane_bytes)
    return np.ascontiguousarray(split.transpose(0, 4, 1, 2, 3, 5, 6)).reshape(
        layout.units, layout.windows, 2, 2, 32, lane_bytes
    )


def _pieces(codes: Bytes, block_scales: Bytes, layout: Layout, order: Words) -> Bytes:
    """All pieces, in order, as one array."""
    shape = (layout.units, layout.windows, UNIT_BYTES[layout.format])
    if layout.format != "nvfp4":
        lanes = _in_lanes(codes, layout, 16)
        if layout.format == "fp8":
            lanes = lanes.reshape(-1, 4)[:, FP8_ORDER]
        return lanes.reshape(-1)
    out = np.empty(shape, np.uint8)
    lanes = _in_lanes(codes, layout, 8)  # 4 bytes of 2 codes: one word
    words = to_words(lanes.view(np.uint32), order)
    # [u, v, tile, half, lane, word] -> [u, v, tile, lane, half, word]
    out[..., :1024] = np.ascontiguousarray(words.transpose(0, 1, 2, 4, 3, 5)).view(np.uint8).reshape(*shape[:2], 1024)
    scales = _in_lanes(block_scales, layout, 1)[..., 0]  # [u, v, tile, half, lane]
    out[..., 1024:] = scales.transpose(0, 1, 4, 2, 3).reshape(*shape[:2], 128)
    return out.reshape(-1)


_MASK = np.uint32(0x81C081C0)  # a pair's signs and magnitudes


def words_of(sm: int) -> Words:
    """How the kernels for compute capability ``sm`` read NVFP4 words (kernels/decode.cuh)."""
    return "bytes" if supports(sm, "e2m1") else "shared"


def bf16_pairs(words: Array32) -> tuple[Array32, ...]:
    """The four BF16 pairs of each shared word, as kernels/decode.cuh makes them; the even code in the low half."""
    two, six = np.uint32(2), np.uint32(6)
    rotated = words >> six | words << np.uint32(26)
    return (words ^ words << two) & _MASK, words << six & _MASK, (words ^ rotated << two) & _MASK, rotated & _MASK


def to_words(packed: Array32, order: Words) -> Array32:
    """Words of four bytes of packed codes each."""
    if order == "bytes":
        return packed
    return _looked_up(packed, *_tables()[0])


def to_packed(words: Array32, order: Words) -> Array32:
    """Undo :func:`to_words`."""
    if order == "bytes":
        return words
    return _looked_up(words, *_tables()[1])


def _looked_up(values: Array32, low: Array32, high: Array32) -> Array32:
    found: Array32 = low[values & 0xFFFF]
    found ^= high[values >> 16]
    return found


@cache
def _tables() -> tuple[tuple[Array32, Array32], ...]:
    """Words of the lower and of the upper two bytes of packed codes; packed codes of a word's two halves."""
    images = []
    for bit in range(32):
        pairs = bf16_pairs(np.array([1 << bit], np.uint32))
        codes = [pair >> 6 & 7 | pair >> 12 & 8 | pair >> 18 & 0x70 | pair >> 24 & 0x80 for pair in pairs]
        images.append(sum(int(code[0]) << 8 * i for i, code in enumerate(codes)))
    return tuple((_sums(bits[:16]), _sums(bits[16:])) for bits in (_inverse(images), images))


def _sums(bits: Sequence[int]) -> Array32:
    """For each number the exclusive or of what its bits stand for."""
    table = np.zeros(1, np.uint32)
    for value in bits:
        table = np.concatenate((table, table ^ np.uint32(value)))
    return table


def _inverse(images: Sequence[int]) -> list[int]:
    """``images``: what each bit gives. For each bit that is wanted, the word that gives this one alone."""
    rows = [(image, 1 << bit) for bit, image in enumerate(images)]
    for bit in range(len(rows)):
        at = next(i for i in range(bit, len(rows)) if rows[i][0] >> bit & 1)
        rows[bit], rows[at] = rows[at], rows[bit]
        image, word = rows[bit]
        rows = [(a ^ image, b ^ word) if i != bit and a >> bit & 1 else (a, b) for i, (a, b) in enumerate(rows)]
    return [word for _, word in rows]


BLOCK_BYTES = 8 << 20  # of source rows in a block


def row_blocks(weights: Sequence[Weight], layout: Layout, nbytes: int = BLOCK_BYTES) -> Iterator[tuple[Weight, ...]]:
    """Views of a stack's rows whose :func:`pack` results, one after the other, are the whole stack's.

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
    """One of the stacks of a stack of experts."""
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


def joined(parts: tuple[Weight, ...], axis: int) -> Weight:
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
_CODE_BYTES = UNIT_ROWS * WINDOW["nvfp4"] // 2  # bytes of a piece of NVFP4 before its scales


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
        codes[out] = _unpacked_codes(block, layout, halves, repacked.words)[:count, :values]
        if layout.format == "nvfp4":
            scales[out] = _unpacked_scales(block, halves)[:count, : scales.shape[1]]
        forget_pages(block)
    factor = repacked.scale.reshape(layout.units, 2, 2, 8)[first:last, :, halves].reshape(-1)[:n]
    match layout.format:
        case "nvfp4":
            return Nvfp4Weight(codes, scales, float(np.ldexp(factor[0], -NVFP4_EXPONENT)))
        case "fp8":
            return Fp8Weight(codes, factor[:1] if (factor == factor[0]).all() else factor)
        case "bf16":
            return WideWeight(codes.view(np.uint16))


def _unpacked_codes(pieces: Bytes, layout: Layout, halves: slice, order: Words) -> Bytes:
    """Bytes along K of the rows of some units: packed pairs, codes, or BF16."""
    if layout.format != "nvfp4":
        lanes = pieces.reshape(*pieces.shape[:2], 2, 2, 8, 4, 16)[:, :, :, halves]  # unit, window, tile, half, g, t
        if layout.format == "fp8":
            lanes = lanes.reshape(*lanes.shape[:-1], 4, 4)[..., np.argsort(FP8_ORDER)].reshape(lanes.shape)
        return _unlaned(lanes)
    stored = pieces.view(np.uint32)[..., : _CODE_BYTES // 4].reshape(*pieces.shape[:2], 2, 8, 4, 2, 2)
    words = stored[..., halves, :].transpose(0, 1, 2, 5, 3, 4, 6)  # unit, window, tile, half, g, t, word
    return _unlaned(cast(Bytes, to_packed(words, order))).view(np.uint8)


def _unpacked_scales(pieces: Bytes, halves: slice) -> Bytes:
    """E4M3 block scales of the rows of some units."""
    stored = pieces[..., _CODE_BYTES:].reshape(*pieces.shape[:2], 8, 4, 2, 2)[..., halves]  # g, t, tile, half
    return _unlaned(E4M3_CODE[stored.transpose(0, 1, 4, 5, 2, 3)][..., None])


def _unlaned(lanes: Bytes) -> Bytes:
    """[unit, window, tile, half, g, t, x] -> [rows, x along K]."""
    units, _, tiles, halves, groups, *_ = lanes.shape
    return np.ascontiguousarray(lanes.transpose(0, 2, 3, 4, 1, 5, 6)).reshape(units * tiles * halves * groups, -1)
