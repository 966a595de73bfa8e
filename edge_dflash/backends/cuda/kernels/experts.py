"""A mixture of experts on the device: shapes, buffers and launches of kernels/experts.cu and experts_linear.cu.

The router leaves a list of *entries* (an expert and rows that chose it) on the device; every launch is the same
whatever the routing, so that one graph serves any. A row's bits depend on its own values and the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.kernels.source import Signature, Struct, structure
from edge_dflash.backends.cuda.kernels.splits import block_shared
from edge_dflash.backends.cuda.memory import EMPTY, NO_NORM, NULL, Allocator, DevicePointer, Matrix, Norm
from edge_dflash.errors import BackendError
from edge_dflash.weights.formats import BLOCK
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu

UNITS = ("experts", "experts_linear")  # compilation units of these kernels
WARPS, UP_PARTS, DOWN_PARTS, LIST_HEAD, ENTRY_HEAD = 8, 4, 1, 4, 4
TILES: tuple[int, ...] = (8, 16, 32)  # most rows of an entry
FEW_ROWS, SOME_ROWS = 256, 1024  # passes of at most so many rows have the smallest tile, and the next
COUNTER_BYTES = 8  # of a count of experts
_MOST_EXPERTS, _MOST_CHOSEN, _MOST_SLOTS, _MOST_MEMBERS = 512, 16, 32, 1024
_THREADS, _GROUP = 512, 16
_WHOLE_LIST = 160  # entries: shorter lists are copied whole by every block
_RESERVED = 1 << 10  # bytes of shared memory that every block takes besides
_WIDE_SHARED = 200 << 10  # bytes of shared memory from which on rings are deeper and tiles may be larger
_LIST_ROOM = 8 << 10  # bytes for a block's entries where tiles are larger
# Stages of a ring, of up and of down, by tile and format: depth_of of kernels/experts_linear.cu.
_DEPTHS: dict[int, dict[Format, tuple[int, int]]] = {
    8: {"nvfp4": (4, 5), "fp8": (2, 3), "bf16": (2, 4)},
    16: {"nvfp4": (3, 3), "fp8": (2, 2), "bf16": (2, 2)},
    32: {"nvfp4": (6, 6), "fp8": (3, 3), "bf16": (3, 3)},
}
_NARROW_DEPTH = 2  # elsewhere
_Route, _Choice = structure("experts.cu", "Route"), structure("experts.cu", "Choice")
_Products = structure("experts_linear.cu", "Products")
_SUM = Signature("experts.cu", "experts_sum")


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


@dataclass(frozen=True)
class ExpertWeights:
    """One layer's weights on the device: stacks of all members behind each other, in the layouts of the shape."""

    router: DevicePointer  # BF16 [experts, hidden]
    judge: DevicePointer  # BF16 [1, hidden]; NULL without shared members
    up: DevicePointer
    up_scale: DevicePointer  # FP32 [members, up.units * 32]
    down: DevicePointer
    down_scale: DevicePointer


@dataclass(frozen=True)
class Forced:
    """Experts that rows take in place of the best, each with weight 1 / chosen."""

    table: DevicePointer  # int32 [positions, chosen], no expert twice in a line
    positions: int
    length: DevicePointer  # int32: row r takes line (length + r) % positions


_UNFORCED = Forced(NULL, 1, NULL)


