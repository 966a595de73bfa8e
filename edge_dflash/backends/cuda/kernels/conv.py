"""Grouped dynamic convolutions over the rows of a block in each slot, and what follows them: kernels/conv.cu."""

from __future__ import annotations

from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.kernels.source import structure
from edge_dflash.backends.cuda.memory import EMPTY, NO_NORM, DevicePointer, Matrix, Norm
from edge_dflash.model.ops import GroupedConv

UNIT = "conv"
_THREADS = 512
_Conv = structure("conv.cu", "Conv")


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
        groups, part, normal = columns // op.group_size, 4 * op.taps * columns, norm or NO_NORM
        conv = _Conv.of(
            op,
            normal,
            u=u,
            c=Matrix(c.pointer.at(2 * op.side * op.taps * groups, 2 * op.taps * groups), c.stride),
            base=base.at(op.side * part, part),
            residual=residual or EMPTY,
            out=out,
            norm_out=normal.out,
            norm_stride=normal.out.stride,
            group=op.group_size,
            columns=columns,
        )
        parts, shared = (1, 2 * columns) if norm else (-(-columns // 2 // _THREADS), 0)
        self._gpu.launch(self._kernel, (rows, parts, slots), _THREADS, (conv,), shared_bytes=shared, overlap=True)
