"""Tensor maps: what Hopper's tensor copy needs to know of a matrix in device memory. Encoded on the host, once."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver as cu

from edge_dflash.backends.cuda.memory import Matrix
from edge_dflash.errors import BackendError


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
