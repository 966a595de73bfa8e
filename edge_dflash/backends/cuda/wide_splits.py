"""How kernels/linear_wide.cu divides a stack over a device: joint passes of 17 to 128 rows on Hopper. Sizes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_dflash.backends.cuda.cluster_splits import CLUSTERS, Clusters, Splits
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import WINDOW, Format, Layout

WIDE_TILES = (32, 64, 128)
WIDE_THREADS = 640
TWINS: Mapping[int, int] = {32: 1, 64: 1, 128: 2}  # passes of a cluster at a time, by rows
_TILE_UNITS, _GROUPS, _WARPS, _HEAD = 2, 4, 16, 2048
_STAGES: Mapping[int, int] = {32: 8, 64: 6, 128: 3}  # of x, 64 k each
_PLACES: Mapping[Format, int] = {"nvfp4": 640, "fp8": 1024, "bf16": 1024}  # bytes of a piece in a warp's ring
WIDE_DEPTH: Mapping[int, Mapping[Format, int]] = {
    32: {"nvfp4": 10, "fp8": 8, "bf16": 8},
    64: {"nvfp4": 8, "fp8": 6, "bf16": 6},
    128: {"nvfp4": 4, "fp8": 3, "bf16": 3},
}
_MOST_BLOCKS = 8  # of a cluster


@dataclass(frozen=True)
class WideSplits(Splits):
    """Blocks of a cluster are the splits of the kernel for 16 rows, once or twice; ``groups`` own tiles of 2 units."""

    @classmethod
    def of(
        cls, layout: Layout, tile: int, splits: int, sm_count: int, clusters: Clusters | None, twins: int | None = None
    ) -> WideSplits:
        """With so many splits, and no more clusters than the device holds at once.

        ``twins`` None: as :data:`TWINS`, where such a cluster can be. Raises BackendError where the device holds none.
        """
        if twins is None:
            twins = TWINS[tile] if splits * TWINS[tile] <= _MOST_BLOCKS else 1
        kernel, blocks = cls.name(layout.format, tile, splits, twins), splits * twins
        shared = cls.shared(layout.format, tile)
        held = clusters(kernel, blocks, WIDE_THREADS, shared) if clusters else max(1, sm_count // blocks)
        if held < 1 and twins > 1:
            return cls.of(layout, tile, splits, sm_count, clusters, 1)
        if held < 1:
            raise BackendError(f"a joint pass of {tile} rows needs clusters of {blocks} blocks; this device holds none")
        groups = twins * min(-(-layout.units // (_TILE_UNITS * twins)), held)
        return cls(kernel, layout.format, tile, splits, groups, 0, groups * splits, WIDE_THREADS, shared)

    @property
    def window(self) -> int:
        """See :class:`Splits`: the rows of a tensor in blocks, times 256, besides (kernels/blocks.cuh)."""
        return WINDOW[self.format] | self.tile << 8

    @staticmethod
    def name(format: Format, tile: int, splits: int, twins: int) -> str:
        """Of a kernel."""
        return f"linear_wide_{format}_{tile}_{splits}_{twins}"

    @staticmethod
    def shared(format: Format, tile: int) -> int:
        """Shared memory of a block: head, stages of x, sums of four warpgroups, rings of weights."""
        rings = _WARPS * WIDE_DEPTH[tile][format] * _PLACES[format]
        return _HEAD + tile * (_STAGES[tile] * 128 + _GROUPS * 256) + rings


def wide_names(format: Format) -> list[str]:
    """The kernels of a format."""
    forms = [(s, twins) for twins in (1, 2) for s in CLUSTERS if s * twins <= _MOST_BLOCKS]
    return [WideSplits.name(format, tile, *form) for tile in WIDE_TILES for form in forms]
