"""Linear layers on the device: plans, launches and buffers of kernels/linear.cu, linear_tiles.cu and finish.cu.

Weights come from weight_layout.py. Knows no model. Activations are BF16 rows; outputs are rounded once. A row's bits
depend on its own values, K, the format and the plan's number of splits: never on other rows or on how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from edge_dflash.backends.native.driver import DevicePointer, Gpu, Kernel
from edge_dflash.backends.native.memory import NULL, Matrix
from edge_dflash.backends.native.weight_layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout, Repacked
from edge_dflash.errors import BackendError

UNITS = ("linear", "linear_tiles", "finish")  # compilation units of these kernels
MOST_ROWS = 32  # of :meth:`Linears.linear`; more rows go through :meth:`Linears.tiles`

_WARPS, _THREADS, _PARTS, _STAGES = 8, 256, 4, 2
_EXCHANGE_BYTES = 1024 * _WARPS
_MOST_UNITS: dict[tuple[Format, int], int] = {  # units of a pass: what fits in registers
    ("nvfp4", 16): 4,
    ("nvfp4", 32): 2,
    ("fp8", 16): 2,
    ("fp8", 32): 2,
    ("bf16", 16): 2,
    ("bf16", 32): 2,
}
_TILE_ROWS, _TILE_UNITS, _TILE_STAGES = 128, 4, 3
_HALF_SM_SHARED = 115_712  # two blocks of this size fit on an SM of 228 KiB, so that the next launch can start early
_BLOCK_SHARED = {87: 163 << 10, 89: 99 << 10, 120: 99 << 10, 121: 99 << 10}  # bytes of a block; else 227 KiB
_MOST_SPLITS = 8


class Mode(IntEnum):
    """What becomes of the sums (kernels/job.cuh)."""

    STORE = 0
    RESIDUAL = 1
    SWIGLU = 2
    PARTIAL = 3
    GREEDY = 4


class _Job(ctypes.Structure):
    """``Job`` of kernels/job.cuh."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("k", "x_stride", "units", "windows", "splits", "groups")),
        *((name, ctypes.c_int32) for name in ("per_pass", "prefetch")),
        ("out", ctypes.c_void_p * _PARTS),
        *((name, ctypes.c_int32 * _PARTS) for name in ("out_stride", "start", "columns")),
        ("mode", ctypes.c_int32),
        ("residual", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class LinearWeights:
    """A stack on the device."""

    layout: Layout
    data: DevicePointer
    scale: DevicePointer


@dataclass(frozen=True)
class Plan:
    """How one launch divides a stack over the device."""

    splits: int  # of K, over blocks; > 1: sums go through FP32 scratch
    groups: int  # blocks a split; each owns consecutive units
    per_pass: int  # units a block multiplies at once
    shared_bytes: int

    def scratch_bytes(self, layout: Layout, rows: int) -> int:
        """Bytes of the FP32 sums, or of the ranks of a greedy launch (whichever is larger)."""
        sums = 4 * self.splits * rows * layout.units * UNIT_ROWS if self.splits > 1 else 0
        return max(sums, 8 * self.groups * rows)


@dataclass(frozen=True)
class Norm:
    """RMS norm of a linear's output after its residual; ``weight`` [columns] FP32 is w or 1 + w."""

    weight: DevicePointer
    eps: float
    out: Matrix


def row_tile(rows: int) -> int:
    """Rows that the kernel for ``rows`` reads and writes: 16 or 32. Raises BackendError above 32."""
    if not 1 <= rows <= MOST_ROWS:
        raise BackendError(f"a linear pass has {rows} rows; 1 to {MOST_ROWS} are accepted, more go through tiles")
    return 16 if rows <= 16 else 32


def plan(layout: Layout, rows: int, sm: int, sm_count: int, *, may_split: bool = False) -> Plan:
    """Plan of a launch. The number of splits does not depend on ``rows``, so that a row's bits do not."""
    unit, window = UNIT_BYTES[layout.format], WINDOW[layout.format]
    tile = row_tile(rows)
    stage_x = tile * window * 2
    limit = min(_HALF_SM_SHARED, _block_shared(sm))

    def shared(per_pass: int) -> int:
        return _EXCHANGE_BYTES + _WARPS * _STAGES * (per_pass * unit + stage_x)

    per_pass = _MOST_UNITS[layout.format, tile]
    while per_pass > 1 and shared(per_pass) > limit:
        per_pass -= 1
    splits = 1
    if may_split:
        splits = min(range(1, min(_MOST_SPLITS, layout.windows) + 1), key=lambda s: _cost(layout, s, sm_count))
    return Plan(splits, min(layout.units, max(1, sm_count // splits)), per_pass, shared(per_pass))


def _cost(layout: Layout, splits: int, sm_count: int) -> float:
    """Bytes that the busiest block moves, activations from L2 counted at 0.6: what a split is chosen by."""
    units = -(-layout.units // max(1, sm_count // splits))
    windows = -(-layout.windows // splits)
    passes = -(-units // _MOST_UNITS[layout.format, 16])
    weights = units * windows * UNIT_BYTES[layout.format]
    activations = passes * windows * WINDOW[layout.format] * 32
    sums = units * UNIT_ROWS * 16 * 8 if splits > 1 else 0
    return weights + 0.6 * (activations + sums)


def _block_shared(sm: int) -> int:
    return _BLOCK_SHARED.get(sm, 227 << 10)


class Linears:
    """Loaded kernels. ``cubin`` gives a compilation unit's cubin for this device.

    Enqueues only. Every launch may start before the one before it ends and reads nothing but weights until that one's
    results are there; a kernel after it must likewise read only constants before griddepcontrol.wait.
    """

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes]) -> None:
        self._gpu = gpu
        modules = {unit: gpu.load(cubin(unit)) for unit in UNITS}
        shared = _block_shared(gpu.sm)
        self._linear: dict[tuple[Format, int], Kernel] = {
            (f, r): modules["linear"].kernel(f"linear_{f}_{r}", shared_bytes=shared) for f, r in _MOST_UNITS
        }
        self._tiles: dict[Format, Kernel] = {
            f: modules["linear_tiles"].kernel(f"linear_tiles_{f}", shared_bytes=_tile_shared(f)) for f in UNIT_BYTES
        }
        self._greedy = modules["linear"].kernel("linear_greedy")
        self._finish = modules["finish"].kernel("linear_finish")

    def upload(self, repacked: Repacked) -> LinearWeights:
        """Put a stack on the device."""
        return LinearWeights(repacked.layout, self._gpu.upload(repacked.data), self._gpu.upload(repacked.scale))

    def plan(self, layout: Layout, rows: int, *, may_split: bool = False) -> Plan:
        """Plan for this device."""
        return plan(layout, rows, self._gpu.sm, self._gpu.sm_count, may_split=may_split)

    def linear(
        self,
        weights: LinearWeights,
        x: Matrix,
        out: Sequence[Matrix],
        rows: int,
        *,
        residual: Matrix | None = None,
        side: LinearWeights | None = None,
        side_out: Sequence[Matrix] = (),
        prefetch: int = 0,
    ) -> None:
        """out[i] = x W_i^T of each matrix of the stack; SwiGLU of a gated pair; plus ``residual`` (one matrix).

        x and out have 16 rows for ``rows`` up to 16, else 32. ``side``: a BF16 stack on the same x in the same launch.
        ``prefetch``: windows of each warp to bring into L2 before x is there.
        """
        mode = Mode.SWIGLU if weights.layout.swiglu else Mode.RESIDUAL if residual is not None else Mode.STORE
        plan = self.plan(weights.layout, rows)
        job = _job(weights, x, out, plan, mode, prefetch)
        if residual is not None:
            if len(out) != 1 or residual.stride != out[0].stride:
                raise ValueError(f"a residual of stride {residual.stride} needs one output of the same stride")
            job.residual = residual.pointer.address
        self._launch(weights.layout.format, plan, rows, job, self._side(side, x, side_out, rows))

    def split_linear(
        self,
        weights: LinearWeights,
        x: Matrix,
        out: Matrix,
        rows: int,
        scratch: DevicePointer,
        *,
        residual: Matrix | None = None,
        norm: Norm | None = None,
        prefetch: int = 0,
    ) -> None:
        """Out = [residual +] x W^T of one matrix, K split over blocks, and optionally the norm of the result.

        Two launches. ``scratch`` has plan(may_split=True).scratch_bytes(layout, 16 or 32) bytes.
        """
        layout, tile = weights.layout, row_tile(rows)
        plan = self.plan(layout, rows, may_split=True)
        job = _job(weights, x, (), plan, Mode.PARTIAL, prefetch)
        needed = 4 * plan.splits * tile * layout.units * UNIT_ROWS
        if scratch.nbytes < needed:
            raise ValueError(f"the scratch buffer has {scratch.nbytes} bytes, {needed} are needed")
        job.partial = scratch.address
        self._launch(layout.format, plan, rows, job, _Job())
        columns = layout.columns[0]
        added, normal = residual or Matrix(NULL, 0), norm or Norm(NULL, 0.0, Matrix(NULL, 0))
        self._gpu.launch(
            self._finish,
            (tile, 1, 1),
            _THREADS,
            (
                *(scratch, plan.splits, layout.units * UNIT_ROWS, weights.scale, added.pointer, added.stride),
                *(out.pointer, out.stride, columns, normal.weight, normal.eps, normal.out.pointer, normal.out.stride),
            ),
            shared_bytes=-(-columns // 2) * 4,
            overlap=True,
        )

    def greedy(
        self,
        weights: LinearWeights,
        x: Matrix,
        ids: DevicePointer,
        rows: int,
        scratch: DevicePointer,
        logits: Matrix | None = None,
    ) -> None:
        """ids[r] (int32) = column of row r's largest BF16 logit, the lowest on a tie; stores ``logits`` if given."""
        plan, tile = self.plan(weights.layout, rows), row_tile(rows)
        if scratch.nbytes < 8 * plan.groups * tile:
            raise ValueError(f"the scratch buffer has {scratch.nbytes} bytes, {8 * plan.groups * tile} are needed")
        job = _job(weights, x, (logits or Matrix(NULL, 0),), plan, Mode.GREEDY, 0)
        job.best = scratch.address
        self._launch(weights.layout.format, plan, rows, job, _Job())
        self._gpu.launch(self._greedy, (tile, 1, 1), 32, (scratch, ids, plan.groups, tile), overlap=True)

    def tiles(
        self,
        weights: LinearWeights,
        x: Matrix,
        out: Sequence[Matrix],
        rows: int,
        *,
        residual: Matrix | None = None,
        valid: DevicePointer = NULL,
    ) -> None:
        """:meth:`linear` for many rows (a prefill chunk); skips tiles of 128 rows past the device count ``valid``."""
        mode = Mode.SWIGLU if weights.layout.swiglu else Mode.RESIDUAL if residual is not None else Mode.STORE
        job = _job(weights, x, out, Plan(1, 1, 1, 0), mode, 0)
        if residual is not None:
            job.residual = residual.pointer.address
        layout = weights.layout
        grid = (-(-rows // _TILE_ROWS), -(-layout.units // _TILE_UNITS), 1)
        shared = _tile_shared(layout.format)
        self._gpu.launch(
            self._tiles[layout.format], grid, _THREADS, (job, rows, valid), shared_bytes=shared, overlap=True
        )

    def _side(self, side: LinearWeights | None, x: Matrix, out: Sequence[Matrix], rows: int) -> _Job:
        if side is None:
            return _Job()
        if side.layout.format != "bf16" or side.layout.swiglu:
            raise ValueError(f"a side stack is plain BF16, found {side.layout}")
        return _job(side, x, out, Plan(1, side.layout.units, 1, 0), Mode.STORE, 0)

    def _launch(self, format: Format, plan: Plan, rows: int, job: _Job, side: _Job) -> None:
        tile = row_tile(rows)
        shared = plan.shared_bytes
        if side.groups:
            shared = max(shared, _EXCHANGE_BYTES + _WARPS * _STAGES * (UNIT_BYTES["bf16"] + tile * WINDOW["bf16"] * 2))
        if shared > _block_shared(self._gpu.sm):
            raise BackendError(
                f"a {format} linear of {rows} rows needs {shared} bytes of shared memory a block, "
                f"SM{self._gpu.sm} has {_block_shared(self._gpu.sm)}: use blocks of at most 16 rows"
            )
        grid = (plan.groups * plan.splits + side.groups, 1, 1)
        self._gpu.launch(self._linear[format, tile], grid, _THREADS, (job, side), shared_bytes=shared, overlap=True)


def _tile_shared(format: Format) -> int:
    return _TILE_STAGES * (_TILE_UNITS * UNIT_BYTES[format] + _TILE_ROWS * WINDOW[format] * 2)


def _job(weights: LinearWeights, x: Matrix, out: Sequence[Matrix], plan: Plan, mode: Mode, prefetch: int) -> _Job:
    layout = weights.layout
    parts = 1 if layout.swiglu else len(layout.columns)
    columns, starts = layout.columns, layout.starts
    if mode == Mode.PARTIAL:
        if parts != 1:
            raise ValueError(f"only one matrix can be split over blocks, found a stack of {parts}")
    elif len(out) == 1 and parts > 1 and all(n % UNIT_ROWS == 0 for n in columns[:-1]):
        columns, starts = (sum(columns),), (0,)  # one output for the whole stack
    elif len(out) != parts or parts > _PARTS:
        raise ValueError(f"a stack of {parts} matrices needs as many outputs (at most {_PARTS}), found {len(out)}")
    if x.stride % 8:
        raise ValueError(f"activations have row stride {x.stride}; a multiple of 8 is needed")
    job = _Job(
        *(weights.data.address, weights.scale.address, x.pointer.address),
        *(layout.k, x.stride, layout.units, layout.windows, plan.splits, plan.groups, plan.per_pass, prefetch),
        mode=mode,
    )
    for i in range(_PARTS):
        inside = i < len(out)
        job.out[i] = out[i].pointer.address if inside else None
        job.out_stride[i] = out[i].stride if inside else 0
        job.start[i] = starts[i] if inside else 1 << 30
        job.columns[i] = columns[i] if inside else 0
    return job
