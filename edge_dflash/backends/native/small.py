"""Small kernels of a pass and of the cycle, and their launches: kernels/small.cu."""

from __future__ import annotations

from edge_dflash.backends.native.driver import Argument, DevicePointer, Gpu, Module
from edge_dflash.backends.native.memory import NULL, Matrix

UNIT = "small"
RESULT_HEAD = 4  # words of an accept result before its tokens: committed, accepted, length, remaining budget
_THREADS = 256
_SLICE = 8192  # logits of one argmax block


def argmax_scratch_bytes(rows: int, columns: int) -> int:
    """Bytes of the scratch buffer of :meth:`Small.argmax`."""
    return 8 * rows * -(-columns // _SLICE)


def result_bytes(rows: int) -> int:
    """Bytes of the result of :meth:`Small.accept` for a block of ``rows``."""
    return 4 * (RESULT_HEAD + rows)


class Small:
    """Loaded kernels. Matrices are BF16 with an even number of columns, ids and control words int32."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        names = (
            *("gather_rows", "rms_norm", "add_rows", "last_row", "argmax_slices", "argmax_rows"),
            *("assemble_block", "accept_greedy", "commit_rows", "commit_prefill"),
        )
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

    def add(self, a: DevicePointer, b: DevicePointer, out: DevicePointer, elements: int) -> None:
        """Out = a + b over ``elements`` contiguous BF16 values (even)."""
        pairs = elements // 2
        self._launch("add_rows", (-(-pairs // _THREADS), 1, 1), _THREADS, a, b, out, pairs)

    def last_row(self, x: Matrix, out: DevicePointer, columns: int, most: int, rows: DevicePointer = NULL) -> None:
        """Out = row ``rows`` - 1 of x (control word), or row ``most`` - 1; columns a multiple of 8."""
        blocks = -(-columns // 8 // _THREADS)
        self._launch("last_row", (max(blocks, 1), 1, 1), _THREADS, x.pointer, out, rows, most, columns, x.stride)

    def argmax(self, logits: Matrix, ids: DevicePointer, scratch: DevicePointer, rows: int, columns: int) -> None:
        """Id of the largest logit of each row, the lowest on a tie."""
        slices = -(-columns // _SLICE)
        self._launch("argmax_slices", (slices, rows, 1), _THREADS, logits.pointer, scratch, columns, logits.stride)
        self._launch("argmax_rows", (rows, 1, 1), 32, scratch, ids, slices)

    def assemble(
        self, control: DevicePointer, ids: DevicePointer, rows: int, *, mask: int = 0, drafts: DevicePointer = NULL
    ) -> None:
        """Ids = [anchor, drafts...] for verify, or [anchor, mask...] for propose."""
        self._launch("assemble_block", (1, 1, 1), 32, control, drafts, ids, rows, mask)

    def accept(
        self,
        drafts: DevicePointer,
        choices: DevicePointer,
        stops: DevicePointer,
        stop_count: int,
        rows: int,
        control: DevicePointer,
        result: DevicePointer,
    ) -> None:
        """Greedy acceptance and commit of one cycle (spec/accept: ``accepted``, then ``cut``), block of ``rows`` <= 32.

        ``result``: committed, accepted, new length, remaining budget, then the committed tokens, padded with -1.
        """
        self._launch("accept_greedy", (1, 1, 1), 32, drafts, choices, stops, stop_count, rows, control, result)

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
