"""How a launch of a linear divides its stack over a device: one record for each family of kernels. Sizes alone.

Passes of 1 to 32 rows have three. kernels/linear_hopper.cu for up to 16 rows where there are warpgroup products;
kernels/linear_cluster.cu where blocks of a cluster reach each other's shared memory and a block may have half of a
multiprocessor's 228 KiB; kernels/linear.cu elsewhere. The rows of a prefill chunk go through kernels/linear_tiles.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_dflash.board.archs import arch_of_sm, supports
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout

MOST_ROWS = 32  # more rows go through :class:`Tiles`
_HALF_SM_SHARED = 115_712  # bytes: two blocks of this size fit on an SM of 228 KiB
_BLOCK_K = 64  # K of a block of x in the kernels of clusters
_SLICES, _SLOTS = 4, 2  # their warps over K, and buffers for other blocks' sums
_CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster that kernels are built for

Clusters = Callable[[str, int, int, int], int]
"""(kernel, blocks of a cluster, threads and bytes of shared memory of a block) -> clusters that run at once."""


def row_tile(rows: int) -> int:
    """Rows that the kernel for ``rows`` reads and writes: 16 or 32. Raises BackendError above 32."""
    if not 1 <= rows <= MOST_ROWS:
        raise BackendError(f"a linear pass has {rows} rows; 1 to {MOST_ROWS} are accepted, more go through tiles")
    return 16 if rows <= 16 else 32


def block_shared(sm: int) -> int:
    """Most shared memory of a block, in bytes."""
    arch = arch_of_sm(sm)
    return arch.block_shared if arch else 227 << 10


def clustered(sm: int) -> bool:
    """Whether this architecture runs kernels/linear_cluster.cu."""
    return supports(sm, "clusters") and block_shared(sm) > _HALF_SM_SHARED


def hopper(sm: int, most_rows: int) -> bool:
    """Whether passes of at most so many rows run kernels/linear_hopper.cu, where a block's part of x leaves room."""
    return supports(sm, "wgmma") and most_rows <= HOPPER_ROWS


def kernel_names(sm: int, most_rows: int) -> dict[str, list[str]]:
    """The kernels that :func:`choose_splits` picks from, by compilation unit; the unit of most passes first."""
    formats = sorted(UNIT_BYTES)
    if clustered(sm):
        forms = [f"{tile}_{s}_{t}" for tile, teams in CLUSTER_TEAMS.items() for t in teams for s in _CLUSTERS]
        found = {"linear_cluster": [f"linear_cluster_{f}_{form}" for f in formats for form in forms]}
    else:
        found = {"linear": [f"linear_{f}_{tile}" for f in formats for tile in (16, 32)]}
    if hopper(sm, most_rows):
        found["linear_hopper"] = [f"linear_hopper_{f}_{s}" for f in formats for s in _CLUSTERS]
    return found


def choose_splits(
    layout: Layout,
    rows: int,
    sm: int,
    sm_count: int,
    *,
    may_split: bool = False,
    most_rows: int = MOST_ROWS,
    clusters: Clusters | None = None,
) -> Splits:
    """How a stack is launched. The number of splits does not depend on ``rows``, so that a row's bits do not.

    ``most_rows``: of any pass of the engine; it chooses the kernel. ``may_split``: sums may go through scratch. Without
    ``clusters`` a device holds as many clusters as ``sm_count`` multiprocessors hold.
    """
    tile = row_tile(rows)
    if not clustered(sm):
        return StreamSplits.of(layout, tile, sm, sm_count, may_split=may_split)
    if hopper(sm, most_rows) and (counts := HopperSplits.counts(layout)):
        best = min(counts, key=lambda s: HopperSplits.cost(layout, s, sm_count))
        return HopperSplits.of(layout, best, sm_count, clusters)
    counts = ClusterSplits.counts(layout) or _CLUSTERS[-1:]  # what fits nowhere is refused at its launch
    best = min(counts, key=lambda s: ClusterSplits.cost(layout, s, sm_count))
    return ClusterSplits.of(layout, tile, best, sm_count, clusters)


