"""A vision tower's pass in torch: one function per op. The reference for every other backend's tower.

A pass holds the patches of one picture and nothing else, so that its rows depend on the picture alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edge_dflash.backends.reference.attention import rotate
from edge_dflash.backends.reference.dense import ROW_TILE, TorchWeights, linear, pad, padded_rows, pointwise
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.pictured import Picture
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Add, Bias, Fold, FrameAttend, GeluErf, GeluTanh, LayerNorm, Linear, Op, PositionRows
from edge_dflash.model.program import Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.model.vision import patch_tables


@dataclass(frozen=True, eq=False)
class TorchSeen:
    """Rows of one picture, in the place of embeddings."""

    rows: torch.Tensor  # [tokens, H] float32

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self.rows.nbytes

    def host(self) -> npt.NDArray[np.float32]:
        """The rows [tokens, H]."""
        return self.rows.numpy()


class TorchTower:
    """Runs the pass ``see`` of a target. Tensors are float32, rounded to BF16 where activations are."""

    def __init__(self, spec: VisionSpec, program: Program, weights: TorchWeights, precision: Precision) -> None:
        self._spec = spec
        self._program = program
        self._weights = weights
        self._round = precision.activations == "bfloat16"

    def see(self, picture: Picture) -> TorchSeen:
        """Rows of a picture."""
        return TorchSeen(self.run(picture.values(), picture.grid)["rows"])

    @torch.inference_mode()
    def run(self, patches: npt.NDArray[np.floating], grid: tuple[int, int]) -> dict[str, torch.Tensor]:
        """Outputs by role of a picture's patches [N, C], N = rows x columns of the grid. Rows [N / merge^2, out].

        Raises BackendError for patches of another shape.
        """
        tables = patch_tables(self._spec, grid)
        wanted = grid[0] * grid[1], self._spec.patches.columns
        if patches.shape != wanted:
            raise BackendError(f"patches of a grid {grid} are {list(wanted)}, not {list(patches.shape)}")
        values = torch.from_numpy(np.array(patches, np.float32))
        tensors = {"patches": self._kept(values)}
        tensors |= {name: torch.from_numpy(table) for name, table in vars(tables).items()}
        for op in self._program.ops:
            tensors[op.output] = self._kept(self._execute(op, tensors))
        return {role: tensors[name] for role, name in self._program.outputs.items()}

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().float() if self._round else value

    def _execute(self, op: Op, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        x, *others = (tensors[name] for name in op.inputs)
        tensor = self._weights.tensor
        match op:
            case Linear():
                rows = x.shape[0]
                return linear(pad(x, padded_rows(rows)), self._weights.linear(op.weight), ROW_TILE)[:rows]
            case Bias():
                return x + tensor(op.weight)
            case Add():
                return x + others[0]
            case LayerNorm():
                return layer_norm(x, tensor(op.weight), tensor(op.bias), op.eps)
            case GeluTanh():
                return pointwise(lambda part: torch.nn.functional.gelu(part, approximate="tanh"), x)
            case GeluErf():
                return pointwise(torch.nn.functional.gelu, x)
            case PositionRows():
                return position_rows(x, others[0], tensor(op.weight))
            case FrameAttend():
                return self._attend(op, x, *others)
            case Fold():
                return x.reshape(x.shape[0] // op.count, -1)
            case _:
                raise TypeError(f"the reference backend has no function for op {type(op).__name__} of a tower")

    def _attend(self, op: FrameAttend, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(-1, 3, op.heads, op.head_dim).unbind(1)
        q, k = (self._kept(rotate(part, cos, sin)).transpose(0, 1) for part in (q, k))
        scores = (q @ k.transpose(1, 2)) * op.scale
        return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1).flatten(1)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm over the last dimension, unrounded float32."""
    away = x - x.mean(-1, keepdim=True)
    return away * torch.rsqrt(away.square().mean(-1, keepdim=True) + eps) * weight + bias


def position_rows(corners: torch.Tensor, shares: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Weighted sum of four rows of the table for each patch, unrounded float32."""
    y = torch.zeros(corners.shape[0], table.shape[1])
    for corner, share in zip(corners.long().unbind(1), shares.unbind(1), strict=True):
        y = y + share[:, None] * table[corner]
    return y
