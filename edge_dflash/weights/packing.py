"""A stack repacked a block of rows at a time, so that neither a build nor a start holds a large one several times.

Units are independent of each other: the streaming form of a stack is that of its row blocks, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from edge_dflash.weights.layout import UNIT_ROWS, Layout, Repacked, repack
from edge_dflash.weights.mapped import forget_pages
from edge_dflash.weights.tensor import Fp8Weight, Nvfp4Weight, Weight, WideWeight

BLOCK_BYTES = 8 << 20  # of source rows in a block


def row_blocks(weights: Sequence[Weight], layout: Layout, nbytes: int = BLOCK_BYTES) -> Iterator[tuple[Weight, ...]]:
    """Views of a stack's rows whose :func:`pack` results, one behind the other, are the whole stack's.

    ``weights`` are those of ``layout``, in order. A block has about ``nbytes`` of source.
    """
    groups = (tuple(weights),) if layout.swiglu else tuple((weight,) for weight in weights)
    for group in groups:
        rows, size = group[0].shape[0], sum(weight.nbytes for weight in group)
        unit = UNIT_ROWS // len(group)  # rows of each matrix in a unit
        step = max(1, nbytes * rows // max(1, size) // unit) * unit
        for first in range(0, rows, step):
            yield tuple(_rows(weight, slice(first, first + step)) for weight in group)


def pack(block: tuple[Weight, ...]) -> Repacked:
    """Streaming form of one of :func:`row_blocks`; drops the mapped pages under it. Raises BackendError."""
    packed = repack(block, swiglu=len(block) == 2)
    for weight in block:
        for array in vars(weight).values():
            if hasattr(array, "nbytes"):
                forget_pages(array)
    return packed


def _rows(weight: Weight, rows: slice) -> Weight:
    match weight:
        case Nvfp4Weight():
            return replace(weight, packed=weight.packed[rows], block_scale=weight.block_scale[rows])
        case Fp8Weight():
            return replace(
                weight, data=weight.data[rows], scale=weight.scale[rows] if weight.scale.size > 1 else weight.scale
            )
        case WideWeight():
            return WideWeight(weight.data[rows])
