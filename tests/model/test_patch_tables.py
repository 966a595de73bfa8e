"""Neighbours in the table of positions and rotary angles of patches, against NumPy in float64 written by itself."""

import numpy as np
import pytest
from golden_pairs import GOLDEN

from edge_dflash.model.registry import read_target_spec
from edge_dflash.model.specs import PatchSpec, VisionSpec
from edge_dflash.model.vision import merge_order, patch_tables

HALF = (0.5, 0.5, 0.5)
TOWER = VisionSpec(27, 1152, 4304, 16, 48, 1e4, 5120, 1, 2, 3, 4, PatchSpec(16, 2, 2, 65536, 16777216, HALF, HALF))
"""That of Qwen3.6-27B."""

GRIDS = [(2, 2), (4, 6), (48, 48), (50, 38), (2, 400)]


def in_order(image, merge=2):
    """Values [rows, columns, ...] of a grid, one a patch, in the order of the patches."""
    rows, columns = image.shape[:2]
    blocks = image.reshape(rows // merge, merge, columns // merge, merge, *image.shape[2:])
    return blocks.swapaxes(1, 2).reshape(rows * columns, *image.shape[2:])


@pytest.mark.parametrize("grid", GRIDS)
def test_positions_are_those_of_a_table_spread_over_the_frame(grid):
    table = np.random.default_rng(1).standard_normal((48, 48, 8))

    def spread(values, count):
        """Rows of ``values`` [48, ...] at ``count`` places from the first to the last."""
        places = np.linspace(0, 47, count) if count > 1 else np.zeros(1)
        flat = values.reshape(48, -1).T
        return np.stack([np.interp(places, np.arange(48), one) for one in flat]).T.reshape(count, *values.shape[1:])

    wanted = in_order(spread(spread(table, grid[0]).swapaxes(0, 1), grid[1]).swapaxes(0, 1))
    tables = patch_tables(TOWER, grid)
    found = (table.reshape(-1, 8)[tables.corners] * tables.shares[..., None].astype(np.float64)).sum(1)
    assert tables.corners.shape == tables.shares.shape == (grid[0] * grid[1], 4)
    assert np.abs(found - wanted).max() <= 1e-6
    assert np.abs(tables.shares.sum(1) - 1).max() <= 1e-6


@pytest.mark.parametrize("grid", GRIDS)
def test_angles_are_rows_then_columns(grid):
    pairs = TOWER.head_dim // 2  # 36: 18 of the row, 18 of the column
    inverse = np.array([1e4 ** (-2 * j / pairs) for j in range(pairs // 2)])
    y, x = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing="ij")
    wanted = in_order(np.concatenate([y[..., None] * inverse, x[..., None] * inverse], -1))
    tables = patch_tables(TOWER, grid)
    assert tables.cos.shape == (grid[0] * grid[1], 36)
    assert np.abs(tables.cos - np.cos(wanted)).max() <= 1e-6
    assert np.abs(tables.sin - np.sin(wanted)).max() <= 1e-6


def test_the_patches_of_a_block_are_neighbours():
    y, x = merge_order((4, 6), 2)
    assert list(zip(y, x, strict=True))[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert sorted(zip(y, x, strict=True)) == [(i, j) for i in range(4) for j in range(6)]


@pytest.mark.parametrize("grid", [(3, 4), (4, 3), (0, 2), (2, -2)])
def test_grids_that_do_not_merge_are_refused(grid):
    spec = read_target_spec(GOLDEN / "vision-tiny").vision
    with pytest.raises(ValueError, match="positive multiples of 2"):
        patch_tables(spec, grid)
