"""Choosing tokens on the device: kernels/sample.cu, its settings, and masks up and ids down for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer, Matrix
from edge_dflash.decode.sampling import Packed, Sampling

UNIT = "sample"
SETTINGS = np.dtype(
    [
        *(("temperature", "<f8"), ("top_p", "<f8"), ("seed", "<u8"), ("top_k", "<i4")),
        *(("position", "<i4"), ("first", "<i4"), ("stop", "<i4")),  # rows first .. stop - 1, from that position on
        *(("masked", "<u4"), ("unused", "<u4")),  # bit r: row r has a mask
    ]
)

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Graph, Module
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
class SamplingBuffers:
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
    def take(cls, memory: Allocator, rows: int, columns: int) -> SamplingBuffers:
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

    def choose(self, buffers: SamplingBuffers, logits: Matrix, ids: DevicePointer, block: Block | None = None) -> None:
        """ids[r] (int32) = choice of row r of BF16 ``logits``; rows and position as in the settings, or ``block``.

        ``logits`` has a stride of a multiple of 8, and what of its rows lies in its memory may be read. Masks only
        count without a block. Four launches, of which three do nothing without top_k and top_p.
        """
        if logits.stride % 8 or logits.stride < buffers.columns:
            raise ValueError(f"logits have row stride {logits.stride}; a multiple of 8, at least {buffers.columns}")
        b, columns = block or Block(NULL, 0, 0, 0), buffers.columns
        job = _Job(
            *(logits.pointer.address, buffers.settings.address, b.length.address),
            *(None if block else buffers.masks.address, logits.stride, columns, mask_words(columns)),
            *(b.offset, b.first, b.stop),
        )
        rows = b.stop if block else min(buffers.rows, logits.pointer.nbytes // (2 * logits.stride))
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


class Chooser:
    """Page-locked memory and the graph of choices that the host asks for."""

    def __init__(self, gpu: Gpu, sampler: Sampler, buffers: SamplingBuffers, logits: Matrix) -> None:
        self._gpu, self._sampler, self._buffers, self._logits = gpu, sampler, buffers, logits
        self._settings = gpu.pinned((1,), SETTINGS)
        self._masks = gpu.pinned((buffers.rows, mask_words(buffers.columns)), np.uint32)
        self._chosen = gpu.pinned((buffers.rows,), np.int32)
        self._known: Sampling | None = None  # what the device's settings say
        self._graph: Graph = gpu.capture(self._choose)

    @property
    def stop(self) -> DevicePointer:
        """Where the device's settings say behind which row they end: int32."""
        return self._buffers.settings.at(SETTINGS.fields["stop"][1], 4)  # type: ignore[index]  # it has fields

    def enqueue(self, ids: DevicePointer | None, logits: Matrix | None = None) -> None:
        """The settings up, and the choices of their rows into ``ids`` [rows] int32; None: no choice.

        ``logits``: other ones, of which the settings then name the rows.
        """
        self._gpu.write_from(self._buffers.settings, self._settings)
        if ids is not None:
            self._sampler.choose(self._buffers, logits or self._logits, ids)

    def _choose(self) -> None:
        self.enqueue(self._buffers.chosen)
        self._gpu.read_into(self._buffers.chosen, self._chosen)

    def prepare(self, sampling: Sampling) -> None:
        """Enqueue the request's settings if the device has others; the caller waits before the next call."""
        if sampling != self._known:
            write_sampling(self._settings, sampling)
            self._gpu.write_from(self._buffers.settings, self._settings)
            self._known = sampling

    def write(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> None:
        """Say what the next launch chooses: rows first, first + 1, ..., one for each mask, and enqueue the masks."""
        stop, settings = first + len(masks), self._settings
        there = [row for row, mask in enumerate(masks, first) if mask is not None]
        for row in there:
            self._masks[row] = masks[row - first]
        if there:
            rows, width = slice(there[0], there[-1] + 1), self._masks.strides[0]
            part = self._buffers.masks.at(rows.start * width, (rows.stop - rows.start) * width)
            self._gpu.write_from(part, self._masks[rows])
        write_sampling(settings, sampling)
        settings["position"], settings["first"], settings["stop"] = position, first, stop
        settings["masked"] = sum(1 << row for row in there)
        self._known = sampling

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int) -> list[int]:
        """Choices of rows first, first + 1, ... of the logits, one for each mask; waits for them."""
        self.write(sampling, position, masks, first)
        self._graph.launch()
        self._gpu.synchronize()
        found: list[int] = self._chosen[first : first + len(masks)].tolist()
        return found