@dataclass(frozen=True)
class Splits:
    """How one launch divides a stack over a device: what all kernels have."""

    kernel: str
    format: Format
    tile: int  # rows that are read and written: 16 or 32
    splits: int  # parts of K, each of other blocks
    groups: int  # that share out the stack's units: blocks of a split, teams of warps, or clusters
    per_pass: int  # units that a block multiplies at once; 0: the kernel's own number
    blocks: int
    threads: int  # of a block
    shared_bytes: int  # of a block

    @property
    def shares(self) -> tuple[int, int, int]:
        """What a job says of it."""
        return self.splits, self.groups, self.per_pass

    @property
    def rank_bytes(self) -> int:
        """Scratch of :meth:`~edge_dflash.backends.cuda.linear.Linears.greedy`: the best logit of every block."""
        return 8 * self.blocks * self.tile


# kernels/linear.cu: warps of a block, stages of a warp's ring, units that fit in registers, most splits
_WARPS, _STAGES, _UNITS, _MOST_SPLITS = 8, 2, 2, 8


@dataclass(frozen=True)
class StreamSplits(Splits):
    """Of kernels/linear.cu: a block streams consecutive units, sums of splits meet in FP32 scratch."""

    @classmethod
    def of(cls, layout: Layout, tile: int, sm: int, sm_count: int, *, may_split: bool) -> StreamSplits:
        """With the number of splits that costs least."""
        units, limit = _UNITS, min(_HALF_SM_SHARED, block_shared(sm))
        while units > 1 and cls.shared(layout.format, tile, units) > limit:
            units -= 1
        most = min(_MOST_SPLITS, layout.windows) if may_split else 1
        splits = min(range(1, most + 1), key=lambda s: cls.cost(layout, s, sm_count))
        groups = min(layout.units, max(1, sm_count // splits))
        shared = cls.shared(layout.format, tile, units)
        kernel, blocks = f"linear_{layout.format}_{tile}", groups * splits
        return cls(kernel, layout.format, tile, splits, groups, units, blocks, 32 * _WARPS, shared)

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

    def sum_bytes(self, layout: Layout) -> int:
        """Scratch of a launch with splits: FP32 sums [splits, tile, rows of all units]."""
        return 4 * self.splits * self.tile * layout.units * UNIT_ROWS


# kernels/linear_cluster.cu: teams of a block by row tile, pieces of a ring, bytes of barriers
CLUSTER_TEAMS = {16: (2, 4), 32: (2,)}
_DEPTH: Mapping[int, Mapping[Format, int]] = {
    16: {"nvfp4": 5, "fp8": 3, "bf16": 3},
    32: {"nvfp4": 2, "fp8": 2, "bf16": 2},
}
_CLUSTER_HEAD = 384
_USABLE = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.91}  # of the multiprocessors, by blocks of a cluster (measured on an H200)
_UNIT_END = 1600  # bytes that a warp could have multiplied while it ends a unit


@dataclass(frozen=True)
class ClusterSplits(Splits):
    """Of kernels/linear_cluster.cu: blocks of a cluster are the splits, teams of their warps own units."""

    @classmethod
    def of(cls, layout: Layout, tile: int, splits: int, sm_count: int, clusters: Clusters | None) -> ClusterSplits:
        """With so many splits, and no more clusters than the device holds at once."""
        teams, held = cls.block(layout, tile, splits)
        shared, threads = cls.shared(layout, tile, splits, teams), 32 * teams * _SLICES
        kernel = f"linear_cluster_{layout.format}_{tile}_{splits}_{teams}"
        if clusters and held:
            most = _held(clusters, kernel, splits, threads, shared)
        else:
            most = sm_count * max(1, held) // splits
        made = min(-(-2 * layout.units // teams), max(1, most))  # every team at least half a unit
        return cls(kernel, layout.format, tile, splits, teams * made, 0, made * splits, threads, shared)

    @classmethod
    def counts(cls, layout: Layout) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor with any number of rows."""
        return tuple(s for s in _CLUSTERS if all(cls.block(layout, tile, s)[1] for tile in CLUSTER_TEAMS))

    @classmethod
    def block(cls, layout: Layout, tile: int, splits: int) -> tuple[int, int]:
        """Teams of a block and blocks of a multiprocessor: the first form that fits (0 blocks: none does)."""
        for teams, held in ((2, 2), (4, 1), (2, 1)) if tile == 16 else ((2, 1),):
            if cls.shared(layout, tile, splits, teams) <= (_HALF_SM_SHARED if held == 2 else 227 << 10):
                return teams, held
        return 2, 0

    @classmethod
    def cost(cls, layout: Layout, splits: int, sm_count: int) -> float:
        """Bytes of the busiest team's warps, the end of a unit counted as some more: fits what an H200 measures."""
        teams, held = cls.block(layout, 16, splits)
        groups = teams * max(1, int(held * sm_count * _USABLE[splits]) // splits)
        whole, rest = divmod(layout.units, groups)
        units = whole + (0.0 if rest == 0 else 0.5 if 2 * rest <= groups else 1.0)
        pieces = _blocks(layout) / (splits * _SLICES)
        return units * (pieces * _piece(layout.format) + _UNIT_END) * held * teams

    @staticmethod
    def shared(layout: Layout, tile: int, splits: int, teams: int) -> int:
        """Shared memory of a block: barriers, exchanges of sums, its part of x, rings of weights."""
        sums = 128 * tile  # bytes of one unit of one warp
        rings = teams * _SLICES * (sums + _DEPTH[tile][layout.format] * UNIT_BYTES[layout.format])
        return _CLUSTER_HEAD + rings + (teams * _SLOTS * sums if splits > 1 else 0) + _x_bytes(layout, tile, splits)


# kernels/linear_hopper.cu: most rows, threads of a block, units of a quad, bytes of a warp's sums and of barriers
HOPPER_ROWS, HOPPER_THREADS, _QUAD, _SUMS, _HOPPER_HEAD = 16, 640, 4, 2048, 256
_HOPPER_USABLE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}  # of the multiprocessors, by blocks of a cluster
_QUAD_END = 1700  # bytes that a warp could have multiplied while it ends a quad
_X_COST = 0.12  # of a byte of the block's x, where a byte of a warp's weights costs 1


@dataclass(frozen=True)
class HopperSplits(Splits):
    """Of kernels/linear_hopper.cu: blocks of a cluster are the splits, clusters own quads of units."""

    @classmethod
    def of(cls, layout: Layout, splits: int, sm_count: int, clusters: Clusters | None) -> HopperSplits:
        """With so many splits, and no more clusters than the device holds at once."""
        shared, kernel = cls.shared(layout, splits), f"linear_hopper_{layout.format}_{splits}"
        most = _held(clusters, kernel, splits, HOPPER_THREADS, shared) if clusters else sm_count // splits
        groups = min(-(-layout.units // _QUAD), max(1, most))
        return cls(kernel, layout.format, HOPPER_ROWS, splits, groups, 0, groups * splits, HOPPER_THREADS, shared)

    @classmethod
    def counts(cls, layout: Layout) -> tuple[int, ...]:
        """Numbers of splits whose blocks fit on a multiprocessor."""
        return tuple(s for s in _CLUSTERS if cls.shared(layout, s) <= block_shared(90))

    @classmethod
    def cost(cls, layout: Layout, splits: int, sm_count: int) -> float:
        """Bytes of a busiest warp: its pieces, ends of quads, the block's part of x. Fits what an H200 measures."""
        quads = -(-layout.units // _QUAD)
        rounds = -(-quads // max(1, int(sm_count * _HOPPER_USABLE[splits]) // splits))
        pieces = -(-_blocks(layout) // (splits * _SLICES))
        return rounds * (pieces * _piece(layout.format) + _QUAD_END) + _X_COST * _x_bytes(layout, HOPPER_ROWS, splits)

    @staticmethod
    def shared(layout: Layout, splits: int) -> int:
        """Shared memory of a block: barriers, exchange of sums, slots of other blocks' sums, its part of x, rings."""
        rings = _SLICES * _QUAD * (_SUMS + _DEPTH[HOPPER_ROWS][layout.format] * UNIT_BYTES[layout.format])
        slots = _SLOTS * _QUAD * _SUMS if splits > 1 else 0
        return _HOPPER_HEAD + rings + slots + _x_bytes(layout, HOPPER_ROWS, splits)


def _held(clusters: Clusters, kernel: str, splits: int, threads: int, shared: int) -> int:
    most = clusters(kernel, splits, threads, shared)
    if most < 1:
        raise BackendError(
            f"the device has no room for a cluster of {splits} blocks with {shared} bytes of shared memory each; "
            "give the program the whole device, or a larger slice of it"
        )
    return most


def _blocks(layout: Layout) -> int:
    return -(-layout.k // _BLOCK_K)


def _piece(format: Format) -> int:
    """Bytes of a unit's next _BLOCK_K columns."""
    return UNIT_BYTES[format] * _BLOCK_K // WINDOW[format]


def _x_bytes(layout: Layout, tile: int, splits: int) -> int:
    """Shared memory of a block's part of x."""
    return -(-_blocks(layout) // splits) * _BLOCK_K * tile * 2
