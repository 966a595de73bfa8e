"""The small kernels of a pass and the frame of a cycle, and their launches: kernels/small.cu and cycle.cu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_dflash.backends.cuda.driver import Argument, Gpu, Module
from edge_dflash.backends.cuda.memory import NULL, Array, ControlBlock, DevicePointer, Matrix
from edge_dflash.model.ops import Add, Elementwise, SwiGlu

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


CYCLE_UNIT = "cycle"
ELEMENTWISE: Mapping[type[Elementwise], str] = {SwiGlu: "gate_columns", Add: "add_columns"}  # kernels of cycle.cu
CLOCK_BYTES = 16  # of propose and of verify, ns
RESULT_WORDS = 4 + 32 + 6  # accepted, cycles, two unused, choices of up to 32 rows, three clocks of 64 bits


@dataclass(frozen=True)
class Result:
    """What one cycle read back."""

    accepted: int  # drafts that equal the target's choices
    choices: tuple[int, ...]  # of every row
    propose_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, words: Array, rows: int) -> Result:
        """From int32 words [RESULT_WORDS]."""
        propose, verify, accept = (int(t) for t in np.ascontiguousarray(words[36:]).view(np.uint64))
        return cls(
            int(words[0]), tuple(words[4 : 4 + rows].tolist()), (verify - propose) * 1e-9, (accept - verify) * 1e-9
        )


class CycleKernels:
    """Loaded kernels. Ids, drafts, choices and control words are int32."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        names = ("cycle_ids", "cycle_accept", "cycle_set", "copy_columns", *ELEMENTWISE.values(), "stamp")
        self._kernels = {name: module.kernel(name) for name in names}

    def ids(
        self,
        control: DevicePointer,
        ids: DevicePointer,
        rows: int,
        *,
        mask: int = 0,
        drafts: DevicePointer = NULL,
        clock: DevicePointer = NULL,
    ) -> None:
        """Ids = [anchor, drafts...] for verify, or [anchor, mask...] for propose; ``clock`` [1] uint64."""
        self._launch("cycle_ids", 1, 32, control, drafts, ids, rows, mask, clock)

    def accept(
        self,
        drafts: DevicePointer,
        choices: DevicePointer,
        rows: int,
        control: DevicePointer,
        result: DevicePointer,
        clock: DevicePointer,
        pattern: DevicePointer = NULL,
        valid: DevicePointer = NULL,
    ) -> None:
        """Accept drafts that equal the choices and commit; ``result`` [RESULT_WORDS].

        ``pattern`` int32: accepted drafts a cycle instead. ``valid`` int32: how many of the rows count; null: all.
        """
        forced = pattern.nbytes // 4 if pattern.address else 0
        self._launch("cycle_accept", 1, 32, drafts, choices, rows, control, result, clock, pattern, forced, valid)

    def set(self, control: DevicePointer, words: ControlBlock, rows: int) -> None:
        """Write the control words; ``rows`` are those of a prefill pass."""
        self._launch("cycle_set", 1, 32, control, words.length, words.pending, rows, words.anchor)

    def copy(self, x: Matrix, out: Matrix, rows: int, columns: int) -> None:
        """Out = x; an even number of columns."""
        self._launch("copy_columns", rows, _THREADS, x.pointer, out.pointer, columns, x.stride, out.stride)

    def elementwise(
        self, op: type[Elementwise], inputs: Sequence[Matrix], out: Matrix, rows: int, columns: int
    ) -> None:
        """Out = op(inputs)."""
        pointers, strides = [x.pointer for x in (*inputs, out)], [x.stride for x in (*inputs, out)]
        self._launch(ELEMENTWISE[op], rows, _THREADS, *pointers, columns, *strides)

    def stamp(self, place: DevicePointer) -> None:
        """The device's clock, in ns, into a uint64."""
        self._launch("stamp", 1, 1, place)

    def _launch(self, name: str, blocks: int, threads: int, *arguments: Argument) -> None:
        self._gpu.launch(self._kernels[name], (blocks, 1, 1), threads, arguments, overlap=True)
