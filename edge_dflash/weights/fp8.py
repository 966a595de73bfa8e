"""FP8 E4M3 (``float8_e4m3fn``): codes of tensors, and FP8 linear weights.

1 sign, 4 exponent (bias 7) and 3 mantissa bits; largest magnitude 448, smallest 2^-9, no infinity, NaN 0x7F. Formulas:
OCP 8-bit Floating Point Specification 1.0 and the ModelOpt convention scale = max|x| / 448 (a multiplier). Backends
must divide by the scale (not multiply by its reciprocal) to give the same bytes.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights.arrays import absmax, row_chunks
from edge_dflash.weights.tensor import Fp8Weight

E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # smallest positive value, a subnormal
SMALLEST_SCALE = 2.0**-126  # a smaller float32 scale is subnormal: some processors flush it to zero
_NAN = 0x7F


def to_e4m3(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """E4M3 codes (uint8, shape of ``x``) of x / scale: nearest, ties to even, saturating at +-448; NaN gives 0x7F.

    ``x`` is float32; ``scale`` is a positive float (taken as float32) or a float32 tensor that broadcasts.
    """
    y = x / torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    codes = y.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(y.isnan(), _NAN)


def from_e4m3(codes: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Float32 values e4m3(codes) * scale with one rounding; 0x7F and 0xFF are NaN. ``codes`` is uint8, any shape."""
    values = codes.view(torch.float8_e4m3fn).float()
    if isinstance(scale, float) and scale == 1.0:
        return values
    return values.mul_(torch.as_tensor(scale, dtype=torch.float32, device=codes.device))


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
