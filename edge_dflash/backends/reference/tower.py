"""A vision tower's pass in torch, and what a pass of the language model does with its rows and their positions.

A pass holds the patches of one picture and nothing else, so that its rows depend on the picture alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from edge_dflash.backends.reference.attention import rotate
from edge_dflash.backends.reference.dense import TorchWeights, dense
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import FrameAttend, Op
from edge_dflash.model.program import Program
from edge_dflash.model.specs import RopeSpec, VisionSpec
from edge_dflash.model.vision import patch_tables
from edge_dflash.pictures.pictured import Picture, Sight


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
            tensors[op.output] = self._kept(self._execute(op, [tensors[name] for name in op.inputs]))
        return {role: tensors[name] for role, name in self._program.outputs.items()}

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        return value.bfloat16().float() if self._round else value

    def _execute(self, op: Op, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._attend(op, *inputs) if isinstance(op, FrameAttend) else dense(op, inputs, self._weights)

    def _attend(self, op: FrameAttend, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(-1, 3, op.heads, op.head_dim).unbind(1)
        q, k = (self._kept(rotate(part, cos, sin)).transpose(0, 1) for part in (q, k))
        scores = (q @ k.transpose(1, 2)) * op.scale
        return (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1).flatten(1)


def with_pictures(x: torch.Tensor, sight: Sight | None) -> torch.Tensor:
    """Embeddings x [rows, H], in which rows of pictures replace those of their placeholders."""
    for one in sight.rows if sight is not None else ():
        assert isinstance(one.seen, TorchSeen)
        x[one.row : one.row + one.count] = one.seen.rows[one.first : one.first + one.count]
    return x


def picture_table(rope: RopeSpec, table: torch.Tensor, positions: npt.NDArray[np.int32]) -> torch.Tensor:
    """Of a table [positions, pairs], the values [rows, pairs] of rows with three positions [3, rows].

    Interleaved: pair j takes the height if j % 3 is 1 and the width if it is 2, as far as their sections reach, else
    the time (transformers' ``apply_interleaved_mrope``). Equal positions give the row of the table itself.
    """
    assert rope.mrope_section is not None
    pairs = table.shape[1]
    axes = torch.zeros(pairs, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * rope.mrope_section[axis] : 3] = axis
    return table[torch.from_numpy(positions).long()[axes].T, torch.arange(pairs)]
