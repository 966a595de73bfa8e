"""Device memory as the backend sees it: pointers, matrices, arguments, control blocks, and a ledger of purposes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu


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

    def behind(self, offset: int) -> DevicePointer:
        """All bytes but the first ``offset``."""
        return self.at(offset, self.nbytes - offset)


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
        return Matrix(self.pointer.behind(2 * rows * self.stride), self.stride)


EMPTY = Matrix(NULL, 0)

Argument: TypeAlias = "DevicePointer | int | float | ctypes._SimpleCData[Any] | ctypes.Structure"
"""A kernel argument: a pointer, an int (passed as int32), a float (float32), a ctypes scalar of any other type, or a
ctypes structure, passed by value."""


@dataclass(frozen=True)
class Norm:
    """RMS norm of a linear's output after its residual; ``weight`` [columns] FP32 is w or 1 + w."""

    weight: DevicePointer
    eps: float
    out: Matrix

    @property
    def values(self) -> dict[str, Any]:
        """What kernels that end with a norm take of it."""
        where = {"norm_out": self.out, "norm_stride": self.out.stride}
        return {"norm_weight": self.weight, "eps": self.eps, **where}


NO_NORM = Norm(NULL, 0.0, EMPTY)


class Control(IntEnum):
    """Words (int32) of the control block of a slot in device memory, as in kernels/control.cuh."""

    LENGTH = 0  # committed rows
    PENDING = 1  # rows of the tape that are committed but not in the recurrent state
    ROWS = 2  # valid rows of a prefill pass
    ANCHOR = 3  # last committed token, not in the caches yet
    LANE = 4  # whose memory the slot's kernels use; below 0: nobody's, an idle slot


CONTROL_BYTES = 32  # of a slot; slots lie close


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
    def rows_there(self) -> DevicePointer:
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
