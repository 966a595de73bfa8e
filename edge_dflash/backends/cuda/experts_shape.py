"""Sizes of a mixture of experts on the device: kernels/experts.cu and experts_linear.cu."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.cuda.splits import block_shared
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

WARPS, UP_PARTS, DOWN_PARTS, LIST_HEAD, ENTRY_HEAD = 8, 4, 1, 4, 4
_MOST_EXPERTS, _MOST_CHOSEN, _MOST_SLOTS = 512, 16, 32
TILES: tuple[int, ...] = (8, 16, 32)  # most rows of an entry
FEW_ROWS, SOME_ROWS = 256, 1024  # passes of at most so many rows have the smallest tile, and the next
_WIDE_SHARED = 200 << 10  # bytes of shared memory from which on rings are deeper and tiles may be larger
_LIST_ROOM = 8 << 10  # bytes for a block's entries where tiles are larger
# Stages of a ring, of up and of down, by tile and format: depth_of of kernels/experts_linear.cu.
_DEPTHS: dict[int, dict[Format, tuple[int, int]]] = {
    8: {"nvfp4": (4, 5), "fp8": (2, 3), "bf16": (2, 4)},
    16: {"nvfp4": (3, 3), "fp8": (2, 2), "bf16": (2, 2)},
    32: {"nvfp4": (6, 6), "fp8": (3, 3), "bf16": (3, 3)},
}
_NARROW_DEPTH = 2  # elsewhere


@dataclass(frozen=True)
class ExpertsShape:
    """Experts of a layer. Members are the experts, then the slices of the shared expert; slots a row's members."""

    hidden: int
    experts: int
    chosen: int  # of a row
    intermediate: int  # of a member
    shared: int  # members that every row chooses, by the judge's weight
    renormalised: bool  # the chosen weights sum to 1
    up_format: Format
    down_format: Format

    def __post_init__(self) -> None:
        if self.hidden % BLOCK or self.intermediate % BLOCK:
            raise BackendError(
                f"experts have {self.intermediate} columns over {self.hidden}; the native kernels take multiples of "
                f"{BLOCK}"
            )
        most = min(self.experts, _MOST_CHOSEN)
        if not 0 < self.experts <= _MOST_EXPERTS or not 0 < self.chosen <= most:
            raise BackendError(
                f"a row chooses {self.chosen} of {self.experts} experts; the native kernels take at most {most} of "
                f"at most {_MOST_EXPERTS}"
            )
        if self.shared < 0 or self.slots > _MOST_SLOTS:
            raise BackendError(
                f"a row has {self.shared} shared members beside {self.chosen} experts; the native kernels take at most "
                f"{_MOST_SLOTS} in all"
            )

    @property
    def up(self) -> Layout:
        """Gate and up of a member."""
        return Layout(self.up_format, (self.intermediate, self.intermediate), self.hidden, swiglu=True)

    @property
    def down(self) -> Layout:
        """Down of a member."""
        return Layout(self.down_format, (self.hidden,), self.intermediate)

    @property
    def members(self) -> int:
        """Experts and slices of the shared expert."""
        return self.experts + self.shared

    @property
    def slots(self) -> int:
        """Members of a row."""
        return self.chosen + self.shared

    @property
    def stride(self) -> int:
        """Elements of a row of logits: those of the experts, and the judge's."""
        return -(-(self.experts + 1) // 16) * 16

    def entries(self, rows: int, tile: int) -> int:
        """Most entries of the list of a pass."""
        routed = min(rows * self.chosen, self.experts + rows * self.chosen // tile)
        return routed + self.shared * -(-rows // tile)

    def tile(self, rows: int, sm: int) -> int:
        """Most rows of an entry in passes of so many rows on a device."""
        if rows <= FEW_ROWS or block_shared(sm) < _WIDE_SHARED:
            return TILES[0]
        if rows <= SOME_ROWS:
            return TILES[1]
        stacks = (("up", self.up), ("down", self.down))
        most = block_shared(sm) - _LIST_ROOM
        return TILES[2] if all(block_bytes(*stack, TILES[2], sm) <= most for stack in stacks) else TILES[1]


def block_bytes(which: str, layout: Layout, tile: int, sm: int) -> int:
    """Shared memory of a block, but for its list: the exchange of sums, its rings, the rows of an entry."""
    parts, window = UP_PARTS if which == "up" else DOWN_PARTS, 2 * tile * WINDOW[layout.format]
    exchange = WARPS * tile // 8 * 1024 if parts > 1 else 0
    depths = _DEPTHS[tile][layout.format] if block_shared(sm) >= _WIDE_SHARED else (_NARROW_DEPTH, _NARROW_DEPTH)
    stages, piece = WARPS * depths[which == "down"], UNIT_BYTES[layout.format]
    if tile in TILES[:2]:
        return exchange + stages * (piece + window)
    return exchange + stages * piece + layout.windows * window
