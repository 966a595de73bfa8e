"""How kernels/linear_cluster.cu divides a stack over a device; and what all records of that have. Sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

HALF_SM_SHARED = 115_712  # bytes: two blocks of this size fit on an SM of 228 KiB
_BLOCK_K = 64  # K of a block of x in the kernels of clusters
SLICES, SLOTS = 4, 2  # their warps over K, and buffers for other blocks' sums
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster that kernels are built for

Clusters = Callable[[str, int, int, int], int]
"""(kernel, blocks of a cluster, threads and bytes of shared memory of a block) -> clusters that run at once."""


@dataclass(frozen=True)
class Splits:
    """How one launch divides a stack over a device: what all kernels have."""

    kernel: str
    format: Format
    tile: int  # rows that are read and written: 16 or 32; of a joint pass 64 or 128 too
    splits: int  # parts of K
    groups: int  # that share out the stack's units: blocks of a split, teams of warps, or clusters
    per_pass: int  # units at once of a block (of a team, with parts in turn); 0: the kernel's own number
    blocks: int
    threads: int  # of a block
    shared_bytes: int  # of a block
    row_tiles: int = 1  # parts of ``tile``; the blocks of all go through the weights at the same time

    @property
    def shares(self) -> tuple[int, int, int]:
        """What a job says of it."""
        return self.splits, self.groups, self.per_pass

    @property
    def turns(self) -> int:
        """Parts of K that a block takes one after the other."""
        return 1

    @property
    def window(self) -> int:
        """Of the activations in blocks that it reads; it then writes a gated pair so too. 0: it knows rows only."""
        return 0

    def check_orders(self, x_stride: int, out_stride: int, *, gated: bool) -> None:
        """Raise ValueError for row strides of tensors in blocks that the kernel does not read or write."""
        if x_stride not in (-self.window, abs(x_stride)) or (out_stride < 0 and not (gated and self.window)):
            raise ValueError(f"{self.kernel} takes no tensors in blocks of strides {x_stride} and {out_stride}")

    @property
    def rank_bytes(self) -> int:
        """Scratch of :meth:`~edge_dflash.backends.cuda.linear.Linears.greedy`: the best logit of every block."""
        return 8 * self.blocks * self.tile


# kernels/linear_cluster.cu: teams of a block by row tile, pieces of a ring, bytes of barriers and of a block
CLUSTER_TEAMS = {16: (2, 4), 32: (2,)}
DEPTH: Mapping[int, Mapping[Format, int]] = {
    16: {"nvfp4": 5, "fp8": 3, "bf16": 3},
    32: {"nvfp4": 2, "fp8": 2, "bf16": 2},
}
_CLUSTER_HEAD, _CLUSTER_SHARED = 384, 227 << 10
_USABLE = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.91}  # of the multiprocessors, by blocks of a cluster (measured on an H200)
_UNIT_END = 1600  # bytes that a warp could have multiplied while it ends a unit


@dataclass(frozen=True)
class ClusterSplits(Splits):
    """Of kernels/linear_cluster.cu: teams of a block's warps own units, the blocks of a cluster one split each.

    Or each block takes the splits in turn: ``groups`` are then its own teams, and no cluster is needed.
    """

    @property
    def turns(self) -> int:
        """See :class:`Splits`."""
        return self.splits if self.per_pass else 1

    @classmethod
    def of(
        cls, layout: Layout, tile: int, splits: int, sm_count: int, clusters: Clusters | None, row_tiles: int = 1
    ) -> ClusterSplits:
        """With so many splits: on no more clusters than the device holds at once, in turn where it holds none."""
        teams, held = cls.block(layout, tile, splits)
        shared, threads = cls.shared(layout, tile, splits, teams), 32 * teams * SLICES
        kernel, most = cls.kernel_of(layout, tile, splits), cls.held(layout, tile, splits, clusters)
        most = sm_count * held // splits if most is None else most
        if most < 1:
            return cls.in_turn(layout, tile, splits, sm_count, row_tiles)
        made = min(-(-2 * layout.units // teams), max(1, most // row_tiles))  # every team at least half a unit
        rows = tile * row_tiles
        return cls(kernel, layout.format, rows, splits, teams * made, 0, made * splits, threads, shared, row_tiles)

    @classmethod
    def few(
        cls, layout: Layout, tile: int, sm_count: int, clusters: Clusters | None, row_tiles: int = 1
    ) -> ClusterSplits:
        """For a device with few multiprocessors, all of which have a block: as few splits as fit, whatever it holds.

        Two splits go to clusters where those take all multiprocessors but one, as pairs do that share a front end.
        """
        parts = cls.parts(layout)
        if parts == 2 and all(cls.block(layout, tile, 2)[1] for tile in CLUSTER_TEAMS):
            paired = cls.of(layout, tile, 2, sm_count, clusters, row_tiles)
            all_blocks = paired.blocks * row_tiles
            if paired.per_pass == 0 and (paired.groups == 2 * layout.units or all_blocks >= sm_count - row_tiles):
                return paired
        return cls.in_turn(layout, tile, parts, sm_count, row_tiles)

    @classmethod
    def in_turn(cls, layout: Layout, tile: int, splits: int, sm_count: int, row_tiles: int = 1) -> ClusterSplits:
        """With so many splits that each block takes in turn."""
        teams, units = cls.units_held(layout, tile, splits)
        units = units if splits > 1 else 0
        blocks = min(-(-2 * layout.units // teams), max(1, sm_count // row_tiles))
        shared = cls.turn_shared(layout, tile, splits, teams, units)
        kernel = f"linear_cluster_{layout.format}_{tile}_1_{teams}"
        rows, threads = tile * row_tiles, 32 * teams * SLICES
        return cls(kernel, layout.format, rows, splits, teams * blocks, units, blocks, threads, shared, row_tiles)

    @classmethod
    def parts(cls, layout: Layout) -> int:
        """Fewest splits to take in turn, of two units of a team at a time, with any number of rows."""
        return next(
            s
            for s in range(1, blocks_of(layout) + 1)
            if cls.units_held(layout, 16, s)[1] >= min(2, s) and cls.units_held(layout, 32, s)[1]
        )

    @classmethod
    def units_held(cls, layout: Layout, tile: int, splits: int) -> tuple[int, int]:
        """Teams of a block that takes splits in turn, and units of a team at a time: as many as fit (0: none)."""
        for teams in sorted(CLUSTER_TEAMS[tile], reverse=True):
            left = _CLUSTER_SHARED - cls.turn_shared(layout, tile, splits, teams, 0)
            units = left // (128 * tile * teams)
            if units > 0:
                return teams, units
        return min(CLUSTER_TEAMS[tile]), 0

    @staticmethod
    def turn_shared(layout: Layout, tile: int, splits: int, teams: int, units: int) -> int:
        """Shared memory of such a block: barriers, warps' exchange, x of a split by slices, rings, sums of units."""
        sums, ring = 128 * tile, DEPTH[tile][layout.format] * UNIT_BYTES[layout.format]
        slice_blocks = -(-blocks_of(layout) // (splits * SLICES))
        x = SLICES * slice_blocks * _BLOCK_K * tile * 2
        return _CLUSTER_HEAD + teams * (SLICES * (sums + ring) + units * sums) + x

    @classmethod
    def kernel_of(cls, layout: Layout, tile: int, splits: int) -> str:
        """The kernel whose blocks of a cluster take a split each."""
        return f"linear_cluster_{layout.format}_{tile}_{splits}_{cls.block(layout, tile, splits)[0]}"

    @classmethod
    def held(cls, layout: Layout, tile: int, splits: int, clusters: Clusters | None) -> int | None:
        """Clusters that the device holds at once; None: it was not asked."""
        teams, kernel = cls.block(layout, tile, splits)[0], cls.kernel_of(layout, tile, splits)
        shared = cls.shared(layout, tile, splits, teams)
        return clusters(kernel, splits, 32 * teams * SLICES, shared) if clusters else None

    @classmethod
    def counts(cls, layout: Layout, clusters: Clusters | None = None) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor, and of which the device holds a cluster.

        With any number of rows: the number of splits must not follow from it.
        """
        fit = (s for s in CLUSTERS if all(cls.block(layout, tile, s)[1] for tile in CLUSTER_TEAMS))
        return tuple(s for s in fit if all(cls.held(layout, tile, s, clusters) != 0 for tile in CLUSTER_TEAMS))

    @classmethod
    def block(cls, layout: Layout, tile: int, splits: int) -> tuple[int, int]:
        """Teams of a block and blocks of a multiprocessor: the first form that fits (0 blocks: none does)."""
        for teams, held in ((2, 2), (4, 1), (2, 1)) if tile == 16 else ((2, 1),):
            if cls.shared(layout, tile, splits, teams) <= (HALF_SM_SHARED if held == 2 else _CLUSTER_SHARED):
                return teams, held
        return 2, 0

    @classmethod
    def cost(cls, layout: Layout, splits: int, sm_count: int) -> float:
        """Bytes of the busiest team's warps, the end of a unit counted as some more: fits what an H200 measures."""
        teams, held = cls.block(layout, 16, splits)
        groups = teams * max(1, int(held * sm_count * _USABLE[splits]) // splits)
        whole, rest = divmod(layout.units, groups)
        units = whole + (0.0 if rest == 0 else 0.5 if 2 * rest <= groups else 1.0)
        pieces = blocks_of(layout) / (splits * SLICES)
        return units * (pieces * piece_bytes(layout.format) + _UNIT_END) * held * teams

    @classmethod
    def shared(cls, layout: Layout, tile: int, splits: int, teams: int) -> int:
        """Shared memory of a block of a cluster: barriers, exchanges of sums, its part of x, rings of weights."""
        if splits == 1:
            return cls.turn_shared(layout, tile, 1, teams, 0)
        sums = 128 * tile  # bytes of one unit of one warp
        rings = teams * SLICES * (sums + DEPTH[tile][layout.format] * UNIT_BYTES[layout.format])
        return _CLUSTER_HEAD + rings + teams * SLOTS * sums + x_bytes(layout, tile, splits)


def blocks_of(layout: Layout) -> int:
    """K in blocks of _BLOCK_K."""
    return -(-layout.k // _BLOCK_K)


def piece_bytes(format: Format) -> int:
    """Bytes of a unit's next _BLOCK_K columns."""
    return UNIT_BYTES[format] * _BLOCK_K // WINDOW[format]


def x_bytes(layout: Layout, tile: int, splits: int) -> int:
    """Shared memory of a block's part of x."""
    return -(-blocks_of(layout) // splits) * _BLOCK_K * tile * 2
