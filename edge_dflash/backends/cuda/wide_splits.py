"""How kernels/linear_wide.cu divides a stack over a device: joint passes of 17 to 128 rows on Hopper. Sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.cuda.cluster_splits import CLUSTERS, Clusters, Splits
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

WIDE_TILES = (32, 64, 128)
WIDE_THREADS = 640
_TILE_UNITS, _GROUPS, _HEAD, _BLOCK_K = 2, 4, 2048, 64
_SHARED = 232448  # bytes a block may have


@dataclass(frozen=True)
class WideSplits(Splits):
    """Blocks of a cluster are the splits of the kernel for 16 rows; ``groups``, clusters, own tiles of 2 units."""

    @classmethod
    def of(cls, layout: Layout, tile: int, splits: int, sm_count: int, clusters: Clusters | None) -> WideSplits:
        """With so many splits, and no more clusters than the device holds at once.

        Raises BackendError where the device holds none.
        """
        kernel, shared = cls.name(layout.format, tile, splits), cls.shared(layout.format, tile)
        held = clusters(kernel, splits, WIDE_THREADS, shared) if clusters else max(1, sm_count // splits)
        if held < 1:
            raise BackendError(f"a joint pass of {tile} rows needs clusters of {splits} blocks; this device holds none")
        groups = min(-(-layout.units // _TILE_UNITS), held)
        return cls(kernel, layout.format, tile, splits, groups, 0, groups * splits, WIDE_THREADS, shared)

    @property
    def window(self) -> int:
        """See :class:`Splits`: the rows of a tensor in blocks, times 256, besides (kernels/blocks.cuh)."""
        return WINDOW[self.format] | self.tile << 8

    @staticmethod
    def name(format: Format, tile: int, splits: int) -> str:
        """Of a kernel."""
        return f"linear_wide_{format}_{tile}_{splits}"

    @staticmethod
    def shared(format: Format, tile: int) -> int:
        """Shared memory of a block: head, sums of four warpgroups, stages of x and weights."""
        fixed = _HEAD + _GROUPS * tile * 256
        stage = tile * 128 + _GROUPS * _TILE_UNITS * _BLOCK_K // WINDOW[format] * UNIT_BYTES[format]
        return fixed + (_SHARED - fixed) // stage * stage


def wide_names(format: Format) -> list[str]:
    """The kernels of a format."""
    return [WideSplits.name(format, tile, splits) for tile in WIDE_TILES for splits in CLUSTERS]
