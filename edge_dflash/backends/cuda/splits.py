"""How a linear launch of 1..32 rows divides its work over a device. Knows sizes only.

Three kernels. kernels/linear_cluster.cu where blocks of a cluster reach each other's shared memory and a block may have
half of a multiprocessor's 228 KiB (SM90, SM110); kernels/linear_hopper.cu for up to 16 rows where there are warpgroup
products (SM90); kernels/linear.cu elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout

MOST_ROWS = 32  # more rows go through :meth:`Linears.tiles`
MOST_UNITS: dict[tuple[Format, int], int] = {  # units of a pass: what fits in registers, by format and row tile
    ("nvfp4", 16): 2,
    ("nvfp4", 32): 2,
    ("fp8", 16): 2,
    ("fp8", 32): 2,
    ("bf16", 16): 2,
    ("bf16", 32): 2,
}

_WARPS, _STAGES = 8, 2
_EXCHANGE_BYTES = 1024 * _WARPS
_HALF_SM_SHARED = 115_712  # two blocks of this size fit on an SM of 228 KiB
_BLOCK_SHARED = {87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}  # bytes of a block; else 227 KiB
_MOST_SPLITS = 8
# kernels/linear_cluster.cu: blocks of a cluster; warps of a team, units in flight, K of a block of x, barriers
CLUSTER_SPLITS = (1, 2, 4, 8)
CLUSTER_TEAMS = {16: (2, 4), 32: (2,)}  # by row tile
_DEPTH: dict[tuple[Format, int], int] = {  # pieces of a ring, by format and row tile
    ("nvfp4", 16): 5,
    ("nvfp4", 32): 2,
    ("fp8", 16): 3,
    ("fp8", 32): 2,
    ("bf16", 16): 3,
    ("bf16", 32): 2,
}
_USABLE = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.91}  # of the multiprocessors, by blocks of a cluster (measured on an H200)
_UNIT_END = 1600  # bytes that a warp could have multiplied while it ends a unit
_SLICES, _SLOTS, _BLOCK_K, _CLUSTER_HEAD = 4, 2, 64, 384
# kernels/linear_hopper.cu: most rows, threads of a block, units of a quad, bytes of a warp's sums and of barriers
HOPPER_ROWS, HOPPER_THREADS, _QUAD, _SUMS, _HOPPER_HEAD = 16, 640, 4, 2048, 256
_HOPPER_DEPTH: dict[Format, int] = {"nvfp4": 5, "fp8": 3, "bf16": 3}
_HOPPER_USABLE = {1: 1.0, 2: 1.0, 4: 0.91, 8: 0.91}  # of the multiprocessors, by blocks of a cluster
_QUAD_END = 1700  # bytes that a warp could have multiplied while it ends a quad
_X_COST = 0.12  # of a byte of the block's x, where a byte of a warp's weights costs 1


@dataclass(frozen=True)
class Plan:
    """How one launch divides a stack over the device."""

    splits: int  # of K, over blocks; > 1: sums go through FP32 scratch
    groups: int  # blocks a split; each owns consecutive units
    per_pass: int  # units a block multiplies at once
    shared_bytes: int
    teams: int = 0  # of a block: the blocks of a cluster are the splits, ``groups`` are teams
    hopper: bool = False  # of kernels/linear_hopper.cu: ``groups`` are clusters

    @property
    def clustered(self) -> bool:
        """Whether the blocks of a cluster share the sums: no sums go through scratch."""
        return self.hopper or self.teams > 0

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.groups // (self.teams or 1) * self.splits

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return HOPPER_THREADS if self.hopper else 32 * (self.teams * _SLICES or _WARPS)

    def sum_bytes(self, layout: Layout, rows: int) -> int:
        """Scratch of :meth:`Linears.split_linear`: the FP32 sums of every split."""
        return 0 if self.clustered else 4 * self.splits * row_tile(rows) * layout.units * UNIT_ROWS

    def rank_bytes(self, rows: int) -> int:
        """Scratch of :meth:`Linears.greedy`: the best logit of every block."""
        return 8 * self.blocks * row_tile(rows)


def row_tile(rows: int) -> int:
    """Rows that the kernel for ``rows`` reads and writes: 16 or 32. Raises BackendError above 32."""
    if not 1 <= rows <= MOST_ROWS:
        raise BackendError(f"a linear pass has {rows} rows; 1 to {MOST_ROWS} are accepted, more go through tiles")
    return 16 if rows <= 16 else 32


def clustered(sm: int) -> bool:
    """Whether this architecture runs kernels/linear_cluster.cu."""
    return sm >= 90 and block_shared(sm) > _HALF_SM_SHARED


def hopper(sm: int, most_rows: int) -> bool:
    """Whether passes of at most so many rows run kernels/linear_hopper.cu, where a block's part of x leaves room."""
    return sm == 90 and most_rows <= HOPPER_ROWS


