"""Parts of the target in training: RMS norm, SwiGLU, RoPE, start weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from calib.demo.fakequant import Linear


class Norm(nn.Module):
    """RMS norm in float32 over the last dim; the factor is 1 + w (``plus_one``) or w."""

    def __init__(self, size: int, eps: float, *, plus_one: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight + 1.0 if self.plus_one else self.weight, self.eps)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate)
        self.up_proj = Linear(hidden, intermediate)
        self.down_proj = Linear(intermediate, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> [..., H]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rope(x: torch.Tensor, positions: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """Rotate the first ``dims`` of x [B, heads, T, D] (float32) by positions [T] or [B, T]; halves convention."""
    frequency = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device=x.device) / dims)
    angle = positions[..., None].float() * frequency
    if angle.ndim == 3:
        angle = angle[:, None]
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def initialise(model: nn.Module, layers: int) -> None:
    """Start weights: linears keep the scale of their input, and those that write to the residual stream start small."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            writes = name.endswith(("o_proj", "out_proj", "down_proj"))
            nn.init.normal_(module.weight, std=(module.in_features * (2 * layers if writes else 1)) ** -0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
