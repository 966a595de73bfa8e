"""Device memory as the backend sees it: matrices with a row stride, the control block, a ledger of purposes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import DevicePointer, Gpu

Array: TypeAlias = npt.NDArray[Any]
NULL = DevicePointer(0, 0)


@dataclass(frozen=True)
class Matrix:
    """Rows in device memory; ``stride`` is the distance of two rows in elements, so that a matrix may be a slice."""

    pointer: DevicePointer
    stride: int


class Control(IntEnum):
    """Words (int32) of the control block in device memory, as in kernels/control.cuh."""

    LENGTH = 0  # committed rows
    PENDING = 1  # rows of the tape that are committed but not in the recurrent state
    ROWS = 2  # valid rows of a prefill pass
    ANCHOR = 3  # last committed token, not in the caches yet


CONTROL_BYTES = 32


def control_word(control: DevicePointer, word: Control) -> DevicePointer:
    """The device address of one control word."""
    return control.at(4 * word, 4)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to 256, the alignment of every part of a scratch buffer."""
    return -(-nbytes // 256) * 256


class Memory:
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
