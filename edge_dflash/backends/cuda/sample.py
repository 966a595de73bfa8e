"""Choosing tokens on the device: settings, scratch and launches of kernels/sample.cu. Knows no pass and no grammar."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from edge_dflash.backends.cuda.driver import DevicePointer, Gpu, Module
from edge_dflash.backends.cuda.memory import NULL, Array, Matrix, Memory
from edge_dflash.decode.sampling import Sampling

UNIT = "sample"
SETTINGS = np.dtype(
    [
        *(("temperature", "<f8"), ("top_p", "<f8"), ("seed", "<u8"), ("top_k", "<i4")),
        *(("position", "<i4"), ("first", "<i4"), ("stop", "<i4")),  # rows first .. stop - 1, from that position on
        *(("masked", "<u4"), ("unused", "<u4")),  # bit r: row r has a mask
    ]
)
"""``Settings`` of kernels/sample.cu; the last five words only count for launches without a length."""

_BINS = 65536  # distinct BF16 values
_CHUNKS = 512
_SLICE, _COUNT_THREADS, _THREADS = 8192, 512, 256
_BEST_BYTES, _CUT_BYTES = 16, 8
_KERNELS = ("sample_count", "sample_cut", "sample_ties", "sample_choose")
_MOST_K = 2**31 - 1


class _Job(ctypes.Structure):
    """``Job`` of kernels/sample.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "settings", "length", "masks")),
        *((name, ctypes.c_int32) for name in ("stride", "columns", "words", "offset", "first", "stop")),
    )


@dataclass(frozen=True)
class Block:
    """Rows ``first`` to ``stop`` - 1 of which row r chooses for position ``length`` + ``offset`` + r, without masks."""

    length: DevicePointer  # int32
    offset: int
    first: int
    stop: int


@dataclass(frozen=True)
class Buffers:
    """Device memory of choices over [rows, columns] logits."""

    rows: int
    columns: int
    settings: DevicePointer  # SETTINGS
    masks: DevicePointer  # uint32 [rows, words]
    bins: DevicePointer  # uint32 [rows, bins], 0 between launches
    chunks: DevicePointer  # uint32 [rows, chunks of bins], 0 between launches
    tops: DevicePointer  # uint32 [rows], all ones between launches
    cuts: DevicePointer
    ties: DevicePointer  # uint32 [rows, slices]
    bests: DevicePointer  # of slices
    arrived: DevicePointer  # uint32 [rows], 0 between launches
    chosen: DevicePointer  # int32 [rows]: choices of launches that the host asked for

    @classmethod
    def take(cls, memory: Memory, rows: int, columns: int) -> Buffers:
        """Take all from ``memory``."""

        def part(nbytes: int) -> DevicePointer:
            return memory.take("sampling", nbytes)

        slices = rows * -(-columns // _SLICE)
        return cls(
            *(rows, columns, part(SETTINGS.itemsize), part(4 * rows * mask_words(columns)), part(4 * rows * _BINS)),
            *(part(4 * rows * _CHUNKS), part(4 * rows), part(_CUT_BYTES * rows), part(4 * slices)),
            *(part(_BEST_BYTES * slices), part(4 * rows), part(4 * rows)),
        )

    def clear(self, gpu: Gpu) -> None:
        """Bring everything to the state between launches."""
        for pointer in (self.settings, self.bins, self.chunks, self.arrived):
            gpu.fill(pointer)
        gpu.fill(self.tops, 0xFF)


def mask_words(columns: int) -> int:
    """Words of one row's mask."""
    return (columns + 31) // 32


def write_sampling(settings: Array, sampling: Sampling) -> None:
    """Put the request's part into ``settings`` [1]."""
    settings["temperature"], settings["top_p"] = sampling.temperature, sampling.top_p
    settings["seed"], settings["top_k"] = sampling.seed, min(sampling.top_k, _MOST_K)


class Sampler:
    """Loaded kernels. A row's choice depends on its logits, its mask, its position and the settings alone."""

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        self._kernels = {name: module.kernel(name) for name in _KERNELS}

    def choose(self, buffers: Buffers, logits: Matrix, ids: DevicePointer, block: Block | None = None) -> None:
        """ids[r] (int32) = choice of row r of BF16 ``logits``; rows and position as in the settings, or ``block``.

        ``logits`` has a stride of a multiple of 8. Masks only count without a block. Four launches, of which three
        do nothing without top_k and top_p.
        """
        if logits.stride % 8 or logits.stride < buffers.columns:
            raise ValueError(f"logits have row stride {logits.stride}; a multiple of 8, at least {buffers.columns}")
        b, columns = block or Block(NULL, 0, 0, 0), buffers.columns
        job = _Job(
            *(logits.pointer.address, buffers.settings.address, b.length.address),
            *(None if block else buffers.masks.address, logits.stride, columns, mask_words(columns)),
            *(b.offset, b.first, b.stop),
        )
        rows = b.stop if block else buffers.rows
        grid, bins, chunks, tops = (-(-columns // _SLICE), rows, 1), buffers.bins, buffers.chunks, buffers.tops
        cuts, ties = buffers.cuts, buffers.ties
        self._launch("sample_count", grid, _COUNT_THREADS, job, bins, chunks, tops)
        self._launch("sample_cut", (rows, 1, 1), _CHUNKS, job, bins, chunks, tops, cuts)
        self._launch("sample_ties", grid, _THREADS, job, cuts, ties)
        self._launch("sample_choose", grid, _THREADS, job, cuts, ties, buffers.bests, buffers.arrived, ids)

    def _launch(
        self, name: str, grid: tuple[int, int, int], threads: int, job: _Job, *arguments: DevicePointer
    ) -> None:
        self._gpu.launch(self._kernels[name], grid, threads, (job, *arguments), overlap=True)
