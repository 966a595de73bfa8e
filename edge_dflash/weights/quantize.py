"""FP8 and NVFP4 in torch: codes of wide matrices, and their float32 values.

FP8 E4M3 (``float8_e4m3fn``): 1 sign, 4 exponent (bias 7) and 3 mantissa bits; largest magnitude 448, smallest 2^-9, no
infinity, NaN 0x7F. Formulas: OCP 8-bit Floating Point Specification 1.0 and the ModelOpt convention scale = max|x| /
448 (a multiplier). Backends must divide by the scale (not multiply by its reciprocal) to give the same bytes.

NVFP4: 4-bit E2M1 codes, one E4M3 scale for 16 values along K, one float32 scale for the matrix.

value[o, i] = e2m1(code[o, i]) * e4m3(block_scale[o, i // 16]) * global_scale. Codes are packed two to a byte, low
nibble first; bit 3 is the sign. Conventions and bytes are those of NVIDIA's ModelOpt: global_scale = max|W| / 2688,
block_scale = E4M3(max|block| / (6 * global_scale)), code = nearest of |w| / (block_scale * global_scale), ties to the
even code. The product e2m1 * e4m3 has at most 6 significant bits, so it is exact in BF16: backends multiply with it
and apply global_scale to the float32 result.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np
import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights.e4m3 import E4M3_MAX, E4M3_TINY, from_e4m3, to_e4m3
from edge_dflash.weights.formats import BLOCK, Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight

CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: temporaries of a chunk stay in or near the last-level cache


def as_tensor(array: Array) -> torch.Tensor:
    """View an array as a tensor of the same dtype. A view of a read-only file mapping must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))


def wide_tensor(weight: WideWeight) -> torch.Tensor:
    """View a wide weight as bfloat16 (stored as uint16) or float32, same shape."""
    tensor = as_tensor(weight.data)
    return tensor.view(torch.bfloat16) if weight.data.dtype == np.uint16 else tensor


