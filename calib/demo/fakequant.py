"""Fake quantization for training: NVFP4 weights and FP8 keys and values, with gradients that pass straight through.

Equal to :func:`edge_dflash.weights.quantize.quantize_nvfp4` followed by dequantization, computed for all linears of
a model at once on any device. Knows the linears of the demo models only through their names.
"""

from __future__ import annotations

import torch
from torch import nn

from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.quantize import E2M1, E2M1_MAX, E4M3_MAX, E4M3_TINY, GLOBAL_DIVISOR, fused_group

_DECISIONS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
KV_MARGIN = 1.25  # the largest key or value is this far below the largest FP8 code


class Linear(nn.Linear):
    """A linear without bias that uses ``quantized`` in place of its weight while that is set."""

    def __init__(self, inputs: int, outputs: int, *, wide: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.wide = wide  # never quantized
        self.quantized: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        return nn.functional.linear(x, self.weight if self.quantized is None else self.quantized)


class WeightQuantizer:
    """Fake NVFP4 of every linear of a model that is not wide."""

    def __init__(self, model: nn.Module) -> None:
        named = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and not m.wide}
        self._linears = list(named.values())
        groups = [fused_group(name) for name in named]
        self._group = torch.tensor([groups.index(group) for group in groups])  # linears of equal number share a scale
        self._tables = (torch.tensor(_DECISIONS), torch.tensor(E2M1))
        self._sizes = [linear.weight.numel() // BLOCK for linear in self._linears]
        self._owner = torch.arange(len(self._sizes)).repeat_interleave(torch.tensor(self._sizes))  # of each block

    def apply(self) -> None:
        """Set each linear's ``quantized`` from its weight as it is now; gradients flow to the weight unchanged."""
        weights = [linear.weight for linear in self._linears]
        with torch.no_grad():
            rounded = [w.bfloat16().float() for w in weights]  # what a checkpoint will hold
            largest = torch.stack([w.abs().amax() for w in rounded])
            device = largest.device
            self._owner, self._group = self._owner.to(device), self._group.to(device)
            self._tables = (self._tables[0].to(device), self._tables[1].to(device))
            shared = torch.zeros_like(largest).scatter_reduce_(0, self._group, largest, "amax")[self._group]
            scales = (shared / GLOBAL_DIVISOR)[self._owner]
            values = nvfp4_values(torch.cat([w.reshape(-1, BLOCK) for w in rounded]), scales, *self._tables)
            parts = torch.split(values, self._sizes)
        for linear, weight, part in zip(self._linears, weights, parts, strict=True):
            linear.quantized = weight + (part.view_as(weight) - weight).detach()

    def clear(self) -> None:
        """Go back to the weights themselves."""
        for linear in self._linears:
            linear.quantized = None


def nvfp4_values(
    blocks: torch.Tensor, global_scale: torch.Tensor, decisions: torch.Tensor, magnitudes: torch.Tensor
) -> torch.Tensor:
    """Dequantized NVFP4 of blocks [n, 16] (float32) with a positive global scale for each [n].

    ``decisions`` are the 7 points between the 8 ``magnitudes``.
    """
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    wanted = torch.where(wanted == 0, 1.0, wanted).clamp(E4M3_TINY, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn).float()
    size = (blocks / (scale * global_scale).unsqueeze(-1)).abs()
    code = torch.bucketize(size, decisions)  # a tie goes down ...
    tie_up = (size == 0.75) | (size == 1.75) | (size == 3.5)  # ... but to the even code
    magnitude = magnitudes[code + tie_up]
    return torch.copysign(magnitude, blocks) * scale.unsqueeze(-1) * global_scale.unsqueeze(-1)


def fake_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as stored in an FP8 E4M3 cache with one scale for the tensor; float32; the gradient passes through."""
    with torch.no_grad():
        wide = x.float()
        scale = wide.abs().amax().clamp_min(1e-12) * (KV_MARGIN / E4M3_MAX)
        stored = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
    return x + (stored - x).detach()
