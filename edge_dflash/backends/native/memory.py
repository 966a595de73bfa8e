"""Where the rows of a pass lie in device memory: a matrix with a row stride, and the control block."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from edge_dflash.backends.native.driver import DevicePointer

NULL = DevicePointer(0, 0)


@dataclass(frozen=True)
class Matrix:
    """Rows in device memory; ``stride`` is the distance of two rows in elements, so that a matrix may be a slice."""

    pointer: DevicePointer
    stride: int


class Control(IntEnum):
    """Words (int32) of the control block in device memory, as in kernels/state.cuh."""

    LENGTH = 0  # committed rows
    PENDING = 1  # rows of the tape that are committed but not in the recurrent state
    ROWS = 2  # valid rows of a prefill pass
    ANCHOR = 3  # last committed token, not in the caches yet
    BUDGET = 4  # most rows that further cycles may commit


CONTROL_BYTES = 32


def control_word(control: DevicePointer, word: Control) -> DevicePointer:
    """The device address of one control word."""
    return control.at(4 * word, 4)


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to 256, the alignment of every part of a scratch buffer."""
    return -(-nbytes // 256) * 256