def row_chunks(rows: int, columns: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of consecutive rows each of at most CHUNK_ELEMENTS elements, or of ``multiple`` rows."""
    step = multiple * max(1, CHUNK_ELEMENTS // max(1, columns * multiple))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def absmax(w: torch.Tensor) -> float:
    """Largest magnitude of a matrix [N, K], 0.0 when it is empty; NaN or infinity when it holds one."""
    largest = 0.0
    for rows in row_chunks(*w.shape):
        part = torch.stack(torch.aminmax(w[rows])).float().abs().max().item()
        if not part <= largest:  # also true for NaN
            largest = part
        if part != part:
            return part
    return largest


SMALLEST_SCALE = 2.0**-126  # a smaller float32 scale is subnormal: some processors flush it to zero


def quantize_fp8(w: torch.Tensor, *, per_channel: bool = False) -> Fp8Weight:
    """FP8 of a matrix [N, K] (bfloat16 or float32): scale = max|w| / 448 over the tensor, or over each row.

    A tensor or row of zeros gets scale 1. Raises BuildError when ``w`` holds NaN or infinity.
    """
    if per_channel:
        parts = [w[rows].float().abs().amax(-1) for rows in row_chunks(*w.shape)]
        amax = torch.cat(parts) if parts else torch.zeros(0)
    else:
        amax = torch.tensor([absmax(w)], dtype=torch.float32)
    require_finite(float(amax.max()) if amax.numel() else 0.0)
    scale = amax / E4M3_MAX
    scale = torch.where(scale < SMALLEST_SCALE, 1.0, scale)
    data = np.empty(tuple(w.shape), dtype=np.uint8)
    for rows in row_chunks(*w.shape):
        divisor = scale[rows, None] if per_channel else scale
        data[rows] = to_e4m3(w[rows].float(), divisor).numpy()
    return Fp8Weight(data, scale.numpy())


def require_finite(amax: float) -> None:
    """Raise BuildError when the largest magnitude of a weight shows that it holds NaN or infinity."""
    if not math.isfinite(amax):
        raise BuildError(
            f"cannot quantize a weight whose largest magnitude is {amax}: finite values are accepted; "
            "the checkpoint is damaged, download it again"
        )


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitude of codes 0..7
E2M1_MAX = 6.0
GLOBAL_DIVISOR = E2M1_MAX * E4M3_MAX  # 2688: the largest value is code 7 in a block of scale 448

_PAIRS = torch.tensor([[(-1.0 if c & 8 else 1.0) * E2M1[c & 7] for c in (b & 15, b >> 4)] for b in range(256)])

FUSED_GROUPS = (
    ("gate_proj", "up_proj"),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
)


def fused_group(name: str) -> tuple[str, ...]:
    """Canonical names of the linears that share one global scale with ``name``, itself included, in a fixed order."""
    for members in FUSED_GROUPS:
        for member in members:
            if name.endswith("." + member):
                prefix = name.removesuffix(member)
                return tuple(prefix + other for other in members)
    return (name,)


class Rounder(Protocol):
    """Chooses the block scales of a matrix, and what is rounded to the nearest code under them."""

    rows: int  # that a call should have, or a multiple of them

    def __call__(
        self, w: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is rounded, and its scales' codes, for float32 rows [n, K], the codes of max / 6 [n, K / 16] and []."""
        ...


def quantize_nvfp4(w: torch.Tensor, amax: float | None = None, choose: Rounder | None = None) -> Nvfp4Weight:
    """NVFP4 of a matrix [N, K] (bfloat16 or float32, K a multiple of 16), in row chunks.

    ``amax`` is max|W| over a fused group (default: over ``w``); it fixes the global scale. ``choose`` may give a block
    another scale than that of its max / 6, and move the weights. A block of zeros gets block scale 1, a matrix of zeros
    (or below 4e-35) global scale 1. Raises BuildError when ``w`` holds NaN or infinity or a value above ``amax``, or K
    is not a multiple of 16.
    """
    n, k = w.shape
    if k % BLOCK:
        raise BuildError(f"NVFP4 needs an input dimension that is a multiple of {BLOCK}, found {k}: keep it wide")
    largest = absmax(w)
    require_finite(largest)
    if amax is None:
        amax = largest
    elif not largest <= amax < float("inf"):
        raise BuildError(f"NVFP4 amax {amax} does not cover the weight's largest magnitude {largest}: give the maximum")
    global_scale = float(np.float32(amax) / np.float32(GLOBAL_DIVISOR))
    packed = np.zeros((n, k // 2), dtype=np.uint8)
    block_scale = np.full((n, k // BLOCK), 0x38, dtype=np.uint8)  # E4M3 of 1
    if global_scale < SMALLEST_SCALE:
        return Nvfp4Weight(packed, block_scale, 1.0)
    for rows in row_chunks(n, k, choose.rows if choose else 1):
        codes, scales = _encode(w[rows].float(), global_scale, choose)
        block_scale[rows] = scales.numpy()
        packed[rows] = (codes[:, 0::2] | (codes[:, 1::2] << 4)).numpy()
    return Nvfp4Weight(packed, block_scale, global_scale)


def _encode(w: torch.Tensor, global_scale: float, choose: Rounder | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8 [n, K]) and E4M3 block scales (uint8 [n, K / 16]) of float32 rows."""
    s2 = torch.tensor(global_scale, dtype=torch.float32)
    blocks = w.view(w.shape[0], -1, BLOCK)
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * s2)
    wanted = wanted.masked_fill_(wanted == 0, 1.0).clamp_(E4M3_TINY, E4M3_MAX)
    scales = to_e4m3(wanted)
    if choose is not None:
        w, scales = choose(w, scales, s2)
        blocks = w.view(blocks.shape)
    y = blocks / (from_e4m3(scales) * s2).unsqueeze(-1)
    codes = _magnitude_codes(y.abs_()).to(torch.uint8).view_as(w)
    return codes.add_((w < 0).to(torch.uint8), alpha=8), scales


def _magnitude_codes(a: torch.Tensor) -> torch.Tensor:
    """Index 0..7 of the E2M1 magnitude nearest to ``a`` >= 0, ties to the even index, as float32.

    In each of 0..2, 2..4 and 4..6 the index is linear in ``a``: 2a, a + 2, a / 2 + 4. The true index is the smallest
    of the three; rounding commutes with the minimum and with adding an even number, so that no step rounds twice.
    """
    code = torch.minimum((a * 2).round_(), a.round().add_(2))
    return torch.minimum(code, (a / 2).round_().add_(4)).clamp_(max=7)


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """E2M1 values nearest to x, ties to the even code; float32, on its device.

    Values from 2^e to 2^(e + 1) are multiples of 2^(e - 1), below 2 of 1/2: the last bit of 1.5 * 2^(e + 22), so that
    adding that rounds to one, ties to even, and taking it away is exact.
    """
    power = x.abs().clamp_(1.0, E2M1_MAX)
    power.view(torch.int32).bitwise_and_(0x7F800000).add_((22 << 23) + (1 << 22))
    return (x + power).sub_(power).clamp_(-E2M1_MAX, E2M1_MAX).copysign_(x)


ENCODERS: Mapping[str, Callable[[torch.Tensor], Weight]] = {
    "bf16": lambda w: WideWeight(w.to(torch.bfloat16).view(torch.uint16).numpy()),
    "fp8": quantize_fp8,
    "nvfp4": quantize_nvfp4,
}
"""What makes a format's codes of a wide matrix. Raises BuildError."""


def unscaled(weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrix [N, K] (float32) without its global scale, and the float32 scale ([] or [N]) to apply after the product.

    NVFP4: e2m1 * e4m3, exact in BF16, and the global scale. FP8: e4m3 values and the scale per tensor or per channel.
    Wide: the values and 1 (a wide weight may have any shape).
    """
    match weight:
        case WideWeight():
            return wide_tensor(weight).to(torch.float32, copy=True), torch.ones(())
        case Fp8Weight():
            scale = as_tensor(weight.scale).float().flatten()
            return from_e4m3(as_tensor(weight.data)), (scale[0] if scale.numel() == 1 else scale).clone()
        case Nvfp4Weight():
            return _codes_times_block_scales(weight), torch.tensor(weight.global_scale, dtype=torch.float32)
        case _:
            raise TypeError(f"no values are made of {weight.format} codes")


def _codes_times_block_scales(weight: Nvfp4Weight) -> torch.Tensor:
    n, k = weight.shape
    out = torch.empty(n, k // BLOCK, BLOCK)
    for rows in row_chunks(n, k):
        packed, scales = as_tensor(weight.packed[rows]), as_tensor(weight.block_scale[rows])
        values = torch.nn.functional.embedding(packed.int(), _PAIRS).view(-1, k // BLOCK, BLOCK)
        torch.mul(values, from_e4m3(scales).unsqueeze(-1), out=out[rows])
    return out.view(n, k)


def dequantize(weight: Weight) -> torch.Tensor:
    """Float32 values of a weight of any kind, its own shape; the scale is applied with one rounding."""
    matrix, scale = unscaled(weight)
    if isinstance(weight, WideWeight):
        return matrix
    return matrix.mul_(scale if scale.ndim == 0 else scale[:, None])


def quantize_activations(x: torch.Tensor, sx: float) -> torch.Tensor:
    """Emulate dynamic NVFP4 activations: x [rows, K] float32 -> code * block scale, [rows, K] float32.

    Each block of 16 values of a row gets scale E4M3(max|block| / (6 * sx)), saturating; ``sx`` = amax / 2688 is
    calibrated and positive. The caller multiplies the product with an NVFP4 matrix by sx * global_scale. A block whose
    scale rounds to zero gives zeros. A row's result depends on that row only.
    """
    s = torch.tensor(sx, dtype=torch.float32)
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    scales = from_e4m3(to_e4m3(blocks.abs().amax(-1) / (E2M1_MAX * s))).unsqueeze(-1)
    y = blocks / torch.where(scales == 0, torch.inf, scales * s)
    return (nearest_e2m1(y) * scales).view(x.shape)
