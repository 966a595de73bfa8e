"""Linears over the many rows of a prefill chunk: launches of kernels/linear_tiles.cu, and Hopper's tensor maps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from cuda.bindings import driver as cu

from edge_dflash.backends.cuda.driver import Gpu, Kernel
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

UNIT = "linear_tiles"  # compilation unit
_THREADS, _ROWS, _UNITS, _STAGES = 256, 128, 4, 3
_HOPPER_THREADS, _HOPPER_SHARED, _CLUSTER, _BOX = 384, 232448, 2, (32, 64)  # as kernels/tiles_hopper.cuh


class Tiles:
    """The loaded kernels. ``hopper``: those with warpgroup products; by default where the device has them."""

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes], *, hopper: bool | None = None) -> None:
        self._gpu = gpu
        self._hopper = gpu.sm == 90 if hopper is None else hopper
        module, name = gpu.load(cubin(UNIT)), "hopper_tiles" if self._hopper else "linear_tiles"
        self._kernels: dict[Format, Kernel] = {
            f: module.kernel(f"{name}_{f}", shared_bytes=self._shared(f)) for f in UNIT_BYTES
        }

    def launch(self, layout: Layout, job: ctypes.Structure, x: Matrix, rows: int, valid: DevicePointer) -> None:
        """Enqueue ``job`` over ``rows`` rows of x; tiles past the device count ``valid`` (unless null) are skipped."""
        kernel, shared = self._kernels[layout.format], self._shared(layout.format)
        if self._hopper:
            grid = (self._gpu.sm_count // _CLUSTER * _CLUSTER, 1, 1)
            arguments = (job, bf16_map(x, rows, layout.k, _BOX), rows, valid)
            self._gpu.launch(kernel, grid, _HOPPER_THREADS, arguments, shared_bytes=shared, overlap=True)
        else:
            grid = (-(-rows // _ROWS), -(-layout.units // _UNITS), 1)
            self._gpu.launch(kernel, grid, _THREADS, (job, rows, valid), shared_bytes=shared, overlap=True)

    def _shared(self, format: Format) -> int:
        if self._hopper:
            return _HOPPER_SHARED
        return _STAGES * (_UNITS * UNIT_BYTES[format] + _ROWS * WINDOW[format] * 2)


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
