"""Error compensation along K: what a weight loses by rounding is made up for by the inputs behind it. In torch.

GPTQ (arXiv 2210.17323), in the order of the columns, under block scales that are chosen before. A = X^T X + d I, with
the rows X [R, K] that a linear read in calibration and d = DAMPING times the mean of X^T X's diagonal, is R R^T with R
upper triangular, and sum (w - q) A (w - q)^T = |(w - q) R|^2. Column j of that holds the errors up to j alone, so
q_j is the nearest to w_j + sum over i < j of (w_i - q_i) R_ij / R_jj: GPTQ's own values, without an inverse. Where
inputs are uncorrelated the sum is 0 and the codes are those without compensation.
"""

from __future__ import annotations

import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights.e4m3 import from_e4m3
from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.quantize import Rounder, nearest_e2m1

DAMPING = 0.3  # of the mean second moment: less fits the calibration's rows, and their noise
STEP = 128  # columns that one matrix product brings up to date
TILE = 1024  # rows rounded at once, filled up with zeros: the order of a sum follows the shape of its product


def peak_bytes(rows: int, k: int) -> int:
    """Of memory that :func:`feedback` takes for X [rows, K], its result included."""
    held = min(rows, k)
    return 4 * k * k + 8 * held * (3 * k + 2 * held) + 2 * rows * k


def feedback(x: torch.Tensor) -> torch.Tensor:
    """R_ij / R_jj [j, i], strictly lower, float32 [K, K], of X [R, K] in any float type; computed in float64.

    From the last columns to the first, A's part in front of columns b is d I + Y^T M Y, with M = I at first and less
    Z Z^T, Z = M Y_b R_bb^-T, behind each b: no [K, K] matrix in float64 is made.
    Raises BuildError for NaN and infinity.
    """
    k = x.shape[1]
    y = x[:k].double()
    for first in range(k, len(x), k):
        y = torch.linalg.qr(torch.cat((y, x[first : first + k].double())), "r").R  # of the same Y^T Y
    damping = DAMPING * float(y.square().sum()) / k
    if not 0 <= damping < float("inf"):
        raise BuildError(
            "calibration's inputs hold NaN or infinity: the checkpoint's weights are damaged or unsuitable"
        )
    found, left = torch.zeros(k, k), torch.eye(len(y), dtype=torch.float64)
    for first in reversed(range(0, k if damping else 0, STEP)):
        ours = y[:, first : first + STEP]
        t = left @ ours
        a = ours.T @ t
        a.diagonal().add_(damping)
        r = torch.linalg.cholesky(a.flip(0, 1)).flip(0, 1)
        z = torch.linalg.solve_triangular(r.T, t, upper=False, left=False)
        own = r.diagonal()[:, None]
        found[first : first + STEP, :first] = (z.T @ y[:, :first]) / own
        found[first : first + STEP, first : first + STEP] = (r.T / own).tril(-1)
        left -= z @ z.T
    return found


class Compensated:
    """Chooses block scales as another does, and moves the weights. What a row gets depends on that row only."""

    rows = TILE

    def __init__(self, scales: Rounder, along: torch.Tensor) -> None:
        """``along``: :func:`feedback` of the inputs, float32 [K, K]."""
        self._scales, self._along = scales, along

    def __call__(
        self, w: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~edge_dflash.weights.quantize.Rounder`."""
        w, scales = self._scales(w, scales, global_scale)
        factors = from_e4m3(scales) * global_scale
        tiles = (slice(first, first + TILE) for first in range(0, max(1, len(w)), TILE))
        return torch.cat([self._moved(w[rows], factors[rows]) for rows in tiles]), scales

    def _moved(self, w: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Rows [n, K], n up to TILE, whose nearest codes are the compensated ones; ``factors`` [n, K / 16]."""
        n, k = w.shape
        columns, scales = w.new_zeros(k, TILE), w.new_ones(k // BLOCK, TILE)
        columns[:, :n], scales[:, :n] = w.T, factors.T
        errors = torch.zeros_like(columns)  # w - q
        for first in range(0, k, STEP):
            last, behind = min(first + STEP, k), columns[first : first + STEP].clone()
            columns[first:last].addmm_(self._along[first:last, :first], errors[:first])
            for j in range(first, last):
                column, scale = columns[j], scales[j // BLOCK]
                column.addmv_(errors[first:j].T, self._along[j, first:j])
                torch.sub(behind[j - first], nearest_e2m1(column / scale).mul_(scale), out=errors[j])
        return columns[:, :n].T.contiguous()
