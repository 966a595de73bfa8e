"""The small kernels of a pass, and their launches: kernels/small.cu."""

from __future__ import annotations

from edge_dflash.backends.cuda.kernels.source import KernelFace, Signature
from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix, Norm

UNIT = "small"
_THREADS = 256
_NAMES = ("gather_rows", "gather_norm", "rms_norm", "last_row", "commit_rows", "commit_prefill")
_SIGNATURES = {name: Signature("small.cu", name) for name in _NAMES}


class Small(KernelFace):
    """Loaded kernels. Matrices are BF16 with an even number of columns, ids and control words int32."""

    _signatures = _SIGNATURES

    def embed(
        self,
        ids: DevicePointer,
        table: DevicePointer,
        out: Matrix,
        rows: int,
        columns: int,
        vocabulary: int,
        norm: Norm | None = None,
        images: DevicePointer = NULL,
    ) -> None:
        """Out row r = table row ids[r], and its ``norm``; columns a multiple of 8.

        Id ``vocabulary`` + i is row i of ``images`` [rows, columns], if given. Other ids outside the table give row 0.
        """
        given = {"ids": ids, "table": table, "out": out, "columns": columns, "vocabulary": vocabulary, "images": images}
        if norm is None:
            self._launch("gather_rows", (rows, 1, 1), _THREADS, **given)
        else:
            self._launch("gather_norm", (rows, 1, 1), _THREADS, **given, weight=norm.weight, **norm.values)

    def rms_norm(self, x: Matrix, weight: DevicePointer, out: Matrix, rows: int, columns: int, eps: float) -> None:
        """``rms_norm``; ``weight`` [columns] FP32 is w or 1 + w."""
        self._launch("rms_norm", (rows, 1, 1), _THREADS, x=x, weight=weight, out=out, columns=columns, eps=eps)

    def last_row(self, x: Matrix, out: DevicePointer, columns: int, most: int, rows: DevicePointer = NULL) -> None:
        """Out = row ``rows`` - 1 of x (control word), or row ``most`` - 1; columns a multiple of 8."""
        grid = (max(-(-columns // 8 // _THREADS), 1), 1, 1)
        self._launch("last_row", grid, _THREADS, x=x, out=out, rows_there=rows, rows=most, columns=columns)

    def replayed(self, control: DevicePointer, slots: int = 1) -> None:
        """End of a verify pass or flush of so many slots: nothing is pending any more."""
        self._launch("commit_rows", (1, 1, 1), 32, control=control, rows=-1, slots=slots)

    def commit_prefill(self, control: DevicePointer) -> None:
        """End of a prefill pass: its rows are committed and in the recurrent state."""
        self._launch("commit_prefill", (1, 1, 1), 32, control=control)
