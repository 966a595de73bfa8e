"""Linear layers on the device: plans, launches and buffers of kernels/linear*.cu and finish.cu.

Weights come from weight_layout.py. Knows no model. Activations are BF16 rows; outputs are rounded once. A row's bits
depend on its own values, the weights and the plan (splits, blocks): never on other rows or on how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from edge_dflash.backends.cuda.driver import Gpu, Kernel, Module, most_clusters, prefer_shared
from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix
from edge_dflash.backends.cuda.splits import (
    CLUSTER_SPLITS,
    CLUSTER_TEAMS,
    HOPPER_ROWS,
    HOPPER_THREADS,
    MOST_ROWS,
    MOST_UNITS,
    Plan,
    block_shared,
    clustered,
    hopper,
    plan,
    row_tile,
    shared_bytes,
)
from edge_dflash.backends.cuda.tiles import UNIT as TILES_UNIT
from edge_dflash.backends.cuda.tiles import Tiles
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_ROWS, Format, Layout, Repacked

UNITS = ("linear", "linear_cluster", "linear_hopper", TILES_UNIT, "finish")  # compilation units of these kernels
_FINISH_THREADS, _NORM_THREADS, _NORM_COLUMNS, _PARTS = 1024, 256, (5120, 8192), 4


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
        ("per_pass", ctypes.c_int32),
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
    """Loaded kernels. ``cubin`` gives a compilation unit's cubin for this device; ``most_rows``: of any pass but tiles.

    Enqueues only. Every launch may start before the one before it ends and reads nothing but weights until that one's
    results are there; a kernel after it must likewise read only constants before griddepcontrol.wait.
    """

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes], *, most_rows: int = MOST_ROWS) -> None:
        self._gpu, self._most_rows = gpu, most_rows
        self._linear: dict[tuple[Format, int, int, int], Kernel] = {}  # by format, rows, splits and teams (kernel's)
        if clustered(gpu.sm):
            forms = [(r, s, t) for r, teams in CLUSTER_TEAMS.items() for t in teams for s in CLUSTER_SPLITS]
            module = self._load("linear_cluster", cubin, {f"{r}_{s}_{t}": (r, s, t) for r, s, t in forms})
        else:
            module = self._load("linear", cubin, {f"{r}": (r, 0, 0) for r in CLUSTER_TEAMS})
        self._greedy = module.kernel("linear_cluster_greedy" if clustered(gpu.sm) else "linear_greedy")
        if hopper(gpu.sm, most_rows):
            self._load("linear_hopper", cubin, {f"{s}": (HOPPER_ROWS, s, 0) for s in CLUSTER_SPLITS})
        self._plans: dict[tuple[Layout, int, bool], Plan] = {}
        self._tiles = Tiles(gpu, cubin)
        finish = gpu.load(cubin("finish"))
        self._finish = finish.kernel("linear_finish")
        self._norms = {n: finish.kernel(f"linear_norm_{n}") for n in _NORM_COLUMNS}
        for kernel in (*self._linear.values(), self._greedy, self._finish, *self._norms.values()):
            prefer_shared(kernel)

    def _load(self, unit: str, cubin: Callable[[str], bytes], forms: dict[str, tuple[int, int, int]]) -> Module:
        """Load a unit's kernels, of every format and form by its name."""
        module = self._gpu.load(cubin(unit))
        for f in sorted({f for f, _ in MOST_UNITS}):
            for name, form in forms.items():
                self._linear[f, *form] = module.kernel(f"{unit}_{f}_{name}", shared_bytes=block_shared(self._gpu.sm))
        return module

    def upload(self, repacked: Repacked) -> LinearWeights:
        """Put a stack on the device."""
        return LinearWeights(repacked.layout, self._gpu.upload(repacked.data), self._gpu.upload(repacked.scale))

    def plan(self, layout: Layout, rows: int, *, may_split: bool = False) -> Plan:
        """Plan for this device."""
        key, gpu, most = (layout, row_tile(rows), may_split), self._gpu, self._most_rows
        if rows > most:
            raise ValueError(f"a pass of {rows} rows; these kernels were loaded for at most {most}")
        if key not in self._plans:
            clusters = partial(self._clusters, layout.format, key[1])
            self._plans[key] = plan(
                layout, rows, gpu.sm, gpu.sm_count, may_split=may_split, most_rows=most, clusters=clusters
            )
        return self._plans[key]

    def _clusters(self, format: Format, tile: int, splits: int, teams: int, shared: int) -> int:
        kernel = self._linear[format, tile, splits, teams]
        return most_clusters(kernel, splits, 128 * teams or HOPPER_THREADS, shared)

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
    ) -> None:
        """out[i] = x W_i^T of each matrix of the stack; SwiGLU of a gated pair; plus ``residual`` (one matrix).

        x and out have 16 rows for ``rows`` up to 16, else 32. ``side``: a BF16 stack on the same x in the same launch.
        """
        mode = Mode.SWIGLU if weights.layout.swiglu else Mode.RESIDUAL if residual is not None else Mode.STORE
        plan = self.plan(weights.layout, rows)
        job = _job(weights, x, out, plan, mode)
        if residual is not None:
            if len(out) != 1 or residual.stride != out[0].stride:
                raise ValueError(f"a residual of stride {residual.stride} needs one output of the same stride")
            job.residual = residual.pointer.address
        self._launch(weights.layout.format, plan, rows, job, self._side(side, job.k, x, side_out))

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
    ) -> None:
        """Out = [residual +] x W^T of one matrix, K split over blocks, and optionally the norm of the result.

        Two launches. ``scratch`` has plan(may_split=True).sum_bytes(layout, rows) bytes.
        """
        layout, tile = weights.layout, row_tile(rows)
        plan = self.plan(layout, rows, may_split=True)
        if plan.clustered:
            self.linear(weights, x, [out], rows, residual=residual)
            if norm is not None:
                self._normalise(out, layout.columns[0], tile, norm)
            return
        self._partial_sums(weights, x, rows, plan, scratch)
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

    def _normalise(self, x: Matrix, columns: int, rows: int, norm: Norm) -> None:
        most = next((n for n in _NORM_COLUMNS if columns <= n), None)
        if most is None:
            raise BackendError(
                f"a norm of {columns} columns follows a linear; at most {_NORM_COLUMNS[-1]} are accepted"
            )
        arguments = (x.pointer, x.stride, columns, norm.weight, norm.eps, norm.out.pointer, norm.out.stride)
        self._gpu.launch(self._norms[most], (rows, 1, 1), _NORM_THREADS, arguments, overlap=True)

    def _partial_sums(self, weights: LinearWeights, x: Matrix, rows: int, plan: Plan, scratch: DevicePointer) -> None:
        layout = weights.layout
        job = _job(weights, x, (), plan, Mode.PARTIAL)
        if scratch.nbytes < plan.sum_bytes(layout, rows):
            raise ValueError(
                f"the scratch buffer has {scratch.nbytes} bytes, {plan.sum_bytes(layout, rows)} are needed"
            )
        job.partial = scratch.address
        self._launch(layout.format, plan, rows, job, _Job())

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
        job = _job(weights, x, (logits or Matrix(NULL, 0),), plan, Mode.GREEDY)
        job.best = scratch.address
        self._launch(weights.layout.format, plan, rows, job, _Job())
        threads, parts = (256, plan.blocks) if plan.clustered else (32, plan.groups)
        self._gpu.launch(self._greedy, (tile, 1, 1), threads, (scratch, ids, parts, tile), overlap=True)

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
        job = _job(weights, x, out, Plan(1, 1, 1, 0), mode)
        if residual is not None:
            job.residual = residual.pointer.address
        self._tiles.launch(weights.layout, job, x, rows, valid)

    def _side(self, side: LinearWeights | None, k: int, x: Matrix, out: Sequence[Matrix]) -> _Job:
        if side is None:
            return _Job()
        if side.layout.format != "bf16" or side.layout.swiglu or side.layout.k != k:
            raise ValueError(f"a side stack is plain BF16 on the same {k} inputs, found {side.layout}")
        return _job(side, x, out, Plan(1, side.layout.units, 1, 0), Mode.STORE)

    def _launch(self, format: Format, plan: Plan, rows: int, job: _Job, side: _Job) -> None:
        tile, shared, blocks = row_tile(rows), plan.shared_bytes, plan.blocks
        if side.groups and not plan.clustered:
            shared, blocks = max(shared, shared_bytes("bf16", tile, 1)), blocks + side.groups
        if shared > block_shared(self._gpu.sm):
            raise BackendError(
                f"a {format} linear of {rows} rows and {job.k} inputs needs {shared} bytes of shared memory a block, "
                f"SM{self._gpu.sm} has {block_shared(self._gpu.sm)}: use blocks of at most 16 rows"
            )
        kernel = self._linear[format, tile, plan.splits if plan.clustered else 0, plan.teams]
        self._gpu.launch(kernel, (blocks, 1, 1), plan.threads, (job, side), shared_bytes=shared, overlap=True)


def _job(weights: LinearWeights, x: Matrix, out: Sequence[Matrix], plan: Plan, mode: Mode) -> _Job:
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
        *(layout.k, x.stride, layout.units, layout.windows, plan.splits, plan.groups, plan.per_pass),
        mode=mode,
    )
    for i in range(_PARTS):
        inside = i < len(out)
        job.out[i] = out[i].pointer.address if inside else None
        job.out_stride[i] = out[i].stride if inside else 0
        job.start[i] = starts[i] if inside else 1 << 30
        job.columns[i] = columns[i] if inside else 0
    return job
