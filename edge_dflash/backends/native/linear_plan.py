"""How a linear launch of 1..32 rows (kernels/linear.cu) divides its work over a device. Knows sizes only."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.native.weight_layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout
from edge_dflash.errors import BackendError

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


@dataclass(frozen=True)
class Plan:
    """How one launch divides a stack over the device."""

    splits: int  # of K, over blocks; > 1: sums go through FP32 scratch
    groups: int  # blocks a split; each owns consecutive units
    per_pass: int  # units a block multiplies at once
    shared_bytes: int

    def sum_bytes(self, layout: Layout, rows: int) -> int:
        """Scratch of :meth:`Linears.split_linear`: the FP32 sums of every split."""
        return 4 * self.splits * row_tile(rows) * layout.units * UNIT_ROWS

    def rank_bytes(self, rows: int) -> int:
        """Scratch of :meth:`Linears.greedy`: the best logit of every block."""
        return 8 * self.groups * row_tile(rows)


def row_tile(rows: int) -> int:
    """Rows that the kernel for ``rows`` reads and writes: 16 or 32. Raises BackendError above 32."""
    if not 1 <= rows <= MOST_ROWS:
        raise BackendError(f"a linear pass has {rows} rows; 1 to {MOST_ROWS} are accepted, more go through tiles")
    return 16 if rows <= 16 else 32


def plan(layout: Layout, rows: int, sm: int, sm_count: int, *, may_split: bool = False) -> Plan:
    """Plan of a launch. The number of splits does not depend on ``rows``, so that a row's bits do not."""
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


def shared_bytes(format: Format, tile: int, per_pass: int) -> int:
    """Shared memory of a block: the exchange of sums, and each warp's ring of weights and activations."""
    stage = per_pass * UNIT_BYTES[format] + tile * WINDOW[format] * 2
    return _EXCHANGE_BYTES + _WARPS * _STAGES * stage


def block_shared(sm: int) -> int:
    """Most shared memory of a block, in bytes."""
    return _BLOCK_SHARED.get(sm, 227 << 10)
