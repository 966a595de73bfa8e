"""Small kernels of a pass, and their launches: kernels/small.cu."""

from __future__ import annotations

from edge_dflash.backends.cuda.driver import Argument, DevicePointer, Gpu, Module
from edge_dflash.backends.cuda.memory import NULL, Matrix

UNIT = "small"
_THREADS = 256


class Small:
    """Loaded kernels. Matrices are BF16 with an even number of columns, ids and control words int32."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        names = ("gather_rows", "rms_norm", "last_row", "commit_rows", "commit_prefill")
        self._kernels = {name: module.kernel(name) for name in names}

    def embed(
        self, ids: DevicePointer, table: DevicePointer, out: Matrix, rows: int, columns: int, vocabulary: int
    ) -> None:
        """Out row r = table row ids[r]; columns a multiple of 8. An id outside the table gives row 0."""
        self._launch("gather_rows", (rows, 1, 1), _THREADS, ids, table, out.pointer, columns, vocabulary, out.stride)

    def rms_norm(self, x: Matrix, weight: DevicePointer, out: Matrix, rows: int, columns: int, eps: float) -> None:
        """``rms_norm``; ``weight`` [columns] FP32 is w or 1 + w."""
        self._launch(
            *("rms_norm", (rows, 1, 1), _THREADS, x.pointer, weight, out.pointer, columns, x.stride, out.stride, eps)
        )

    def last_row(self, x: Matrix, out: DevicePointer, columns: int, most: int, rows: DevicePointer = NULL) -> None:
        """Out = row ``rows`` - 1 of x (control word), or row ``most`` - 1; columns a multiple of 8."""
        blocks = -(-columns // 8 // _THREADS)
        self._launch("last_row", (max(blocks, 1), 1, 1), _THREADS, x.pointer, out, rows, most, columns, x.stride)

    def commit(self, control: DevicePointer, rows: int) -> None:
        """Commit ``rows`` of the last verify: they become pending."""
        self._launch("commit_rows", (1, 1, 1), 32, control, rows)

    def replayed(self, control: DevicePointer) -> None:
        """End of a verify pass or flush: nothing is pending any more."""
        self._launch("commit_rows", (1, 1, 1), 32, control, -1)

    def commit_prefill(self, control: DevicePointer) -> None:
        """End of a prefill pass: its rows are committed and in the recurrent state."""
        self._launch("commit_prefill", (1, 1, 1), 32, control)

    def _launch(self, name: str, grid: tuple[int, int, int], block: int, *arguments: Argument) -> None:
        self._gpu.launch(self._kernels[name], grid, block, arguments, overlap=True)
