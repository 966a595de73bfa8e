"""NVFP4 block scales by search: at the same bytes the least error, weighted by what reaches each input. In torch.

A block's scale is one of nine E4M3 codes: that of max / 6, two below it and six above, eight codes being an octave.
Four or five above is max / 4: the largest value becomes 4, and the grid below it is finer. The one with the least sum
of h[k] * (w[k] - q[k])^2 is taken, h[k] = E[x_k^2] being the second moment of input k: what a linear's output loses if
inputs are uncorrelated (arXiv 2210.17323, equation 1, the diagonal of its Hessian). Of equal sums the first candidate
wins, and max / 6 is the first. The global scale stays max|W| / 2688, so that no block is worse than with max / 6.
"""

from __future__ import annotations

import math

import torch

from edge_dflash.errors import BuildError
from edge_dflash.weights.e4m3 import from_e4m3
from edge_dflash.weights.formats import BLOCK

AT_ONCE = 1 << 17  # values: a few buffers of half a MB, near a core's second-level cache
STEPS = (0, 1, 2, 3, 4, 5, 6, -1, -2)  # from the code of max / 6; all 126 codes lower the demo's error by 0.1 % more
LARGEST, SMALLEST = 0x7E, 0x01  # E4M3 codes of 448 and 2^-9
_EXPONENT = 0x7F800000  # bits of a float32
_MAGIC = 22 << 23  # added to the bits of 2^e: those of 2^(e + 22)


class Search:
    """Chooses the block scales of a matrix. What a row gets depends on that row only."""

    rows = 1

    def __init__(self, importance: torch.Tensor | None = None) -> None:
        """``importance`` h [K] >= 0, in any unit; None, or zeros alone: every input counts the same.

        Raises BuildError for one that is negative or no finite number.
        """
        self._h: torch.Tensor | None = None
        if importance is not None:
            h = importance.double()
            largest = float(h.max())
            if not (math.isfinite(largest) and float(h.min()) >= 0):
                raise BuildError(f"importance is from {float(h.min())} to {largest}, wanted finite numbers from 0")
            self._h = (h / largest).float().view(-1, BLOCK).t() if largest > 0 else None

    def __call__(
        self, w: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~edge_dflash.weights.quantize.Rounder`: ``w`` [n, K] as it is."""
        n, k = w.shape
        step = max(1, AT_ONCE // k)
        h = None if self._h is None else self._h[:, None].expand(BLOCK, min(step, n), -1).reshape(BLOCK, -1)
        found = torch.empty_like(scales)
        for rows in (slice(first, first + step) for first in range(0, n, step)):
            a = (w[rows] / global_scale).abs_().view(-1, BLOCK).t().contiguous()
            found[rows] = _best(a, scales[rows].flatten(), h).view(-1, k // BLOCK)
        return w, found


def _best(a: torch.Tensor, first: torch.Tensor, h: torch.Tensor | None) -> torch.Tensor:
    """The candidate with the least error for each column of ``a`` [16, blocks], magnitudes over the global scale."""
    y, work = torch.empty_like(a), torch.empty_like(a)
    chosen, least = first, torch.tensor(math.inf)
    for away in STEPS:
        code = (first.short() + away).clamp_(SMALLEST, LARGEST).byte()
        scale = from_e4m3(code)
        torch.mul(a, 1.0 / scale, out=y)
        error = _error(y, work)
        error.mul_(error)
        if h is not None:
            error.mul_(h[:, : a.shape[1]])
        loss = _sum(error).mul_(scale).mul_(scale)
        better = loss < least
        chosen, least = torch.where(better, code, chosen), torch.where(better, loss, least)
    return chosen


def _error(y: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 magnitude minus ``y`` >= 0, in place of ``y``; ``work`` is another buffer of its shape.

    Values from 2^e to 2^(e + 1) are multiples of 2^(e - 1), below 2 of 1/2. Adding 2^(e + 22), whose last bit is
    2^(e - 1), rounds to one, ties to even; so the exponent is all that is taken from ``y``.
    """
    torch.clamp(y, 1.0, 6.0, out=work)
    work.view(torch.int32).bitwise_and_(_EXPONENT).add_(_MAGIC)
    rounded = (y + work).sub_(work).clamp_(max=6.0)
    return torch.sub(rounded, y, out=y)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Sums of the columns of [16, blocks] in one order, whatever the number of blocks."""
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half].add_(values[half:])
    return values[0]
