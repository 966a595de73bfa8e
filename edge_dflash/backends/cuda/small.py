"""The small kernels of a pass and the frame of a cycle, and their launches: kernels/small.cu and cycle.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_dflash.backends.cuda.arguments import Argument
from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.linear import Norm
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, NULL, Array, ControlBlock, DevicePointer, Matrix
from edge_dflash.model.ops import Add, Elementwise, SwiGlu

UNIT = "small"
_THREADS = 256


class Small:
    """Loaded kernels. Matrices are BF16 with an even number of columns, ids and control words int32."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        names = ("gather_rows", "gather_norm", "rms_norm", "last_row", "commit_rows", "commit_prefill")
        self._kernels = {name: module.kernel(name) for name in names}

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
        what = (ids, table, out.pointer, columns, vocabulary, out.stride, images)
        if norm is None:
            self._launch("gather_rows", (rows, 1, 1), _THREADS, *what)
        else:
            normal = (norm.weight, norm.eps, norm.out.pointer, norm.out.stride)
            self._launch("gather_norm", (rows, 1, 1), _THREADS, *what, *normal)

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
        """Commit ``rows`` of the last verify of slot 0: they become pending."""
        self._launch("commit_rows", (1, 1, 1), 32, control, rows, 1)

    def replayed(self, control: DevicePointer, slots: int = 1) -> None:
        """End of a verify pass or flush of so many slots: nothing is pending any more."""
        self._launch("commit_rows", (1, 1, 1), 32, control, -1, slots)

    def commit_prefill(self, control: DevicePointer) -> None:
        """End of a prefill pass: its rows are committed and in the recurrent state."""
        self._launch("commit_prefill", (1, 1, 1), 32, control)

    def _launch(self, name: str, grid: tuple[int, int, int], block: int, *arguments: Argument) -> None:
        self._gpu.launch(self._kernels[name], grid, block, arguments, overlap=True)


CYCLE_UNIT = "cycle"
ELEMENTWISE: Mapping[type[Elementwise], str] = {SwiGlu: "gate_columns", Add: "add_columns"}  # kernels of cycle.cu
MOST_SLOTS = 8  # of a pass
COUNTED_WORDS = 3  # of a slot: rows asked for, threshold, rows that are sure (Counted of kernels/control.cuh)
RESULT_WORDS = 4 + 32 + 6  # accepted, drafts that counted, two unused, choices of 32 rows, three clocks of 64 bits
_PARTS = 8  # that one launch copies


def clock_bytes(lanes: int) -> int:
    """Of propose and of verify, ns; each lane's cycles so far, where benchmarks count them."""
    return 8 * (2 + lanes)


class SlotWords(NamedTuple):
    """What the control block of a slot says."""

    lane: int  # below 0: idle
    words: ControlBlock
    rows: int = 0  # of a prefill pass


@dataclass(frozen=True)
class Result:
    """What one cycle read back."""

    accepted: int  # drafts that equal the target's choices
    counted: int  # drafts that might have been
    choices: tuple[int, ...]  # of every row
    propose_seconds: float
    verify_seconds: float

    @classmethod
    def of(cls, words: Array, rows: int) -> Result:
        """From int32 words [RESULT_WORDS]."""
        found: list[int] = words.tolist()
        propose, verify, accept = ((found[i] & 0xFFFFFFFF) | found[i + 1] << 32 for i in (36, 38, 40))
        return cls(found[0], found[1], tuple(found[4 : 4 + rows]), (verify - propose) * 1e-9, (accept - verify) * 1e-9)


class _Parts(ctypes.Structure):
    """``Parts`` of kernels/cycle.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p * _PARTS) for name in ("x", "out")),
        *((name, ctypes.c_int32 * _PARTS) for name in ("columns", "x_stride", "out_stride")),
    )


class _Blocks(ctypes.Structure):
    """``Blocks`` of kernels/cycle.cu."""

    _fields_ = (("words", ctypes.c_int32 * (MOST_SLOTS * CONTROL_BYTES // 4)),)


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
        slots: int = 1,
        apart: int = 0,
    ) -> None:
        """Ids [slots, rows] = [anchor, drafts...] for verify, or [anchor, mask...] for propose; ``clock`` [1] uint64.

        ``apart``: from a slot's first draft to the next one's.
        """
        self._launch("cycle_ids", slots, 32, control, drafts, ids, rows, mask, clock, apart)

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
        *,
        slots: int = 1,
        apart: int = 0,
        valid_apart: int = 0,
    ) -> None:
        """Accept drafts that equal the choices [slots, rows] and commit.

        ``result`` [slots, RESULT_WORDS] may be page-locked memory. ``pattern`` int32: accepted drafts a cycle instead.
        ``valid`` int32: how many of the rows count; null: all. ``apart``, ``valid_apart``: words from a slot's first
        draft, or count, to the next one's.
        """
        forced = pattern.nbytes // 4 if pattern.address else 0
        what = (drafts, choices, rows, control, result, clock, pattern, forced, valid, apart, valid_apart)
        self._launch("cycle_accept", slots, 32, *what)

    def set(self, control: DevicePointer, slots: Mapping[int, SlotWords]) -> None:
        """Write the control words of some slots."""
        blocks, each = _Blocks(), CONTROL_BYTES // 4
        for slot, (lane, words, rows) in slots.items():
            block = [words.length, words.pending, rows, words.anchor, lane]  # in the order of memory.Control
            blocks.words[each * slot : each * slot + len(block)] = block
        self._launch("cycle_set", 1, each * MOST_SLOTS, control, blocks, sum(1 << slot for slot in slots))

    def copy(self, x: Sequence[Matrix], out: Sequence[Matrix], columns: Sequence[int], rows: int) -> None:
        """out[i] = x[i]; even numbers of columns."""
        for first in range(0, len(x), _PARTS):
            parts = _Parts()
            moved = list(zip(x, out, columns, strict=True))[first : first + _PARTS]
            for i, (source, target, count) in enumerate(moved):
                parts.x[i], parts.x_stride[i] = source.pointer.address, source.stride
                parts.out[i], parts.out_stride[i], parts.columns[i] = target.pointer.address, target.stride, count
            self._gpu.launch(self._kernels["copy_columns"], (rows, len(moved), 1), _THREADS, (parts,), overlap=True)

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
