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


class Block(nn.Module):
    """Attention over all patches of a picture, then the MLP."""

    def __init__(self, c: EyesConfig) -> None:
        super().__init__()
        self.heads = c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden, EPS), nn.LayerNorm(c.hidden, EPS)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(c.hidden, 3 * c.hidden), "proj": nn.Linear(c.hidden, c.hidden)})
        self.mlp = nn.ModuleDict(
            {"linear_fc1": nn.Linear(c.hidden, c.intermediate), "linear_fc2": nn.Linear(c.intermediate, c.hidden)}
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B, N, W]; cos and sin [N, head]."""
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        x = x + self.attn["proj"](o.transpose(1, 2).flatten(-2))
        out: torch.Tensor = x + self.mlp["linear_fc2"](
            F.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        )
        return out


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Eyes(nn.Module):
    """The tower; ``state_dict`` has the names of a checkpoint below ``model.visual.``."""

    def __init__(self, c: EyesConfig, grid: tuple[int, int]) -> None:
        super().__init__()
        self.c = c
        wide = c.hidden * c.merge**2
        self.patch_embed = nn.ModuleDict(
            {"proj": nn.Conv3d(3, c.hidden, (2, c.patch, c.patch), stride=(2, c.patch, c.patch))}
        )
        self.pos_embed = nn.Embedding(c.positions**2, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.merger = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(c.hidden, EPS),
                "linear_fc1": nn.Linear(wide, wide),
                "linear_fc2": nn.Linear(wide, c.out),
            }
        )
        places = patch_places(grid, c.merge)
        head = c.hidden // c.heads
        frequency = c.theta ** -(torch.arange(0, head // 2, 2) / (head // 2))
        angle = (places[..., None] * frequency).flatten(1).repeat(1, 2)
        self.angles = (angle.cos(), angle.sin())
        self.taps = position_taps(places, grid, c.positions)

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Levels [B, N, 3 * P * P] uint8 -> rows [B, N / merge^2, out]."""
        return self.after(self.embed(levels))

    def embed(self, levels: torch.Tensor) -> torch.Tensor:
        """Levels [..., 3 * P * P] uint8 -> patches [..., W], without their positions."""
        conv = self.patch_embed["proj"]
        return F.linear(levels.float() / 127.5 - 1, conv.weight.sum(2).flatten(1), conv.bias)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """Embedded patches [B, N, W] -> rows [B, N / merge^2, out]."""
        index, weight = self.taps
        x = x + (self.pos_embed(index) * weight[..., None]).sum(0)
        for block in self.blocks:
            x = block(x, *self.angles)
        x = self.merger["norm"](x).unflatten(1, (-1, self.c.merge**2)).flatten(-2)
        out: torch.Tensor = self.merger["linear_fc2"](F.gelu(self.merger["linear_fc1"](x)))
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
