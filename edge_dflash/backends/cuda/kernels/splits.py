"""How a launch of a linear divides its stack over a device: one record for each family of kernels. Sizes alone.

Passes of 1 to 32 rows have three. kernels/linear_hopper.cu for up to 16 rows where there are warpgroup products;
kernels/linear_cluster.cu where blocks of a cluster reach each other's shared memory and a block may have half of a
multiprocessor's 228 KiB; kernels/linear.cu elsewhere. The rows of a prefill chunk go through kernels/linear_tiles.cu.

A joint pass has up to 128 rows, each with the bits of the pass of one sequence: kernels/linear_wide.cu stands next to
linear_hopper.cu; the others take 64 and 128 rows as tiles of 32 in one launch.

The number of splits never follows from rows; on SM90 it follows from the device and the clusters it holds. Whether
blocks of a cluster take one each or every block takes them in turn changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edge_dflash.board.archs import arch_of_sm, supports
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout

ALONE_ROWS = 32  # most of one sequence; more rows of it go through tiles
MOST_ROWS = 128  # of a joint pass
HALF_SM_SHARED = 115_712  # bytes: two blocks of this size fit on an SM of 228 KiB
_COLUMN_TILE = 32  # rows of a tile where a launch has several
_BLOCK_K = 64  # K of a block of x in the kernels of clusters
SLICES, SLOTS = 4, 2  # their warps over K, and buffers for other blocks' sums
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster that kernels are built for
_MOST_BLOCKS = CLUSTERS[-1]
DEPTH: Mapping[int, Mapping[Format, int]] = {  # pieces of a warp's ring, by row tile
    16: {"nvfp4": 5, "fp8": 3, "bf16": 3},
    32: {"nvfp4": 2, "fp8": 2, "bf16": 2},
}

Clusters: TypeAlias = Callable[[str, int, int, int], int]
"""(kernel, blocks of a cluster, threads and bytes of shared memory of a block) -> clusters that run at once."""


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
            twins = [(s, twins) for twins in (1, 2) for s in CLUSTERS if s * twins <= _MOST_BLOCKS]
            found["linear_wide"] = [
                f"linear_wide_{f}_{tile}_{s}_{t}" for f in formats for tile in WIDE_TILES for s, t in twins
            ]
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
    def serial_parts(self) -> int:
        """Parts of K that a block takes one after the other."""
        return 1

    @property
    def window(self) -> int:
        """Of the activations in blocks that it reads; it then writes a gated pair so too. 0: it takes rows only."""
        return 0

    def check_orders(self, x_stride: int, out_stride: int, *, gated: bool) -> None:
        """Raise ValueError for row strides of tensors in blocks that the kernel does not read or write."""
        if x_stride not in (-self.window, abs(x_stride)) or (out_stride < 0 and not (gated and self.window)):
            raise ValueError(f"{self.kernel} takes no tensors in blocks of strides {x_stride} and {out_stride}")

    @property
    def rank_bytes(self) -> int:
        """Scratch of :meth:`~edge_dflash.backends.cuda.kernels.linear.Linears.greedy`: each block's best logit."""
        return 8 * self.blocks * self.tile


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


# kernels/linear_cluster.cu: teams of a block by row tile, bytes of barriers and of a block
CLUSTER_TEAMS = {16: (2, 4), 32: (2,)}
_CLUSTER_HEAD, _CLUSTER_SHARED = 384, 227 << 10
_USABLE = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.91}  # of the multiprocessors, by blocks of a cluster (measured on an H200)
_UNIT_END = 1600  # bytes that a warp could have multiplied while it ends a unit