def plan(
    layout: Layout,
    rows: int,
    sm: int,
    sm_count: int,
    *,
    may_split: bool = False,
    most_rows: int = MOST_ROWS,
    clusters: Callable[[int, int, int], int] | None = None,
) -> Plan:
    """Plan of a launch. The number of splits does not depend on ``rows``, so that a row's bits do not.

    ``most_rows``: of any pass of the engine; it chooses the kernel. ``clusters``: how many clusters of so many blocks,
    of so many teams and bytes of shared memory each, the device holds at once (if not given: as many as ``sm_count``
    multiprocessors hold).
    """
    if hopper(sm, most_rows):
        found = hopper_plan(layout, sm_count, clusters)
        if found.shared_bytes <= block_shared(sm):
            return found
    if clustered(sm):
        return _cluster_plan(layout, rows, sm_count, clusters)
    tile = row_tile(rows)
    limit = min(_HALF_SM_SHARED, block_shared(sm))
    per_pass = MOST_UNITS[layout.format, tile]
    while per_pass > 1 and shared_bytes(layout.format, tile, per_pass) > limit:
        per_pass -= 1
    blocks = sm_count * (2 if block_shared(sm) > _HALF_SM_SHARED and sm >= 90 else 1)
    splits = 1
    if may_split:
        splits = min(range(1, min(_MOST_SPLITS, layout.windows) + 1), key=lambda s: _cost(layout, s, blocks))
    return Plan(
        splits, min(layout.units, max(1, blocks // splits)), per_pass, shared_bytes(layout.format, tile, per_pass)
    )


def _cost(layout: Layout, splits: int, blocks: int) -> float:
    """Bytes that the busiest block moves, activations from L2 counted at 0.6: what a split is chosen by."""
    units = -(-layout.units // max(1, blocks // splits))
    windows = -(-layout.windows // (splits * _WARPS)) * _WARPS  # of the busiest warp, times the warps
    passes = -(-units // MOST_UNITS[layout.format, 16])
    weights = units * windows * UNIT_BYTES[layout.format]
    activations = passes * windows * WINDOW[layout.format] * 32
    sums = units * UNIT_ROWS * 16 * 8 if splits > 1 else 0
    return weights + 0.6 * (activations + sums)


def _cluster_plan(layout: Layout, rows: int, sm_count: int, clusters: Callable[[int, int, int], int] | None) -> Plan:
    tile = row_tile(rows)
    splits = min(CLUSTER_SPLITS, key=lambda s: _cluster_cost(layout, s, sm_count))
    return cluster_plan(layout, tile, sm_count, splits, clusters)


def cluster_plan(
    layout: Layout, tile: int, sm_count: int, splits: int, clusters: Callable[[int, int, int], int] | None
) -> Plan:
    """Plan with so many splits."""
    teams, held = _block_form(layout, tile, splits)
    shared = cluster_shared(layout, tile, splits, teams)
    most = _held(clusters, splits, teams, shared) if clusters and held else sm_count * max(1, held) // splits
    needed = -(-2 * layout.units // teams)  # every team at least half a unit
    return Plan(splits, teams * min(needed, max(1, most)), 0, shared, teams)


def _held(clusters: Callable[[int, int, int], int], splits: int, teams: int, shared: int) -> int:
    most = clusters(splits, teams, shared)
    if most < 1:
        raise BackendError(
            f"the device has no room for a cluster of {splits} blocks with {shared} bytes of shared memory each; "
            "give the program the whole device, or a larger slice of it"
        )
    return most


def _block_form(layout: Layout, tile: int, splits: int) -> tuple[int, int]:
    """Teams of a block and blocks of a multiprocessor: the first form that fits (0 blocks: none does)."""
    for teams, held in ((2, 2), (4, 1), (2, 1)) if tile == 16 else ((2, 1),):
        if cluster_shared(layout, tile, splits, teams) <= (_HALF_SM_SHARED if held == 2 else 227 << 10):
            return teams, held
    return 2, 0


def _cluster_cost(layout: Layout, splits: int, sm_count: int) -> float:
    """Pieces of the busiest team's warps, the end of a unit counted as some more: fits what an H200 measures."""
    teams, held = _block_form(layout, 16, splits)
    if held == 0 or _block_form(layout, 32, splits)[1] == 0:
        return 1e30 / splits
    groups = teams * max(1, int(held * sm_count * _USABLE[splits]) // splits)
    whole, rest = divmod(layout.units, groups)
    units = whole + (0.0 if rest == 0 else 0.5 if 2 * rest <= groups else 1.0)
    piece = UNIT_BYTES[layout.format] * _BLOCK_K // WINDOW[layout.format]  # bytes of 64 columns
    pieces = -(-layout.k // _BLOCK_K) / (splits * _SLICES)
    return units * (pieces * piece + _UNIT_END) * held * teams


def hopper_plan(
    layout: Layout, sm_count: int, clusters: Callable[[int, int, int], int] | None, splits: int | None = None
) -> Plan:
    """Plan of kernels/linear_hopper.cu; with so many ``splits`` if given."""
    if splits is None:
        splits = min(CLUSTER_SPLITS, key=lambda s: _hopper_cost(layout, s, sm_count))
    shared = _hopper_shared(layout, splits)
    most = _held(clusters, splits, 0, shared) if clusters and shared <= block_shared(90) else sm_count // splits
    return Plan(splits, min(-(-layout.units // _QUAD), max(1, most)), 0, shared, hopper=True)


def _hopper_shared(layout: Layout, splits: int) -> int:
    """Shared memory of a block: barriers, exchange of sums, slots of other blocks' sums, its part of x, rings."""
    warps = _SLICES * _QUAD
    slots = _SLOTS * _QUAD * _SUMS if splits > 1 else 0
    x = -(-_blocks(layout) // splits) * _BLOCK_K * HOPPER_ROWS * 2
    return _HOPPER_HEAD + warps * (_SUMS + _HOPPER_DEPTH[layout.format] * UNIT_BYTES[layout.format]) + slots + x


def _hopper_cost(layout: Layout, splits: int, sm_count: int) -> float:
    """Bytes of a busiest warp: of its pieces, the ends of quads, the block's part of x. Fits what an H200 measures."""
    if _hopper_shared(layout, splits) > block_shared(90):
        return 1e30 / splits
    quads = -(-layout.units // _QUAD)
    rounds = -(-quads // max(1, int(sm_count * _HOPPER_USABLE[splits]) // splits))
    pieces = -(-_blocks(layout) // (splits * _SLICES))
    piece = UNIT_BYTES[layout.format] * _BLOCK_K // WINDOW[layout.format]  # bytes of 64 columns
    x = -(-_blocks(layout) // splits) * _BLOCK_K * HOPPER_ROWS * 2
    return rounds * (pieces * piece + _QUAD_END) + _X_COST * x


def _blocks(layout: Layout) -> int:
    return -(-layout.k // _BLOCK_K)


def cluster_shared(layout: Layout, tile: int, splits: int, teams: int) -> int:
    """Shared memory of a block of kernels/linear_cluster.cu: exchanges of sums, its part of x, rings of weights."""
    sums = 128 * tile  # bytes of one unit of one warp
    slots = teams * _SLOTS * sums if splits > 1 else 0
    blocks = -(-layout.k // _BLOCK_K)
    x = -(-blocks // splits) * _BLOCK_K * tile * 2
    return (
        _CLUSTER_HEAD + teams * _SLICES * (sums + _DEPTH[layout.format, tile] * UNIT_BYTES[layout.format]) + slots + x
    )


def shared_bytes(format: Format, tile: int, per_pass: int) -> int:
    """Shared memory of a block: the exchange of sums, and each warp's ring of weights and activations."""
    stage = per_pass * UNIT_BYTES[format] + tile * WINDOW[format] * 2
    return _EXCHANGE_BYTES + _WARPS * _STAGES * stage


def block_shared(sm: int) -> int:
    """Most shared memory of a block, in bytes."""
    return _BLOCK_SHARED.get(sm, 227 << 10)
