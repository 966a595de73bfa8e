"""Fake quantization for training: NVFP4 weights, with gradients that pass straight through.

Equal to :func:`edge_dflash.weights.quantize.quantize_nvfp4` followed by dequantization, computed for all linears of
a model at once on any device. Knows the linears of the demo models only through their names.
"""

from __future__ import annotations

import torch
from torch import nn

from edge_dflash.training.drafter import nvfp4_values
from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.quantize import GLOBAL_DIVISOR, fused_group


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
            shared = torch.zeros_like(largest).scatter_reduce_(0, self._group, largest, "amax")[self._group]
            scales = (shared / GLOBAL_DIVISOR)[self._owner]
            values = nvfp4_values(torch.cat([w.reshape(-1, BLOCK) for w in rounded]), scales)
            parts = torch.split(values, self._sizes)
        for linear, weight, part in zip(self._linears, weights, parts, strict=True):
            linear.quantized = weight + (part.view_as(weight) - weight).detach()

    def clear(self) -> None:
        """Go back to the weights themselves."""
        for linear in self._linears:
            linear.quantized = None