@dataclass(frozen=True)
class ExpertsBuffers:
    """Device memory of a pass, for all of its layers."""

    rows: int
    logits: DevicePointer  # BF16 [rows, stride]
    list: DevicePointer  # int32: kernels/experts.cuh
    ids: DevicePointer  # int32 [rows, chosen], ascending
    weights: DevicePointer  # FP32 [rows, slots]
    masks: DevicePointer
    before: DevicePointer
    first: DevicePointer
    gated: DevicePointer  # BF16 [entries, tile, intermediate]
    sums: DevicePointer  # FP32 [rows, slots, hidden]
    distinct: DevicePointer  # uint64: experts that some row of a pass chose, of all passes

    @classmethod
    def take(cls, memory: Allocator, shape: ExpertsShape, rows: int) -> ExpertsBuffers:
        """Memory for passes of at most so many rows; counts from 0 once ``distinct`` is filled with 0."""
        tiles = TILES if rows > FEW_ROWS else TILES[:1]
        counts = {tile: shape.entries(rows, tile) for tile in tiles}
        # Blocks copy some behind the last.
        records = max(2 * (count + 1) * (ENTRY_HEAD + tile) for tile, count in counts.items())
        groups, gated = -(-rows // _GROUP), max(count * tile for tile, count in counts.items()) * shape.intermediate
        sizes = {
            "logits": 2 * rows * shape.stride,
            "list": 4 * (LIST_HEAD + records),
            "ids": 4 * rows * shape.chosen,
            "weights": 4 * rows * shape.slots,
            "masks": 2 * groups * _MOST_MEMBERS,
            "before": 4 * groups * _MOST_MEMBERS,
            "first": 4 * _MOST_MEMBERS,
            "gated": 2 * gated,
            "sums": 4 * rows * shape.slots * shape.hidden,
            "distinct": COUNTER_BYTES,
        }
        return cls(rows, **{name: memory.take("experts", nbytes) for name, nbytes in sizes.items()})


class ExpertKernels:
    """Loaded kernels, for all layers. Enqueues only; every launch may start before the one before it ends."""

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes]) -> None:
        self._gpu = gpu
        small, linear = (gpu.load(cubin(unit)) for unit in UNITS)
        names = ("route", "choose", "choose_group", "list", "place", "sum")
        self._kernels = {name: small.kernel(f"experts_{name}") for name in names}
        most = block_shared(gpu.sm)
        for name in (f"{which}_{form}_{tile}" for which in ("up", "down") for form in UNIT_BYTES for tile in TILES):
            self._kernels[name] = linear.kernel(f"experts_{name}", shared_bytes=most)
        for kernel in self._kernels.values():
            gpu.prefer_shared(kernel)

    def run(
        self,
        shape: ExpertsShape,
        weights: ExpertWeights,
        buffers: ExpertsBuffers,
        x: Matrix,
        out: Matrix,
        rows: int,
        *,
        residual: Matrix | None = None,
        norm: Norm | None = None,
        valid: DevicePointer = NULL,
        forced: Forced | None = None,
    ) -> None:
        """Out = [residual +] experts of x [rows, hidden], and optionally the norm of the result.

        ``valid``: device count of the rows that count; nothing is written of those behind.
        """
        if rows > buffers.rows or x.stride < 0 or x.stride % 8:
            raise ValueError(f"{rows} rows of stride {x.stride}; at most {buffers.rows}, in rows of a multiple of 8")
        if (weights.judge == NULL) != (shape.shared == 0):
            raise ValueError("shared members need a judge, and a judge shared members")
        tile, groups = shape.tile(rows, self._gpu.sm), -(-rows // _GROUP)
        route = _Route.of(weights, buffers, shape, x=x, rows=rows)
        self._launch("route", (shape.stride // 16, groups, 1), route)
        by = forced or _UNFORCED
        choice = _Choice.of(by, buffers, shape, valid=valid, forced=by.table, rows=rows, tile=tile)
        names = ("choose",) if groups == 1 else ("choose_group", "list", "place")
        for name in names:
            self._launch(name, (1 if name == "list" else groups, 1, 1), choice)
        up, down, gated = (weights.up, weights.up_scale), (weights.down, weights.down_scale), buffers.gated
        self._multiply("up", shape, up, x, gated, buffers.list, rows, tile)
        self._multiply("down", shape, down, Matrix(gated, shape.intermediate), buffers.sums, buffers.list, rows, tile)
        given = {"y": buffers.sums, "valid": valid, "rows": rows, "out": out, "columns": shape.hidden}
        what = _SUM(buffers, shape, **given, residual=residual or EMPTY, **(norm or NO_NORM).values)
        kernel, shared = self._kernels["sum"], 2 * shape.hidden
        self._gpu.launch(kernel, (rows, 1, 1), _THREADS, what, shared_bytes=shared, overlap=True)

    def _multiply(
        self,
        which: str,
        shape: ExpertsShape,
        stack: tuple[DevicePointer, DevicePointer],
        x: Matrix,
        out: DevicePointer,
        list_: DevicePointer,
        rows: int,
        tile: int,
    ) -> None:
        """The products of all entries with their members' matrices, on every multiprocessor."""
        gpu, entries, layout = self._gpu, shape.entries(rows, tile), shape.up if which == "up" else shape.down
        whole = which == "up" and tile == TILES[0] and entries <= _WHOLE_LIST
        most, needed = block_shared(gpu.sm), block_bytes(which, layout, tile, gpu.sm)
        for per in (2, 1) if tile < TILES[2] else (1,):
            blocks = per * gpu.sm_count
            copied = entries if whole else -(-entries // blocks) + 2
            shared = needed + 4 * (LIST_HEAD + copied * (ENTRY_HEAD + tile))
            if per * (shared + _RESERVED) <= most + _RESERVED:
                break
        else:
            raise BackendError(
                f"{layout.format} experts and passes of {rows} rows need {shared} bytes of shared memory a block, "
                f"SM{gpu.sm} has {most}: use shorter passes"
            )
        data, scale = stack
        given = {"weights": data, "scale": scale, "x": x, "out": out, "list": list_, "columns": layout.columns[0]}
        products = _Products.of(layout, shape, **given, copied=copied, whole=whole)
        kernel = self._kernels[f"{which}_{layout.format}_{tile}"]
        gpu.launch(kernel, (blocks, 1, 1), 32 * WARPS, (products,), shared_bytes=shared, overlap=True)

    def _launch(self, name: str, grid: tuple[int, int, int], argument: Struct) -> None:
        self._gpu.launch(self._kernels[name], grid, _THREADS, (argument,), overlap=True)
