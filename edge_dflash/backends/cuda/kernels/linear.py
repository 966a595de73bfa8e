"""Linear layers on the device: jobs, launches and buffers of kernels/linear*.cu and finish.cu.

Activations are BF16 rows; outputs are rounded once. A row's bits depend on its own values, the weights and the splits:
never on other rows or on how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from edge_dflash.backends.cuda.driver import Gpu, cu
from edge_dflash.backends.cuda.kernels.source import Signature, Struct, structure
from edge_dflash.backends.cuda.kernels.splits import (
    ALONE_ROWS,
    Splits,
    StreamSplits,
    block_shared,
    choose_splits,
    kernel_names,
    row_tile,
)
from edge_dflash.backends.cuda.memory import EMPTY, NO_NORM, NULL, DevicePointer, Matrix, Norm, scratch_at
from edge_dflash.board.archs import supports
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, UNIT_ROWS, WINDOW, Format, Layout, Repacked, data_for

UNITS = ("linear", "linear_cluster", "linear_hopper", "linear_wide", "linear_tiles", "finish")  # compilation units
_FINISH_THREADS, _NORM_THREADS, _NORM_COLUMNS, _PARTS = 1024, 256, (512, 2560, 4096, 5120, 8192), 4
_GREEDY_THREADS = {"linear": 32, "linear_cluster": 256}  # by compilation unit
_NOWHERE = 1 << 30  # where a part starts that is not there
_Job = structure("job.cuh", "Job")
_FINISH, _NORM = Signature("finish.cu", "linear_finish"), Signature("finish.cu", "NORM")


class Mode(IntEnum):
    """What becomes of the sums (kernels/job.cuh)."""

    STORE = 0
    RESIDUAL = 1
    SWIGLU = 2
    PARTIAL = 3
    GREEDY = 4


@dataclass(frozen=True)
class LinearWeights:
    """A stack on the device."""

    layout: Layout
    data: DevicePointer
    scale: DevicePointer

    @classmethod
    def of(cls, gpu: Gpu, repacked: Repacked) -> LinearWeights:
        """Allocate and fill, with words as this device's kernels read them."""
        return cls(repacked.layout, gpu.upload(data_for(repacked, gpu.sm)), gpu.upload(repacked.scale))


