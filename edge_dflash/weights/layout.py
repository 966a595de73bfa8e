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

An NVFP4 word holds the eight codes of four pairs: weights/words.py.

A block scale byte is E4M3 re-encoded with 5 exponent bits (value = 2^(e-10) (1 + m/8), never subnormal); a block of
scale zero keeps no codes: it is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK, E4M3_NAN, FORMATS, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.words import Words, to_words

Bytes = npt.NDArray[np.uint8]


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
    are not BF16, NVFP4 weights that want NVFP4 activations, and scales that are negative or not a number.
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
            if weight.block_scale.size and int(weight.block_scale.max()) >= E4M3_NAN:
                raise BackendError("an NVFP4 block scale is negative or not a number: the checkpoint is damaged")
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
