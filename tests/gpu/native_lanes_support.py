"""Slots of a pass for the GPU tests of the state kernels: whose lane each has, and what lies in its rows."""

from dataclasses import dataclass

import numpy as np
import torch
from native_state_support import bf16

LANES = 8


@dataclass(frozen=True)
class Slot:
    lane: int  # below 0: idle
    length: int = 0
    pending: int = 0


IDLE = Slot(-1, 1 << 30, 7)


def set_slots(device, slots):
    for i, slot in enumerate(slots):
        device.set(i, length=slot.length, pending=slot.pending, lane=slot.lane)


def input_rows(slots, rows, columns, g):
    """[slots * rows, columns], NaN in idle slots."""
    x = bf16(len(slots) * rows, columns, generator=g)
    for i, slot in enumerate(slots):
        if slot.lane < 0:
            x[i * rows : (i + 1) * rows] = float("nan")
    return x


def bits(device, pointer):
    return torch.from_numpy(device.gpu.read(pointer, (pointer.nbytes,), np.uint8))
