"""Weights and keys as a bundle will hold them, in training: rounded on the way forward; gradients pass through.

Equal to the functions of :mod:`edge_dflash.weights.quantize` followed by dequantization, on any device.
"""

from __future__ import annotations

from functools import cache

import torch

from edge_dflash.weights.formats import BLOCK, WeightFormat
from edge_dflash.weights.quantize import E2M1, E2M1_MAX, E4M3_MAX, E4M3_TINY, GLOBAL_DIVISOR

_DECISIONS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the magnitudes of E2M1
KV_MARGIN = 1.25  # the largest key or value is this far below the largest FP8 code


def fake_weight(weight: torch.Tensor, form: WeightFormat, largest: torch.Tensor) -> torch.Tensor:
    """A matrix [N, K] (float32) as a checkpoint in BF16 and a bundle in ``form`` keep it, with the matrix's gradient.

    ``largest``: max|W|, of a fused group for NVFP4. Formats that are wide stay as they are.
    """
    if form not in ("nvfp4", "fp8"):
        return weight
    with torch.no_grad():
        kept = weight.bfloat16().float()  # what a checkpoint will hold
        if form == "nvfp4":
            scales = (largest / GLOBAL_DIVISOR).expand(kept.numel() // BLOCK)
            held = nvfp4_values(kept.reshape(-1, BLOCK), scales).view_as(kept)
        else:
            held = _fp8_values(kept, largest / E4M3_MAX)
    return weight + (held - weight).detach()


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as stored in an FP8 E4M3 cache with one scale for the tensor; float32; the gradient passes through."""
    with torch.no_grad():
        wide = x.float()
        stored = _fp8_values(wide, wide.abs().amax() * (KV_MARGIN / E4M3_MAX))
    return x + (stored - x).detach()


def nvfp4_values(blocks: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Dequantized NVFP4 of blocks [n, 16] (float32) with a positive global scale for each [n]."""
    decisions, magnitudes = _tables(blocks.device)
    global_scale = global_scale.clamp_min(1e-30)
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    wanted = torch.where(wanted == 0, 1.0, wanted).clamp(E4M3_TINY, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    size = (blocks / (scale * global_scale).unsqueeze(-1)).abs()
    code = torch.bucketize(size, decisions)  # a tie goes down ...
    tie_up = (size == 0.75) | (size == 1.75) | (size == 3.5)  # ... but to the even code
    magnitude = magnitudes[code + tie_up]
    return torch.copysign(magnitude, blocks) * scale.unsqueeze(-1) * global_scale.unsqueeze(-1)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(_DECISIONS, device=device), torch.tensor(E2M1, device=device)


def _fp8_values(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scale = scale.clamp_min(1e-12)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