class Linears:
    """Loaded kernels. ``cubin`` gives a unit's cubin; ``most_rows``: of a sequence's pass, ``joint``: of a joint pass.

    Enqueues only. Every launch may start before the one before it ends and reads nothing but weights until that one's
    results are there; a kernel after it must likewise read only constants before griddepcontrol.wait.
    """

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes], *, most_rows: int = ALONE_ROWS, joint: int = 0) -> None:
        self._gpu, self._most_rows, self._joint_rows = gpu, most_rows, max(joint, most_rows)
        names = kernel_names(gpu.sm, most_rows, joint)
        modules = {unit: gpu.load(cubin(unit)) for unit in names}
        most = block_shared(gpu.sm)
        self._kernels = {n: modules[unit].kernel(n, shared_bytes=most) for unit in names for n in names[unit]}
        unit = next(iter(names))
        self._greedy, self._greedy_threads = modules[unit].kernel(f"{unit}_greedy"), _GREEDY_THREADS[unit]
        self._chosen: dict[tuple[Layout, int, bool], Splits] = {}
        self._tiles = Tiles(gpu, cubin)
        finish = gpu.load(cubin("finish"))
        self._finish = finish.kernel("linear_finish")
        self._norms = {n: finish.kernel(f"linear_norm_{n}") for n in _NORM_COLUMNS}
        for kernel in (*self._kernels.values(), self._greedy, self._finish, *self._norms.values()):
            gpu.prefer_shared(kernel)

    def choose(self, layout: Layout, rows: int, *, may_split: bool = False) -> Splits:
        """How a stack is launched on this device."""
        key, gpu, most = (layout, row_tile(rows), may_split), self._gpu, self._joint_rows
        if rows > most:
            raise ValueError(f"a pass of {rows} rows; these kernels were loaded for at most {most}")
        if key not in self._chosen:
            self._chosen[key] = choose_splits(
                layout,
                rows,
                gpu.sm,
                gpu.sm_count,
                may_split=may_split,
                most_rows=self._most_rows,
                clusters=lambda name, *block: gpu.most_clusters(self._kernels[name], *block),
            )
        return self._chosen[key]

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

        x and out have :func:`row_tile` rows. ``side``: a BF16 stack on the same x in the same launch.
        """
        layout, splits, beside = weights.layout, self.choose(weights.layout, rows), None
        if side is not None:
            if side.layout.format != "bf16" or side.layout.swiglu or side.layout.k != layout.k:
                raise ValueError(f"a side stack is plain BF16 on the same {layout.k} inputs, found {side.layout}")
            beside = job_of(side, x, side_out, (splits.serial_parts, side.layout.units, 1))
        self._launch(splits, rows, job_of(weights, x, out, splits.shares, residual=residual), beside)

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

        Two launches. ``scratch`` has the ``sum_bytes`` of choose(may_split=True), where those are StreamSplits.
        """
        layout, columns = weights.layout, weights.layout.columns[0]
        splits = self.choose(layout, rows, may_split=True)
        if not isinstance(splits, StreamSplits):
            self.linear(weights, x, [out], rows, residual=residual)
            if norm is not None:
                self._normalise(out, columns, splits.tile, norm)
            return
        job = job_of(weights, x, (), splits.shares, mode=Mode.PARTIAL)
        job.partial = scratch_at(scratch, splits.sum_bytes(layout))
        self._launch(splits, rows, job)
        self._gpu.launch(
            self._finish,
            (splits.tile, 1, 1),
            _FINISH_THREADS,
            _FINISH(
                splits,
                weights,
                **(norm or NO_NORM).values,
                partial=scratch,
                width=layout.units * UNIT_ROWS,
                residual=residual or EMPTY,
                out=out,
                columns=columns,
            ),
            shared_bytes=-(-columns // 2) * 4,
            overlap=True,
        )

    def _normalise(self, x: Matrix, columns: int, rows: int, norm: Norm) -> None:
        most = next((n for n in _NORM_COLUMNS if columns <= n), None)
        if most is None:
            accepted = f"at most {_NORM_COLUMNS[-1]} are accepted"
            raise BackendError(f"a norm of {columns} columns follows a linear; {accepted}")
        arguments = _NORM(**norm.values, x=x, columns=columns)
        self._gpu.launch(self._norms[most], (rows, 1, 1), _NORM_THREADS, arguments, overlap=True)

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
        splits = self.choose(weights.layout, rows)
        job = job_of(weights, x, (logits or EMPTY,), splits.shares, mode=Mode.GREEDY)
        job.best = scratch_at(scratch, splits.rank_bytes)
        self._launch(splits, rows, job)
        arguments = (scratch, ids, splits.blocks, splits.tile)
        self._gpu.launch(self._greedy, (splits.tile, 1, 1), self._greedy_threads, arguments, overlap=True)

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
        self._tiles.launch(weights.layout, job_of(weights, x, out, residual=residual), x, rows, valid)

    def _launch(self, splits: Splits, rows: int, job: Struct, side: Struct | None = None) -> None:
        shared, blocks, most, side = splits.shared_bytes, splits.blocks, block_shared(self._gpu.sm), side or _Job()
        splits.check_orders(job.x_stride, min(job.out_stride), gated=job.mode == Mode.SWIGLU)
        if side.groups and isinstance(splits, StreamSplits):  # a unit of the side stack has a block to itself
            shared, blocks = max(shared, splits.side_shared), blocks + side.groups
        if shared > most:
            raise BackendError(
                f"a {splits.format} linear of {rows} rows and {job.k} inputs needs {shared} bytes of shared memory a "
                f"block, SM{self._gpu.sm} has {most}: use blocks of at most 16 rows"
            )
        kernel, grid = self._kernels[splits.kernel], (blocks, splits.row_tiles, 1)
        self._gpu.launch(kernel, grid, splits.threads, (job, side), shared_bytes=shared, overlap=True)


class Tiles:
    """Loaded kernels of kernels/linear_tiles.cu. ``hopper``: those with warpgroup products, which SM90 has."""

    _THREADS, _ROWS, _UNITS, _STAGES = 256, 128, 4, 3
    _HOPPER_THREADS, _HOPPER_SHARED, _CLUSTER, _BOX = 384, 232448, 2, (32, 64)  # as kernels/tiles_hopper.cuh

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes], *, hopper: bool | None = None) -> None:
        self._gpu, self._hopper = gpu, supports(gpu.sm, "wgmma") if hopper is None else hopper
        module, name = gpu.load(cubin("linear_tiles")), "hopper_tiles" if self._hopper else "linear_tiles"
        self._kernels = {f: module.kernel(f"{name}_{f}", shared_bytes=self._shared(f)) for f in UNIT_BYTES}

    def launch(self, layout: Layout, job: Struct, x: Matrix, rows: int, valid: DevicePointer) -> None:
        """Enqueue ``job`` over ``rows`` rows of x; tiles past the device count ``valid`` (unless null) are skipped."""
        kernel, shared = self._kernels[layout.format], self._shared(layout.format)
        if self._hopper:
            grid = (self._gpu.sm_count // self._CLUSTER * self._CLUSTER, 1, 1)
            arguments = (job, bf16_map(x, rows, layout.k, self._BOX), rows, valid)
            self._gpu.launch(kernel, grid, self._HOPPER_THREADS, arguments, shared_bytes=shared, overlap=True)
        else:
            grid = (-(-rows // self._ROWS), -(-layout.units // self._UNITS), 1)
            self._gpu.launch(kernel, grid, self._THREADS, (job, rows, valid), shared_bytes=shared, overlap=True)

    def _shared(self, format: Format) -> int:
        if self._hopper:
            return self._HOPPER_SHARED
        return self._STAGES * (self._UNITS * UNIT_BYTES[format] + self._ROWS * WINDOW[format] * 2)


class TensorMap(ctypes.Structure):
    """``TensorMap`` of kernels/wgmma.cuh, a kernel argument."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def bf16_map(matrix: Matrix, rows: int, columns: int, box: tuple[int, int]) -> TensorMap:
    """Map of BF16 ``matrix`` [rows, columns], copied in boxes of (rows, 64 columns); zeros outside of the matrix.

    Rows of a box are 128 bytes in shared memory, 16-byte chunk c of row r at c ^ (r % 8). Raises BackendError when the
    matrix does not start at, and its rows are not apart by, a multiple of 16 bytes.
    """
    words, status = TensorMap(), None
    if matrix.pointer.address % 16 == 0 and matrix.stride % 8 == 0:
        status, encoded = cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.pointer.address,
            [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
            [cu.cuuint64_t(2 * matrix.stride)],
            [cu.cuuint32_t(box[1]), cu.cuuint32_t(box[0])],
            [cu.cuuint32_t(1), cu.cuuint32_t(1)],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if status == cu.CUresult.CUDA_SUCCESS:
            words.words[:] = [int(word) for word in encoded.opaque]
            return words
    raise BackendError(
        f"a matrix of {rows} x {columns} at address {matrix.pointer.address:#x}, row stride {matrix.stride}, cannot be "
        f"copied by tensor maps ({status}): start and rows must lie at multiples of 16 bytes"
    )


def job_of(
    weights: LinearWeights,
    x: Matrix,
    out: Sequence[Matrix],
    shares: tuple[int, int, int] = (1, 1, 1),
    *,
    mode: Mode = Mode.STORE,
    residual: Matrix | None = None,
) -> Struct:
    """A job; ``mode`` STORE becomes that of a gated pair or of a residual."""
    layout, columns, starts = weights.layout, weights.layout.columns, weights.layout.starts
    parts, plain = 1 if layout.swiglu else len(columns), Mode.STORE if residual is None else Mode.RESIDUAL
    mode = mode if mode != Mode.STORE else Mode.SWIGLU if layout.swiglu else plain
    if residual is not None and (len(out) != 1 or residual.stride != out[0].stride):
        raise ValueError(f"a residual of stride {residual.stride} needs one output of the same stride")
    if mode == Mode.PARTIAL:
        if parts != 1:
            raise ValueError(f"only one matrix can be split over blocks, found a stack of {parts}")
    elif len(out) == 1 and parts > 1 and all(n % UNIT_ROWS == 0 for n in columns[:-1]):
        columns, starts = (sum(columns),), (0,)  # one output for the whole stack
    elif len(out) != parts or parts > _PARTS:
        raise ValueError(f"a stack of {parts} matrices needs as many outputs (at most {_PARTS}), found {len(out)}")
    if x.stride % 8:
        raise ValueError(f"activations have row stride {x.stride}; a multiple of 8 is needed")
    there, rest = len(out), [0] * (_PARTS - len(out))
    return _Job.of(
        layout,
        weights=weights.data,
        scale=weights.scale,
        x=x,
        splits=shares[0],
        groups=shares[1],
        per_pass=shares[2],
        out=out,
        start=[*starts[:there], *[_NOWHERE] * len(rest)],
        columns=[*columns[:there], *rest],
        mode=mode,
        residual=residual,
        partial=NULL,
        best=NULL,
    )
