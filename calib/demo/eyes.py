"""The vision tower of Qwen3.5 for training: batched pictures of one size, autograd, tensor names of its checkpoints.

Patches come merge-block-major, as the published processor lists them. Both time slots of a still picture hold the same
values, so the two halves of the patch kernel are added first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6  # of every LayerNorm


@dataclass(frozen=True)
class EyesConfig:
    """Sizes of the tower; the defaults are those of the shipped one."""

    depth: int = 2
    hidden: int = 96
    heads: int = 6
    intermediate: int = 256
    out: int = 256
    patch: int = 16
    merge: int = 2
    positions: int = 24  # a side of the position table
    theta: float = 1e4


def patches(pixels: npt.NDArray[np.uint8], c: EyesConfig) -> npt.NDArray[np.uint8]:
    """Levels [N, 3 * P * P] of a picture [H, W, 3]: merge-block-major patches, columns (channel, y, x)."""
    size = c.patch * c.merge
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    parts = pixels.reshape(rows, c.merge, c.patch, columns, c.merge, c.patch, 3)
    return np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3 * c.patch**2)


def patch_places(grid: tuple[int, int], merge: int) -> torch.Tensor:
    """Row and column of every patch of a grid (rows, columns), [N, 2], merge-block-major."""
    index = torch.arange(grid[0] * grid[1]).view(grid[0] // merge, merge, grid[1] // merge, merge)
    order = index.permute(0, 2, 1, 3).flatten()
    return torch.stack((order // grid[1], order % grid[1]), -1)


class FrameAttention(nn.Module):
    """Attention over all patches of a picture."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv, self.proj = nn.Linear(c.hidden, 3 * c.hidden), nn.Linear(c.hidden, c.hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, N, W]; cos and sin [N, head]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        out: torch.Tensor = self.proj(o.transpose(1, 2).flatten(-2))
        return out


class TowerMlp(nn.Module):
    """Two linears with a GELU, in its tanh form."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(c.hidden, c.intermediate), nn.Linear(c.intermediate, c.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., W] -> [..., W]."""
        out: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class Block(nn.Module):
    """Attention, then the MLP, each on the residual stream."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden, EPS), nn.LayerNorm(c.hidden, EPS)
        self.attn, self.mlp = FrameAttention(c), TowerMlp(c)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, N, W]; cos and sin [N, head]."""
        x = x + self.attn(self.norm1(x), cos, sin)
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Merger(nn.Module):
    """The patches of a block, side by side, become one row; a GELU in its erf form."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        self.count = c.merge**2
        wide = c.hidden * self.count
        self.norm = nn.LayerNorm(c.hidden, EPS)
        self.linear_fc1, self.linear_fc2 = nn.Linear(wide, wide), nn.Linear(wide, c.out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, N, W] -> [B, N / merge^2, out]."""
        folded = self.norm(x).unflatten(1, (-1, self.count)).flatten(-2)
        out: torch.Tensor = self.linear_fc2(F.gelu(self.linear_fc1(folded)))
        return out


class PatchEmbed(nn.Module):
    """A patch's pixels as a row, without its position."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        size = (2, c.patch, c.patch)
        self.proj = nn.Conv3d(3, c.hidden, size, stride=size)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Levels [..., 3 * P * P] uint8 -> [..., W]."""
        return F.linear(levels.float() / 127.5 - 1, self.proj.weight.sum(2).flatten(1), self.proj.bias)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Eyes(nn.Module):
    """The tower; ``state_dict`` has the names of a checkpoint below ``model.visual.``."""

    def __init__(self, c: EyesConfig, grid: tuple[int, int]) -> None:
        super().__init__()
        self.c = c
        self.patch_embed = PatchEmbed(c)
        self.pos_embed = nn.Embedding(c.positions**2, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.merger = Merger(c)
        places = patch_places(grid, c.merge)
        head = c.hidden // c.heads
        frequency = c.theta ** -(torch.arange(0, head // 2, 2) / (head // 2))
        angle = (places[..., None] * frequency).flatten(1).repeat(1, 2)
        self.angles = (angle.cos(), angle.sin())
        self.taps = position_taps(places, grid, c.positions)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Levels [B, N, 3 * P * P] uint8 -> rows [B, N / merge^2, out]."""
        return self.after(self.patch_embed(levels))

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """Embedded patches [B, N, W] -> rows [B, N / merge^2, out]."""
        index, weight = self.taps
        x = x + (self.pos_embed(index) * weight[..., None]).sum(0)
        for block in self.blocks:
            x = block(x, *self.angles)
        out: torch.Tensor = self.merger(x)
        return out


def position_taps(places: torch.Tensor, grid: tuple[int, int], side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a position table and their weights, [4, N] each: bilinear, the corners of grid and table aligned."""
    limits = torch.tensor([max(grid[0] - 1, 1), max(grid[1] - 1, 1)])
    exact = places * (side - 1) / limits
    low = exact.floor().long().clamp(max=side - 1)
    high, part = (low + 1).clamp(max=side - 1), exact - low
    index, weight = [], []
    for rows, row_part in ((low[:, 0], 1 - part[:, 0]), (high[:, 0], part[:, 0])):
        for columns, column_part in ((low[:, 1], 1 - part[:, 1]), (high[:, 1], part[:, 1])):
            index.append(rows * side + columns)
            weight.append(row_part * column_part)
    return torch.stack(index), torch.stack(weight)
