"""How a launch of a linear divides its stack over a device: one record for each family of kernels. Sizes alone.

Passes of 1 to 32 rows have three. kernels/linear_hopper.cu for up to 16 rows where there are warpgroup products;
kernels/linear_cluster.cu where blocks of a cluster reach each other's shared memory and a block may have half of a
multiprocessor's 228 KiB; kernels/linear.cu elsewhere. The rows of a prefill chunk go through kernels/linear_tiles.cu.

A joint pass has up to 128 rows, each with the bits of the pass of one sequence: kernels/linear_wide.cu stands beside
linear_hopper.cu; the others take 64 and 128 rows as tiles of 32 in one launch.

The number of splits never follows from rows; on SM90 it follows from the device and the clusters it holds. Whether
blocks of a cluster take one each or every block takes them in turn changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.cuda.cluster_splits import (
    CLUSTER_TEAMS,
    CLUSTERS,
    DEPTH,
    HALF_SM_SHARED,
    SLICES,
    SLOTS,
    Clusters,
    ClusterSplits,
    Splits,
    blocks_of,
    piece_bytes,
    x_bytes,
)
from edge_dflash.backends.cuda.wide_splits import WideSplits, wide_names
from edge_dflash.board.archs import arch_of_sm, supports
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout

ALONE_ROWS = 32  # most of one sequence; more rows of it go through :class:`Tiles`
MOST_ROWS = 128  # of a joint pass
_COLUMN_TILE = 32  # rows of a tile where a launch has several


def row_tile(rows: int, most: int = MOST_ROWS) -> int:
    """Rows that the kernel for ``rows`` reads and writes: 16, 32, 64 or 128. Raises BackendError above ``most``."""
    if not 1 <= rows <= most:
        raise BackendError(f"a linear pass has {rows} rows; 1 to {most} are accepted, more go through tiles")
    return max(16, 1 << (rows - 1).bit_length())


def block_shared(sm: int) -> int:
    """Most shared memory of a block, in bytes."""
    arch = arch_of_sm(sm)
    return arch.block_shared if arch else 227 << 10


def clustered(sm: int) -> bool:
    """Whether this architecture runs kernels/linear_cluster.cu."""
    return supports(sm, "clusters") and block_shared(sm) > HALF_SM_SHARED


def hopper(sm: int, most_rows: int) -> bool:
    """Whether passes of at most so many rows run kernels/linear_hopper.cu, where a block's part of x leaves room."""
    return supports(sm, "wgmma") and most_rows <= HOPPER_ROWS


def kernel_names(sm: int, most_rows: int, joint_rows: int = 0) -> dict[str, list[str]]:
    """The kernels that :func:`choose_splits` picks from, by compilation unit; the unit of most passes first.

    ``joint_rows``: most of a joint pass, 0 where there are none.
    """
    formats = sorted(UNIT_BYTES)
    if clustered(sm):
        sizes = CLUSTERS if supports(sm, "wgmma") else CLUSTERS[:2]
        forms = [f"{tile}_{s}_{t}" for tile, teams in CLUSTER_TEAMS.items() for t in teams for s in sizes]
        found = {"linear_cluster": [f"linear_cluster_{f}_{form}" for f in formats for form in forms]}
    else:
        found = {"linear": [f"linear_{f}_{tile}" for f in formats for tile in (16, 32)]}
    if hopper(sm, most_rows):
        found["linear_hopper"] = [f"linear_hopper_{f}_{s}" for f in formats for s in CLUSTERS]
        if joint_rows > HOPPER_ROWS:
            found["linear_wide"] = [name for f in formats for name in wide_names(f)]
    return found


