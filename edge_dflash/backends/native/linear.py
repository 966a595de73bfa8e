"""Linear layers on the device: plans, launches and buffers of kernels/linear.cu, linear_tiles.cu and finish.cu.

Weights come from weight_layout.py. Knows no model. Activations are BF16 rows; outputs are rounded once. A row's bits
depend on its own values, the weights and the plan (splits, blocks): never on other rows or on how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from edge_dflash.backends.native import linear_tiles
from edge_dflash.backends.native.driver import DevicePointer, Gpu, Kernel
from edge_dflash.backends.native.linear_plan import MOST_UNITS, Plan, block_shared, plan, row_tile, shared_bytes
from edge_dflash.backends.native.memory import NULL, Matrix
from edge_dflash.backends.native.weight_layout import UNIT_ROWS, Format, Layout, Repacked
from edge_dflash.errors import BackendError

UNITS = ("linear", linear_tiles.UNIT, "finish")  # compilation units of these kernels
_THREADS, _FINISH_THREADS, _PARTS = 256, 1024, 4


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
class Norm:
    """RMS norm of a linear's output after its residual; ``weight`` [columns] FP32 is w or 1 + w."""

    weight: DevicePointer
    eps: float
    out: Matrix


class Linears:
    """Loaded kernels. ``cubin`` gives a compilation unit's cubin for this device.

    Enqueues only. Every launch may start before the one before it ends and reads nothing but weights until that one's
    results are there; a kernel after it must likewise read only constants before griddepcontrol.wait.
    """

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes]) -> None:
        self._gpu = gpu
        modules = {unit: gpu.load(cubin(unit)) for unit in UNITS if unit != linear_tiles.UNIT}
        shared = block_shared(gpu.sm)
        self._linear: dict[tuple[Format, int], Kernel] = {
            (f, r): modules["linear"].kernel(f"linear_{f}_{r}", shared_bytes=shared) for f, r in MOST_UNITS
        }
        self._tiles = linear_tiles.Tiles(gpu, cubin)
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

        Two launches. ``scratch`` has plan(may_split=True).sum_bytes(layout, rows) bytes.
        """
        layout, tile = weights.layout, row_tile(rows)
        plan = self.plan(layout, rows, may_split=True)
        job = _job(weights, x, (), plan, Mode.PARTIAL, prefetch)
        if scratch.nbytes < plan.sum_bytes(layout, rows):
            raise ValueError(
                f"the scratch buffer has {scratch.nbytes} bytes, {plan.sum_bytes(layout, rows)} are needed"
            )
        job.partial = scratch.address
        self._launch(layout.format, plan, rows, job, _Job())
        columns = layout.columns[0]
        added, normal = residual or Matrix(NULL, 0), norm or Norm(NULL, 0.0, Matrix(NULL, 0))
        self._gpu.launch(
            self._finish,
            (tile, 1, 1),
            _FINISH_THREADS,
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
        if scratch.nbytes < plan.rank_bytes(rows):
            raise ValueError(f"the scratch buffer has {scratch.nbytes} bytes, {plan.rank_bytes(rows)} are needed")
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
        self._tiles.launch(weights.layout, job, x, rows, valid)

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
            shared = max(shared, shared_bytes("bf16", tile, 1))
        if shared > block_shared(self._gpu.sm):
            raise BackendError(
                f"a {format} linear of {rows} rows needs {shared} bytes of shared memory a block, "
                f"SM{self._gpu.sm} has {block_shared(self._gpu.sm)}: use blocks of at most 16 rows"
            )
        grid = (plan.groups * plan.splits + side.groups, 1, 1)
        self._gpu.launch(self._linear[format, tile], grid, _THREADS, (job, side), shared_bytes=shared, overlap=True)


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
