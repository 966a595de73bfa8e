"""The states of a sequence as host arrays, and back: K and V rows [length, Hkv, D], S [Hv, Dk, Dv], conv history."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from edge_dflash.backends.cuda.driver import DevicePointer, Gpu
from edge_dflash.backends.cuda.memory import Array
from edge_dflash.backends.cuda.states import States
from edge_dflash.decode.backend import Snapshot
from edge_dflash.errors import BackendError


def read_states(gpu: Gpu, states: States, length: int) -> dict[str, Array]:
    """Copies of everything that ``length`` committed rows left; nothing may be pending."""
    arrays: dict[str, Array] = {}
    for name, pointer, kv_rows, empty in _kv(states, length):
        rows = [gpu.read(pointer.at(*part), empty.shape[::2], empty.dtype) for part in _heads(empty, kv_rows)]
        arrays[name] = np.ascontiguousarray(np.stack(rows, axis=1)) if rows else empty
    for name, pointer, empty in _recurrent(states):
        arrays[name] = gpu.read(pointer, empty.shape, empty.dtype)
    return arrays


def write_states(gpu: Gpu, states: States, snapshot: Snapshot) -> None:
    """Put a snapshot's arrays back. Raises BackendError, before anything is written, when it is of another pair."""
    length = snapshot.length
    wanted = {name: empty for name, _, _, empty in _kv(states, length)}
    wanted |= {name: empty for name, _, empty in _recurrent(states)}
    if wanted.keys() != snapshot.arrays.keys():
        differing = sorted(wanted.keys() ^ snapshot.arrays.keys())
        raise BackendError(f"the snapshot is of another pair: states differ in {', '.join(differing[:3])}")
    for name, empty in wanted.items():
        array = snapshot.arrays[name]
        if (array.shape, array.dtype) != (empty.shape, empty.dtype):
            raise BackendError(
                f"the snapshot's {name} is {array.dtype} {tuple(array.shape)}, "
                f"this pair stores {empty.dtype} {tuple(empty.shape)}"
            )
    for name, pointer, kv_rows, empty in _kv(states, length):
        for head, part in enumerate(_heads(empty, kv_rows)):
            gpu.write(pointer.at(*part), np.ascontiguousarray(snapshot.arrays[name][:, head]))
    for name, pointer, _ in _recurrent(states):
        gpu.write(pointer, np.ascontiguousarray(snapshot.arrays[name]))


def _kv(states: States, length: int) -> Iterator[tuple[str, DevicePointer, int, Array]]:
    """Name, memory, rows of the memory, and an array of the stored shape and type."""
    for name, memory in states.kv.items():
        shape = states.shapes[name]
        empty = np.empty((length, shape.kv_heads, shape.head_dim), np.uint8 if shape.kv == "fp8" else np.int16)
        yield f"{name}.k", memory.k, shape.kv_rows, empty
        yield f"{name}.v", memory.v, shape.kv_rows, empty


def _heads(array: Array, kv_rows: int) -> list[tuple[int, int]]:
    """Offset and bytes of each head's rows in memory [Hkv, kv_rows, D]."""
    length, heads, dim = array.shape
    row = dim * array.itemsize
    return [(head * kv_rows * row, length * row) for head in range(heads)] if length else []


def _recurrent(states: States) -> Iterator[tuple[str, DevicePointer, Array]]:
    for name, layer in states.delta.items():
        s = states.delta_shapes[name]
        yield f"{name}.state", layer.state, np.empty((s.value_heads, s.key_dim, s.value_dim), np.float32)
        yield f"{name}.conv", layer.history, np.empty((s.conv_kernel - 1, s.channels), np.uint16)
