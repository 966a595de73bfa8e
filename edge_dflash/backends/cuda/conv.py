"""Grouped dynamic convolutions over the rows of a block in each slot, and what follows them: kernels/conv.cu."""

from __future__ import annotations

import ctypes

from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.linear import Norm
from edge_dflash.backends.cuda.memory import EMPTY, DevicePointer, Matrix
from edge_dflash.model.ops import GroupedConv

UNIT = "conv"
_THREADS = 512


class _Conv(ctypes.Structure):
    """``Conv`` of kernels/conv.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("u", "c", "base", "residual", "out", "weight", "norm_out")),
        *((f"{name}_stride", ctypes.c_int32) for name in ("u", "c", "residual", "out", "norm")),
        *((name, ctypes.c_int32) for name in ("taps", "group", "columns")),
        ("eps", ctypes.c_float),
    )


class Convolutions:
    """The loaded kernel. Matrices are BF16 with an even number of columns."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        self._kernel = module.kernel("conv_rows")

    def convolve(
        self,
        op: GroupedConv,
        u: Matrix,
        c: Matrix,
        base: DevicePointer,
        out: Matrix,
        rows: int,
        columns: int,
        residual: Matrix | None = None,
        norm: Norm | None = None,
        slots: int = 1,
    ) -> None:
        """:class:`~edge_dflash.model.ops.GroupedConv`: out = conv(u), plus ``residual``, and its ``norm``.

        ``rows`` in each of the ``slots``. ``base`` [2, taps, columns] FP32; ``c`` holds the coefficients of both sides.
        """
        groups, part = columns // op.group_size, 4 * op.taps * columns
        at = c.pointer.at(2 * op.side * op.taps * groups, 2 * op.taps * groups)
        added, normal = residual or EMPTY, norm.out if norm else EMPTY
        conv = _Conv(
            *(u.pointer.address, at.address, base.at(op.side * part, part).address, added.pointer.address or None),
            *(out.pointer.address, norm.weight.address if norm else None, normal.pointer.address or None),
            *(u.stride, c.stride, added.stride, out.stride, normal.stride, op.taps, op.group_size, columns),
            norm.eps if norm else 0.0,
        )
        parts = 1 if norm else -(-columns // 2 // _THREADS)
        shared = 2 * columns if norm else 0
        self._gpu.launch(self._kernel, (rows, parts, slots), _THREADS, (conv,), shared_bytes=shared, overlap=True)
