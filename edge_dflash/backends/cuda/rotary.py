"""Rotary tables on the device: one for all lanes, or one of each lane where images give tokens other positions.

Row i of a lane's table is token i's, whatever its position is: kernels read it by the token's index.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.memory import Allocator, DevicePointer
from edge_dflash.model.specs import RopeSpec

Table = npt.NDArray[np.float32]
_PURPOSE = "rotary tables"


def rope_table(rope: RopeSpec, positions: int) -> tuple[Table, Table]:
    """Cosine and sine [positions, dims / 2] float32; YaRN blending after arXiv 2309.00071 when the spec has scaling.

    Angles are float32 products as in the models' own code: at position 32,000 a wider product would be a different
    angle from the one the weights were trained with.
    """
    dims = rope.dims
    exponent = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    frequency = (1.0 / np.power(rope.theta, exponent.astype(np.float64))).astype(np.float32)
    factor = 1.0
    if rope.scaling is not None:
        yarn = rope.scaling
        low, high = yarn.ramp(rope.theta, dims)
        ramp = ((np.arange(dims // 2, dtype=np.float32) - low) / max(high - low, 1e-3)).clip(0, 1)
        frequency = (frequency * (1 - ramp) + frequency / yarn.factor * ramp).astype(np.float32)
        given = yarn.attention_factor
        factor = (0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0) if given is None else given
    angles = (np.arange(positions, dtype=np.float32)[:, None] * frequency[None, :]).astype(np.float64)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def axes_of(rope: RopeSpec) -> npt.NDArray[np.int64]:
    """Which position each pair of dims turns by [dims / 2]: 0, 1, 2 for T, H, W (interleaved M-RoPE of Qwen3.5)."""
    _, h, w = rope.mrope_section or (0, 0, 0)
    pair = np.arange(rope.dims // 2)
    return np.where((pair % 3 == 1) & (pair < 3 * h), 1, np.where((pair % 3 == 2) & (pair < 3 * w), 2, 0))


class RotaryTables:
    """Cosines and sines [rows, dims / 2] FP32 of one RopeSpec; ``lanes`` tables of them if it has sections."""

    def __init__(self, rope: RopeSpec, rows: int, lanes: int, memory: Allocator) -> None:
        self._host, self._rows, self._axes = rope_table(rope, rows), rows, axes_of(rope)
        self._base = [memory.put(_PURPOSE, table) for table in self._host]
        self.rows = rows if rope.mrope_section else 0  # from a lane's table to the next one's; 0: all lanes have one
        self._moved: set[int] = set(range(lanes))  # lanes whose table differs from the common one, or was never written
        nbytes = self._base[0].nbytes
        self._tables = [memory.take(_PURPOSE, lanes * nbytes) for _ in self._base] if self.rows else self._base

    @property
    def cosine(self) -> DevicePointer:
        """[rows, dims / 2], or [lanes, rows, dims / 2]."""
        return self._tables[0]

    @property
    def sine(self) -> DevicePointer:
        """As the cosines."""
        return self._tables[1]

    def shift(self, gpu: Gpu, lane: int, first: int, delta: int) -> None:
        """Tokens from index ``first`` on are at their index + ``delta`` (at most 0) on all axes."""
        if not self.rows or (delta == 0 and lane not in self._moved):
            return
        count = self._rows - first
        for base, table in zip(self._base, self._tables, strict=True):
            row = base.nbytes // self._rows
            source, at = base.at((first + delta) * row, count * row), (lane * self._rows + first) * row
            gpu.copy(source, table.at(at, count * row), 1, count * row, count * row)
        if delta == 0 and first == 0:
            self._moved.discard(lane)
        else:
            self._moved.add(lane)

    def place(self, gpu: Gpu, lane: int, first: int, positions: npt.NDArray[np.int32]) -> None:
        """Tokens from index ``first`` on are at ``positions`` [3, tokens] on the axes T, H, W. Waits for the copy."""
        if not self.rows:
            return
        pairs = np.arange(len(self._axes))
        for host, table in zip(self._host, self._tables, strict=True):
            rows = host[positions[self._axes].T, pairs]
            at = (lane * self._rows + first) * host.itemsize * len(pairs)
            gpu.write(table.at(at, rows.nbytes), rows)
        self._moved.add(lane)
