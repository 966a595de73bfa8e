"""Sizes of a mixture of experts on the device: kernels/experts.cu and experts_linear.cu."""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.cuda.splits import block_shared
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

WARPS, UP_PARTS, DOWN_PARTS, LIST_HEAD, ENTRY_HEAD = 8, 4, 1, 4, 4
_MOST_EXPERTS, _MOST_CHOSEN, _MOST_SLOTS = 512, 16, 32
TILES = (8, 16)  # rows of an entry
FEW_ROWS = 32  # passes of at most so many rows have the smaller tile
WHOLE_LIST = 160  # entries: shorter lists are copied whole by every block
WIDE_SHARED = 200 << 10  # bytes of shared memory from which on blocks have the deeper rings
DEPTHS: dict[Format, tuple[int, int]] = {"nvfp4": (5, 3), "fp8": (3, 2), "bf16": (4, 3)}
NARROW_DEPTH = 2  # elsewhere
RESERVED = 1 << 10  # bytes of shared memory that every block takes besides


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

    def entries(self, rows: int) -> int:
        """Most entries of the list of a pass."""
        tile = tile_of(rows)
        routed = min(rows * self.chosen, self.experts + rows * self.chosen // tile)
        return routed + self.shared * -(-rows // tile)


def tile_of(rows: int) -> int:
    """Most rows of an entry."""
    return TILES[0] if rows <= FEW_ROWS else TILES[1]


def depth(form: Format, tile: int, sm: int) -> int:
    """Stages of a ring, ``depth_of`` of kernels/experts_linear.cu."""
    return DEPTHS[form][TILES.index(tile)] if block_shared(sm) >= WIDE_SHARED else NARROW_DEPTH


def ring_bytes(which: str, form: Format, tile: int, sm: int) -> int:
    """Shared memory of a block for its rings and the exchange of sums."""
    parts = UP_PARTS if which == "up" else DOWN_PARTS
    exchange = 2 * WARPS * tile // 8 * 1024 if parts > 1 else 0
    return exchange + WARPS * depth(form, tile, sm) * (UNIT_BYTES[form] + 2 * tile * WINDOW[form])
