"""The number format E4M3 in torch: eight bits, no infinity."""

from __future__ import annotations

import torch

from edge_dflash.weights.formats import E4M3_NAN

E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9  # smallest positive value, a subnormal


def to_e4m3(x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """E4M3 codes (uint8, shape of ``x``) of x / scale: nearest, ties to even, saturating at +-448; NaN gives 0x7F.

    ``x`` is float32; ``scale`` is a positive float (taken as float32) or a float32 tensor that broadcasts.
    """
    y = x / torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    codes = y.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(y.isnan(), E4M3_NAN)


def from_e4m3(codes: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Float32 values e4m3(codes) * scale with one rounding; 0x7F and 0xFF are NaN. ``codes`` is uint8, any shape."""
    values = codes.view(torch.float8_e4m3fn).float()
    if isinstance(scale, float) and scale == 1.0:
        return values
    return values.mul_(torch.as_tensor(scale, dtype=torch.float32, device=codes.device))
