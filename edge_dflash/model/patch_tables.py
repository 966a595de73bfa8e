"""What a vision tower has to be told of a grid of patches: neighbours in the table of positions, and rotary angles.

Both depend on the grid alone. They are computed in float64 and rounded once. Patches stand merge-block-major: the
merge x merge patches that become one row of the language model follow each other, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import VisionSpec

FloatTable = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PatchTables:
    """Inputs of a tower's pass besides the patches; N = rows x columns of the grid, D a head's columns."""

    corners: npt.NDArray[
        np.int32
    ]  # [N, 4] rows of the position table: upper left, upper right, lower left, lower right
    shares: FloatTable  # [N, 4] of each of them; they sum to 1
    cos: FloatTable  # [N, D / 2]
    sin: FloatTable


def patch_tables(spec: VisionSpec, grid: tuple[int, int]) -> PatchTables:
    """Tables of a frame of ``grid`` (rows, columns) patches, each a positive multiple of the merge size.

    The table of positions is spread over the frame so that its corners lie on the frame's (``align_corners``), with
    bilinear interpolation. Angles: the first half of each is row * f, the second column * f, with
    f = theta^(-2 j / (D / 2)) for j below D / 4 (transformers' ``Qwen3_5VisionModel``). Raises ValueError for another
    grid.
    """
    rows, columns = grid
    merge = spec.patches.merge
    if rows < 1 or columns < 1 or rows % merge or columns % merge:
        raise ValueError(f"a grid of {rows} x {columns} patches, wanted positive multiples of {merge}")
    y, x = merge_order(grid, merge)
    corners, shares = _bilinear(y, x, grid, spec.positions)
    quarter = spec.head_dim // 4
    frequency = spec.theta ** (-np.arange(quarter, dtype=np.float64) / quarter)
    angles = np.concatenate([y[:, None] * frequency, x[:, None] * frequency], axis=1)
    return PatchTables(corners, shares, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


def merge_order(grid: tuple[int, int], merge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Row and column [N] of each patch of a grid, merge-block-major."""
    rows, columns = grid
    shape = (rows // merge, columns // merge, merge, merge)
    block_y, block_x, y, x = np.indices(shape).reshape(4, -1)
    return block_y * merge + y, block_x * merge + x


def _bilinear(
    y: npt.NDArray[np.int64], x: npt.NDArray[np.int64], grid: tuple[int, int], side: int
) -> tuple[npt.NDArray[np.int32], FloatTable]:
    """The four places of the table around each patch, and their shares."""
    low, high, part = [], [], []
    for index, count in zip((y, x), grid, strict=True):
        place = index * (side - 1) / max(count - 1, 1)
        floor = np.floor(place)
        low.append(floor.astype(np.int64))
        high.append(np.minimum(floor.astype(np.int64) + 1, side - 1))
        part.append(place - floor)
    corners = [row * side + column for row in (low[0], high[0]) for column in (low[1], high[1])]
    shares = [down * right for down in (1 - part[0], part[0]) for right in (1 - part[1], part[1])]
    return np.stack(corners, 1).astype(np.int32), np.stack(shares, 1).astype(np.float32)