@dataclass(frozen=True)
class ClusterSplits(Splits):
    """Of kernels/linear_cluster.cu: teams of a block's warps own units, the blocks of a cluster one split each.

    Or each block takes the splits in turn: ``groups`` are then its own teams, and no cluster is needed.
    """

    @property
    def serial_parts(self) -> int:
        """See :class:`Splits`."""
        return self.splits if self.per_pass else 1

    @classmethod
    def of(
        cls, layout: Layout, tile: int, splits: int, sm_count: int, clusters: Clusters | None, row_tiles: int = 1
    ) -> ClusterSplits:
        """With so many splits: on no more clusters than the device holds at once, in turn where it holds none."""
        teams, held = cls.block(layout, tile, splits)
        asked = kernel, _, threads, shared = cls._cluster(layout, tile, splits)
        most = clusters(*asked) if clusters else sm_count * held // splits
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
            for s in range(1, _blocks_of(layout) + 1)
            if cls.units_held(layout, 16, s)[1] >= min(2, s) and cls.units_held(layout, 32, s)[1]
        )

    @classmethod
    def units_held(cls, layout: Layout, tile: int, splits: int) -> tuple[int, int]:
        """Teams of a block that takes splits in turn, and units of a team at a time: as many as fit (0: none)."""
        for teams in sorted(CLUSTER_TEAMS[tile], reverse=True):
            left = _CLUSTER_SHARED - cls.turn_shared(layout, tile, splits, teams, 0)
            if (units := left // (128 * tile * teams)) > 0:
                return teams, units
        return min(CLUSTER_TEAMS[tile]), 0

    @staticmethod
    def turn_shared(layout: Layout, tile: int, splits: int, teams: int, units: int) -> int:
        """Shared memory of such a block: barriers, warps' exchange, x of a split by slices, rings, sums of units."""
        sums, ring = 128 * tile, DEPTH[tile][layout.format] * UNIT_BYTES[layout.format]
        slice_blocks = -(-_blocks_of(layout) // (splits * SLICES))
        x = SLICES * slice_blocks * _BLOCK_K * tile * 2
        return _CLUSTER_HEAD + teams * (SLICES * (sums + ring) + units * sums) + x

    @classmethod
    def _cluster(cls, layout: Layout, tile: int, splits: int) -> tuple[str, int, int, int]:
        """The kernel whose blocks of a cluster take a split each, as :data:`Clusters` are asked for it."""
        teams, _ = cls.block(layout, tile, splits)
        kernel = f"linear_cluster_{layout.format}_{tile}_{splits}_{teams}"
        return kernel, splits, 32 * teams * SLICES, cls.shared(layout, tile, splits, teams)

    @classmethod
    def counts(cls, layout: Layout, clusters: Clusters | None = None) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor, and of which the device holds a cluster.

        With any number of rows: the number of splits must not follow from it.
        """
        fit = (s for s in CLUSTERS if all(cls.block(layout, tile, s)[1] for tile in CLUSTER_TEAMS))
        if clusters is None:
            return tuple(fit)
        return tuple(s for s in fit if all(clusters(*cls._cluster(layout, tile, s)) for tile in CLUSTER_TEAMS))

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
        pieces = _blocks_of(layout) / (splits * SLICES)
        return units * (pieces * _piece_bytes(layout.format) + _UNIT_END) * held * teams

    @classmethod
    def shared(cls, layout: Layout, tile: int, splits: int, teams: int) -> int:
        """Shared memory of a block of a cluster: barriers, exchanges of sums, its part of x, rings of weights."""
        if splits == 1:
            return cls.turn_shared(layout, tile, 1, teams, 0)
        sums = 128 * tile  # bytes of one unit of one warp
        rings = teams * SLICES * (sums + DEPTH[tile][layout.format] * UNIT_BYTES[layout.format])
        return _CLUSTER_HEAD + rings + teams * SLOTS * sums + _x_bytes(layout, tile, splits)


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
        asked = kernel, _, _, shared = cls._cluster(layout, splits)
        held = (clusters(*asked) if clusters else 0) or max(1, sm_count // splits)
        groups = min(-(-layout.units // (_QUAD // 2)), held)
        return cls(kernel, layout.format, HOPPER_ROWS, splits, groups, 0, groups * splits, HOPPER_THREADS, shared)

    @property
    def window(self) -> int:
        """See :class:`Splits`."""
        return WINDOW[self.format]

    @classmethod
    def _cluster(cls, layout: Layout, splits: int) -> tuple[str, int, int, int]:
        """The kernel, as :data:`Clusters` are asked for it."""
        return f"linear_hopper_{layout.format}_{splits}", splits, HOPPER_THREADS, cls.shared(layout, splits)

    @classmethod
    def counts(cls, layout: Layout, clusters: Clusters | None = None) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor, and of which the device holds a cluster."""
        fit = (s for s in CLUSTERS if cls.shared(layout, s) <= block_shared(90))
        return tuple(s for s in fit if clusters is None or clusters(*cls._cluster(layout, s)))

    @classmethod
    def cost(cls, layout: Layout, splits: int, sm_count: int) -> float:
        """Bytes of a busiest warp: its pieces, ends of quads, the block's part of x. Fits what an H200 measures."""
        quads = -(-layout.units // _QUAD)
        rounds = -(-quads // max(1, int(sm_count * _HOPPER_USABLE[splits]) // splits))
        pieces = -(-_blocks_of(layout) // (splits * SLICES))
        x = _X_COST * _x_bytes(layout, HOPPER_ROWS, splits)
        return rounds * (pieces * _piece_bytes(layout.format) + _QUAD_END) + x

    @staticmethod
    def shared(layout: Layout, splits: int) -> int:
        """Shared memory of a block: barriers, exchange of sums, slots of other blocks' sums, its part of x, rings."""
        rings = SLICES * _QUAD * (_SUMS + DEPTH[HOPPER_ROWS][layout.format] * UNIT_BYTES[layout.format])
        slots = SLOTS * _QUAD * _SUMS if splits > 1 else 0
        return _HOPPER_HEAD + rings + slots + _x_bytes(layout, HOPPER_ROWS, splits)


# kernels/linear_wide.cu: rows, threads of a block, units of a tile, warpgroups, warps, bytes of barriers
WIDE_TILES, WIDE_THREADS, _TILE_UNITS, _WARPGROUPS, _WIDE_WARPS, _WIDE_HEAD = (32, 64, 128), 640, 2, 4, 16, 2048
TWINS: Mapping[int, int] = {32: 1, 64: 1, 128: 2}  # passes of a cluster at a time, by rows
_X_STAGES: Mapping[int, int] = {32: 8, 64: 6, 128: 3}  # of 64 k each
_PLACES: Mapping[Format, int] = {"nvfp4": 640, "fp8": 1024, "bf16": 1024}  # bytes of a piece in a warp's ring
WIDE_DEPTH: Mapping[int, Mapping[Format, int]] = {
    32: {"nvfp4": 10, "fp8": 8, "bf16": 8},
    64: {"nvfp4": 8, "fp8": 6, "bf16": 6},
    128: {"nvfp4": 4, "fp8": 3, "bf16": 3},
}


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
        kernel, blocks = f"linear_wide_{layout.format}_{tile}_{splits}_{twins}", splits * twins
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
    def shared(format: Format, tile: int) -> int:
        """Shared memory of a block: head, stages of x, sums of four warpgroups, rings of weights."""
        rings = _WIDE_WARPS * WIDE_DEPTH[tile][format] * _PLACES[format]
        return _WIDE_HEAD + tile * (_X_STAGES[tile] * 128 + _WARPGROUPS * 256) + rings


def _blocks_of(layout: Layout) -> int:
    """K in blocks of _BLOCK_K."""
    return -(-layout.k // _BLOCK_K)


def _piece_bytes(format: Format) -> int:
    """Bytes of a unit's next _BLOCK_K columns."""
    return UNIT_BYTES[format] * _BLOCK_K // WINDOW[format]


def _x_bytes(layout: Layout, tile: int, splits: int) -> int:
    """Shared memory of a block's part of x."""
    return -(-_blocks_of(layout) // splits) * _BLOCK_K * tile * 2
