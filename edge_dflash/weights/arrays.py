"""Stored arrays as torch tensors without a copy, and row chunks that bound temporary memory.

Knows the array conventions of ``checkpoint/weights.py`` (uint16 is BF16). Knows no number format beyond that.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import torch

from edge_dflash.weights.tensor import Array, WideWeight

CHUNK_ELEMENTS = 1 << 19  # 2 MiB of float32: temporaries of a chunk stay in or near the last-level cache


def as_tensor(array: Array) -> torch.Tensor:
    """View an array as a tensor of the same dtype. A view of a read-only file mapping must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.ascontiguousarray(array))


def wide_tensor(weight: WideWeight) -> torch.Tensor:
    """View a wide weight as bfloat16 (stored as uint16) or float32, same shape."""
    tensor = as_tensor(weight.data)
    return tensor.view(torch.bfloat16) if weight.data.dtype == np.uint16 else tensor


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of consecutive rows, each of at most CHUNK_ELEMENTS elements (at least one row)."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def absmax(w: torch.Tensor) -> float:
    """Largest magnitude of a matrix [N, K], 0.0 when it is empty; NaN or infinity when it holds one."""
    largest = 0.0
    for rows in row_chunks(*w.shape):
        part = torch.stack(torch.aminmax(w[rows])).float().abs().max().item()
        if not part <= largest:  # also true for NaN
            largest = part
        if part != part:
            return part
    return largest
