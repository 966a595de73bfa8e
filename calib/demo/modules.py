"""Parts of the models in training: RMS norm, SwiGLU, RoPE, convolution over a block, start weights."""

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


class GroupedConv(nn.Module):
    """The two convolutions around a sublayer, over the rows of a block: kernels are a base and a part from the row.

    Row i: the sum over taps t of (base[t] + dynamic[i, t, the channel's group]) * row i - t, of rows of its block.
    """

    def __init__(self, hidden: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        base = torch.zeros(2, taps, hidden)
        base[:, 0] = 1.0  # a row as it is
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = Linear(hidden, 2 * taps * (hidden // group_size), wide=True)

    def dynamic(self, h: torch.Tensor) -> torch.Tensor:
        """The rows' part of the kernels, [..., 2, taps, groups] of h [..., H]."""
        return torch.unflatten(self.kernel_projection(h).float(), -1, (2, self.taps, -1))

    def forward(self, u: torch.Tensor, dynamic: torch.Tensor, side: int, blocks: int) -> torch.Tensor:
        """u [B, blocks * rows, H] before (side 0) or after (side 1) the sublayer; float32."""
        rows = torch.unflatten(u.float(), 1, (blocks, -1))
        kernel = self.base_kernel[side] + dynamic[:, :, side].repeat_interleave(self.group_size, -1)  # [B, R, taps, H]
        kernel = torch.unflatten(kernel, 1, (blocks, -1))
        total = kernel[..., 0, :] * rows
        for t in range(1, self.taps):
            total = total + kernel[..., t, :] * nn.functional.pad(rows, (0, 0, t, 0))[:, :, : rows.shape[2]]
        return total.flatten(1, 2)


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
            if name.endswith("kernel_projection"):
                nn.init.zeros_(module.weight)
                continue
            nn.init.normal_(module.weight, std=(module.in_features * (2 * layers if writes else 1)) ** -0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
