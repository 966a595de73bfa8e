"""Device memory as the backend sees it: matrices, the control block, a ledger of purposes, the arena of a pass.

Memory of a tensor is used again when its last reader has run. Kernels may start early but touch nothing but weights
before all earlier ones have ended, so reuse by the order of the steps is safe.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import BackendError

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu
    from edge_dflash.backends.cuda.schedule import Schedule


Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class DevicePointer:
    """An address in device memory and the bytes that belong to it."""

    address: int
    nbytes: int

    def at(self, offset: int, nbytes: int) -> DevicePointer:
        """A part of this memory; raises ValueError when it does not lie inside."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} do not lie inside {self.nbytes} bytes")
        return DevicePointer(self.address + offset, nbytes)


NULL = DevicePointer(0, 0)


@dataclass(frozen=True)
class Matrix:
    """Rows in device memory; ``stride`` is the distance of two rows in elements, so that a matrix may be a slice.

    Below 0: 16 rows in blocks for the windows of -``stride`` columns (kernels/blocks.cuh).
    """

    pointer: DevicePointer
    stride: int

    def behind(self, rows: int) -> Matrix:
        """All rows but the first ``rows``, of a matrix in rows."""
        skipped = 2 * rows * self.stride
        return Matrix(self.pointer.at(skipped, self.pointer.nbytes - skipped), self.stride)


EMPTY = Matrix(NULL, 0)


class Control(IntEnum):
    """Words (int32) of the control block of a slot in device memory, as in kernels/control.cuh."""

    LENGTH = 0  # committed rows
    PENDING = 1  # rows of the tape that are committed but not in the recurrent state
    ROWS = 2  # valid rows of a prefill pass
    ANCHOR = 3  # last committed token, not in the caches yet
    LANE = 4  # whose memory the slot's kernels use; below 0: nobody's, an idle slot


CONTROL_BYTES = 32  # of a slot; slots lie close


@dataclass(frozen=True)
class ControlBlock:
    """What the control block says, or has to say."""

    length: int = 0
    pending: int = 0
    anchor: int = 0


EMPTY_SEQUENCE = ControlBlock()


@dataclass(frozen=True)
class Words:
    """Control words of a pass in device memory.

    A pass is of one prefill chunk, whose rows are as many as a word says, and committed; or of a block of rows in each
    of its slots (verify, propose), rows s * block .. (s + 1) * block - 1 in slot s.
    """

    control: DevicePointer  # the block of slot 0; CONTROL_BYTES further on that of slot 1
    prefill: bool = False  # of one slot
    block: int | None = None  # rows of a block; None: all of it
    slots: int = 1

    @property
    def length(self) -> DevicePointer:
        """Committed rows of slot 0."""
        return control_word(self.control, Control.LENGTH)

    @property
    def rows(self) -> DevicePointer:
        """Valid rows of a prefill chunk; NULL for a pass of blocks."""
        return control_word(self.control, Control.ROWS) if self.prefill else NULL


def control_word(control: DevicePointer, word: Control) -> DevicePointer:
    """The device address of one control word."""
    return control.at(4 * word, 4)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to 256, the alignment of every part of a scratch buffer."""
    return -(-nbytes // 256) * 256


def scratch_at(scratch: DevicePointer, nbytes: int) -> int:
    """Where a scratch buffer starts. Raises ValueError when it has fewer than ``nbytes``."""
    if scratch.nbytes < nbytes:
        raise ValueError(f"the scratch buffer has {scratch.nbytes} bytes, {nbytes} are needed")
    return scratch.address


class Allocator:
    """Allocates by purpose. Without a device it only counts, so that a budget is known before anything is loaded."""

    def __init__(self, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self.bytes: dict[str, int] = {}

    def take(self, purpose: str, nbytes: int) -> DevicePointer:
        """Memory that is not initialised."""
        self.count(purpose, nbytes)
        return DevicePointer(0, nbytes) if self._gpu is None else self._gpu.allocate(nbytes)

    def put(self, purpose: str, array: Array) -> DevicePointer:
        """Memory that holds ``array``."""
        pointer = self.take(purpose, array.nbytes)
        if self._gpu is not None:
            self._gpu.write(pointer, np.ascontiguousarray(array))
        return pointer

    def count(self, purpose: str, nbytes: int) -> None:
        """Count memory that was allocated elsewhere."""
        self.bytes[purpose] = self.bytes.get(purpose, 0) + nbytes

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


PADDING = 16  # elements: rows start on 32 bytes, whatever the columns


@dataclass(frozen=True)
class Placement:
    """Where a root tensor lies: bytes from the arena's start, elements between rows."""

    offset: int
    stride: int
    nbytes: int


def place(schedule: Schedule, rows: int, kept: Collection[str] = ()) -> tuple[dict[str, Placement], int]:
    """Places of all root tensors for passes of ``rows`` (as allocated), and the arena's size.

    Tensors ``kept`` stay as they are until the pass has ended.
    """
    lives = _lives(schedule)
    for name in kept:
        root, _ = schedule.place(name)
        lives[root] = lives[root][0], len(schedule.steps)
    places: dict[str, Placement] = {}
    size = 0
    for name in sorted(lives, key=lambda n: lives[n]):
        stride = -(-schedule.columns[name] // PADDING) * PADDING
        nbytes = aligned(2 * rows * stride)
        taken = sorted(
            (p.offset, p.offset + p.nbytes) for other, p in places.items() if _meet(lives[name], lives[other])
        )
        offset = 0
        for first, stop in taken:
            if offset + nbytes <= first:
                break
            offset = max(offset, stop)
        places[name] = Placement(offset, stride, nbytes)
        size = max(size, offset + nbytes)
    return places, size


def _lives(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last step that touches each tensor; logits lie elsewhere."""
    lives: dict[str, tuple[int, int]] = {}
    logits = schedule.program.outputs.get("logits")
    for index, step in enumerate(schedule.steps):
        for name in (*step.reads, *step.writes):
            root, _ = schedule.place(name)
            if root != logits:
                first, _ = lives.get(root, (index, index))
                lives[root] = (first, index)
    return lives


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


class TensorMap(ctypes.Structure):
    """``TensorMap`` of kernels/wgmma.cuh, a kernel argument."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


def bf16_map(matrix: Matrix, rows: int, columns: int, box: tuple[int, int]) -> TensorMap:
    """Map of BF16 ``matrix`` [rows, columns], copied in boxes of (rows, 64 columns); zeros outside of the matrix.

    Rows of a box are 128 bytes in shared memory, 16-byte chunk c of row r at c ^ (r % 8). Raises BackendError when the
    matrix does not start at, and its rows are not apart by, a multiple of 16 bytes.
    """
    from cuda.bindings import driver as cu

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