def choose_splits(
    layout: Layout,
    rows: int,
    sm: int,
    sm_count: int,
    *,
    may_split: bool = False,
    most_rows: int = ALONE_ROWS,
    clusters: Clusters | None = None,
) -> Splits:
    """How a stack is launched. The number of splits does not depend on ``rows``, so that a row's bits do not.

    ``most_rows``: of any pass of one sequence of the engine; it chooses the order of sums. ``may_split``: sums may go
    through scratch. Without ``clusters`` a device holds as many clusters as ``sm_count`` multiprocessors hold.
    """
    whole = row_tile(rows)
    tile, tiles = min(whole, _COLUMN_TILE), -(-whole // _COLUMN_TILE)
    if not clustered(sm):
        return StreamSplits.of(layout, tile, sm, sm_count, may_split=may_split, row_tiles=tiles)
    if not supports(sm, "wgmma"):
        return ClusterSplits.few(layout, tile, sm_count, clusters, tiles)
    if hopper(sm, most_rows) and (counts := HopperSplits.counts(layout, clusters)):
        best = min(counts, key=lambda s: HopperSplits.cost(layout, s, sm_count))
        if whole > HOPPER_ROWS:
            return WideSplits.of(layout, whole, best, sm_count, clusters)
        return HopperSplits.of(layout, best, sm_count, clusters)
    if counts := ClusterSplits.counts(layout, clusters) or ClusterSplits.counts(layout):  # in turn, where it holds none
        best = min(counts, key=lambda s: ClusterSplits.cost(layout, s, sm_count))
        return ClusterSplits.of(layout, tile, best, sm_count, clusters, tiles)
    return ClusterSplits.in_turn(layout, tile, ClusterSplits.parts(layout), sm_count, tiles)


# kernels/linear.cu: warps of a block, stages of a warp's ring, units that fit in registers, most splits
_WARPS, _STAGES, _UNITS, _MOST_SPLITS = 8, 2, 2, 8


@dataclass(frozen=True)
class StreamSplits(Splits):
    """Of kernels/linear.cu: a block streams consecutive units, sums of splits meet in FP32 scratch.

    The number of groups is that of one tile, for any number of tiles: a group decides where its sums begin in K.
    """

    @classmethod
    def of(
        cls, layout: Layout, tile: int, sm: int, sm_count: int, *, may_split: bool, row_tiles: int = 1
    ) -> StreamSplits:
        """With the number of splits that costs least."""
        units, limit = _UNITS, min(HALF_SM_SHARED, block_shared(sm))
        while units > 1 and cls.shared(layout.format, tile, units) > limit:
            units -= 1
        most = min(_MOST_SPLITS, layout.windows) if may_split else 1
        splits = min(range(1, most + 1), key=lambda s: cls.cost(layout, s, sm_count))
        groups = min(layout.units, max(1, sm_count // splits))
        shared, rows = cls.shared(layout.format, tile, units), tile * row_tiles
        kernel, blocks = f"linear_{layout.format}_{tile}", groups * splits
        return cls(kernel, layout.format, rows, splits, groups, units, blocks, 32 * _WARPS, shared, row_tiles)

    @staticmethod
    def cost(layout: Layout, splits: int, blocks: int) -> float:
        """Bytes that the busiest block moves, activations from L2 counted at 0.6."""
        units = -(-layout.units // max(1, blocks // splits))
        windows = -(-layout.windows // (splits * _WARPS)) * _WARPS  # of the busiest warp, times the warps
        weights = units * windows * UNIT_BYTES[layout.format]
        activations = -(-units // _UNITS) * windows * WINDOW[layout.format] * 32
        sums = units * UNIT_ROWS * 16 * 8 if splits > 1 else 0
        return weights + 0.6 * (activations + sums)

    @staticmethod
    def shared(format: Format, tile: int, units: int) -> int:
        """Shared memory of a block: the exchange of sums, and each warp's ring of weights and activations."""
        return _WARPS * (1024 + _STAGES * (units * UNIT_BYTES[format] + tile * WINDOW[format] * 2))

    @property
    def side_shared(self) -> int:
        """Shared memory of a block with a unit of a side stack."""
        return self.shared("bf16", self.tile // self.row_tiles, 1)

    def sum_bytes(self, layout: Layout) -> int:
        """Scratch of a launch with splits: FP32 sums [splits, tile, rows of all units]."""
        return 4 * self.splits * self.tile * layout.units * UNIT_ROWS


# kernels/linear_hopper.cu: most rows, threads of a block, units of a quad, bytes of a warp's sums and of barriers
HOPPER_ROWS, HOPPER_THREADS, _QUAD, _SUMS, _HOPPER_HEAD = 16, 640, 4, 2048, 1024
_HOPPER_USABLE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}  # of the multiprocessors, by blocks of a cluster
_QUAD_END = 1700  # bytes that a warp could have multiplied while it ends a quad
_X_COST = 0.12  # of a byte of the block's x, where a byte of a warp's weights costs 1


@dataclass(frozen=True)
class HopperSplits(Splits):
    """Of kernels/linear_hopper.cu: blocks of a cluster are the splits, clusters own quads of units and half quads."""

    @classmethod
    def of(cls, layout: Layout, splits: int, sm_count: int, clusters: Clusters | None) -> HopperSplits:
        """With so many splits, and no more clusters than the device holds at once."""
        shared, kernel = cls.shared(layout, splits), f"linear_hopper_{layout.format}_{splits}"
        groups = min(-(-layout.units // (_QUAD // 2)), cls.held(layout, splits, clusters) or max(1, sm_count // splits))
        return cls(kernel, layout.format, HOPPER_ROWS, splits, groups, 0, groups * splits, HOPPER_THREADS, shared)

    @property
    def window(self) -> int:
        """See :class:`Splits`."""
        return WINDOW[self.format]

    @classmethod
    def held(cls, layout: Layout, splits: int, clusters: Clusters | None) -> int | None:
        """Clusters that the device holds at once; None: it was not asked."""
        shared, kernel = cls.shared(layout, splits), f"linear_hopper_{layout.format}_{splits}"
        return clusters(kernel, splits, HOPPER_THREADS, shared) if clusters else None

    @classmethod
    def counts(cls, layout: Layout, clusters: Clusters | None = None) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor, and of which the device holds a cluster."""
        fit = (s for s in CLUSTERS if cls.shared(layout, s) <= block_shared(90))
        return tuple(s for s in fit if cls.held(layout, s, clusters) != 0)

    @classmethod
    def cost(cls, layout: Layout, splits: int, sm_count: int) -> float:
        """Bytes of a busiest warp: its pieces, ends of quads, the block's part of x. Fits what an H200 measures."""
        quads = -(-layout.units // _QUAD)
        rounds = -(-quads // max(1, int(sm_count * _HOPPER_USABLE[splits]) // splits))
        pieces = -(-blocks_of(layout) // (splits * SLICES))
        return rounds * (pieces * piece_bytes(layout.format) + _QUAD_END) + _X_COST * x_bytes(
            layout, HOPPER_ROWS, splits
        )

    @staticmethod
    def shared(layout: Layout, splits: int) -> int:
        """Shared memory of a block: barriers, exchange of sums, slots of other blocks' sums, its part of x, rings."""
        rings = SLICES * _QUAD * (_SUMS + DEPTH[HOPPER_ROWS][layout.format] * UNIT_BYTES[layout.format])
        slots = SLOTS * _QUAD * _SUMS if splits > 1 else 0
        return _HOPPER_HEAD + rings + slots + x_bytes(layout, HOPPER_ROWS, splits)
