"""A mixture of experts on the device: shapes, buffers and launches of kernels/experts.cu and experts_linear.cu.

The router leaves a list of *entries* (an expert and rows that chose it) on the device; every launch is the same
whatever the routing, so that one graph serves any. A row's bits depend on its own values and the weights alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from edge_dflash.backends.cuda.driver import Gpu, Kernel
from edge_dflash.backends.cuda.experts_shape import (
    ENTRY_HEAD,
    FEW_ROWS,
    LIST_HEAD,
    TILES,
    WARPS,
    ExpertsShape,
    block_bytes,
)
from edge_dflash.backends.cuda.linear import Norm
from edge_dflash.backends.cuda.memory import EMPTY, NULL, Allocator, DevicePointer, Matrix
from edge_dflash.backends.cuda.splits import block_shared
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES

__all__ = ["UNITS", "ExpertKernels", "ExpertWeights", "ExpertsBuffers", "ExpertsShape", "Forced"]

UNITS = ("experts", "experts_linear")  # compilation units of these kernels
_THREADS, _GROUP, _MOST_MEMBERS = 512, 16, 1024
_WHOLE_LIST = 160  # entries: shorter lists are copied whole by every block
_RESERVED = 1 << 10  # bytes of shared memory that every block takes besides


class _Route(ctypes.Structure):
    """``Route`` of kernels/experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "router", "judge", "logits")),
        *((name, ctypes.c_int32) for name in ("x_stride", "hidden", "experts", "rows", "stride")),
    )


class _Choice(ctypes.Structure):
    """``Choice`` of kernels/experts.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "valid", "forced", "length", "distinct", "list", "ids")),
        *((name, ctypes.c_void_p) for name in ("weights", "masks", "before", "first")),
        *((name, ctypes.c_int32) for name in ("experts", "chosen", "shared", "rows", "stride", "renormalised")),
        *((name, ctypes.c_int32) for name in ("positions", "tile")),
    )


class _Products(ctypes.Structure):
    """``Products`` of kernels/experts_linear.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "x", "out", "list")),
        *((name, ctypes.c_int32) for name in ("k", "x_stride", "units", "windows", "columns", "slots")),
        *((name, ctypes.c_int32) for name in ("copied", "whole")),
    )


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
        return cls(
            rows,
            *(
                memory.take("experts", nbytes)
                for nbytes in (
                    2 * rows * shape.stride,
                    4 * (LIST_HEAD + records),
                    4 * rows * shape.chosen,
                    4 * rows * shape.slots,
                    *(2 * groups * _MOST_MEMBERS, 4 * groups * _MOST_MEMBERS, 4 * _MOST_MEMBERS),
                    2 * gated,
                    4 * rows * shape.slots * shape.hidden,
                    8,
                )
            ),
        )


class ExpertKernels:
    """Loaded kernels, for all layers. Enqueues only; every launch may start before the one before it ends."""

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes]) -> None:
        self._gpu = gpu
        small, linear = (gpu.load(cubin(unit)) for unit in UNITS)
        names = ("route", "choose", "choose_group", "list", "place", "sum")
        self._kernels = {name: small.kernel(f"experts_{name}") for name in names}
        most = block_shared(gpu.sm)
        for which in ("up", "down"):
            for form in UNIT_BYTES:
                for tile in TILES:
                    name = f"{which}_{form}_{tile}"
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
        tile = shape.tile(rows, self._gpu.sm)
        self._choose(shape, weights, buffers, x, rows, tile, valid, forced)
        up, down, gated = (weights.up, weights.up_scale), (weights.down, weights.down_scale), buffers.gated
        self._multiply("up", shape, up, x, gated, buffers.list, rows, tile)
        self._multiply("down", shape, down, Matrix(gated, shape.intermediate), buffers.sums, buffers.list, rows, tile)
        added, normal = residual or EMPTY, norm or Norm(NULL, 0.0, EMPTY)
        self._gpu.launch(
            self._kernels["sum"],
            (rows, 1, 1),
            _THREADS,
            (
                *(buffers.sums, buffers.weights, shape.slots, valid, rows, added.pointer, added.stride),
                *(out.pointer, out.stride, shape.hidden, normal.weight, normal.eps),
                *(normal.out.pointer, normal.out.stride),
            ),
            shared_bytes=2 * shape.hidden,
            overlap=True,
        )

    def _choose(
        self,
        shape: ExpertsShape,
        weights: ExpertWeights,
        buffers: ExpertsBuffers,
        x: Matrix,
        rows: int,
        tile: int,
        valid: DevicePointer,
        forced: Forced | None,
    ) -> None:
        groups = -(-rows // _GROUP)
        route = _Route(
            *(x.pointer.address, weights.router.address, weights.judge.address or None, buffers.logits.address),
            *(x.stride, shape.hidden, shape.experts, rows, shape.stride),
        )
        self._launch("route", (shape.stride // 16, groups, 1), route)
        choice = _Choice(
            *(buffers.logits.address, valid.address or None, forced.table.address if forced else None),
            *(forced.length.address if forced else None, buffers.distinct.address, buffers.list.address),
            *(buffers.ids.address, buffers.weights.address, buffers.masks.address, buffers.before.address),
            *(buffers.first.address, shape.experts, shape.chosen, shape.shared, rows, shape.stride),
            *(int(shape.renormalised), forced.positions if forced else 1, tile),
        )
        if groups == 1:
            self._launch("choose", (1, 1, 1), choice)
            return
        self._launch("choose_group", (groups, 1, 1), choice)
        self._launch("list", (1, 1, 1), choice)
        self._launch("place", (groups, 1, 1), choice)

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
        products = _Products(
            *(stack[0].address, stack[1].address, x.pointer.address, out.address, list_.address),
            *(layout.k, x.stride, layout.units, layout.windows, layout.columns[0], shape.slots, copied, int(whole)),
        )
        kernel = self._kernels[f"{which}_{layout.format}_{tile}"]
        gpu.launch(kernel, (blocks, 1, 1), 32 * WARPS, (products,), shared_bytes=shared, overlap=True)

    def _launch(self, name: str, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        kernel: Kernel = self._kernels[name]
        self._gpu.launch(kernel, grid, _THREADS, (arguments,), overlap=True)
