"""What a pass of the language model does with pictures, in torch: rows for embeddings, angles of three positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from edge_dflash.backends.reference.tower import TorchSeen
from edge_dflash.decode.pictured import Sight
from edge_dflash.model.specs import RopeSpec


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
