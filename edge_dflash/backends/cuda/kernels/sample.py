"""Choosing tokens on the device: kernels/sample.cu, its settings, and masks up and ids down for the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from edge_dflash.backends.cuda.kernels.source import KernelFace, Signature, structure
from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer, Matrix
from edge_dflash.decode.sampling import Packed, Sampling

UNIT = "sample"
_Settings, _Job = structure("choice.cuh", "Settings"), structure("sample.cu", "Job")
SETTINGS = np.dtype(_Settings)
"""``Settings`` of kernels/choice.cuh; position, rows and masked rows only count for launches without a length."""

_BINS = 65536  # distinct BF16 values
_CHUNKS = 512
_SLICE, _COUNT_THREADS, _THREADS, _LOGPROB_THREADS = 8192, 512, 256, 1024
_BEST_BYTES, _CUT_BYTES = 16, 8
_MOST_K = 2**31 - 1
_KERNELS = ("sample_count", "sample_cut", "sample_ties", "sample_choose", "row_logprobs")
_SIGNATURES = {name: Signature("sample.cu", name) for name in _KERNELS}

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Graph


@dataclass(frozen=True)
class Block:
    """Rows ``first`` to ``stop`` - 1 of each slot, without masks; row r is for position ``length`` + ``offset`` + r."""

    length: DevicePointer  # int32, of slot 0; CONTROL_BYTES further on that of slot 1
    offset: int
    first: int
    stop: int


@dataclass(frozen=True)
class Span:
    """Which slots a launch chooses for: ``rows`` rows of logits each, from the first one's on."""

    rows: int
    slots: int = 1
    first: int = 0  # whose settings and masks come first


@dataclass(frozen=True)
class SamplingBuffers:
    """Device memory of choices over [slots * rows, columns] logits: of slots with ``rows`` rows each, or fewer."""

    rows: int
    columns: int
    slots: int
    settings: DevicePointer  # SETTINGS [slots]
    masks: DevicePointer  # uint32 [slots, rows, words]; from here on rows are those of all slots
    bins: DevicePointer  # uint32 [rows, bins], 0 between launches
    chunks: DevicePointer  # uint32 [rows, chunks of bins], 0 between launches
    tops: DevicePointer  # uint32 [rows], all ones between launches
    cuts: DevicePointer
    ties: DevicePointer  # uint32 [rows, slices]
    bests: DevicePointer  # of slices
    arrived: DevicePointer  # uint32 [rows], 0 between launches
    chosen: DevicePointer  # int32 [rows]: choices of launches that the host asked for

    @classmethod
    def take(cls, memory: Allocator, rows: int, columns: int, slots: int = 1) -> SamplingBuffers:
        """Take all from ``memory``."""

        def part(nbytes: int) -> DevicePointer:
            return memory.take("sampling", nbytes)

        every = slots * rows
        slices = every * -(-columns // _SLICE)
        return cls(
            rows,
            columns,
            slots,
            settings=part(SETTINGS.itemsize * slots),
            masks=part(4 * every * mask_words(columns)),
            bins=part(4 * every * _BINS),
            chunks=part(4 * every * _CHUNKS),
            tops=part(4 * every),
            cuts=part(_CUT_BYTES * every),
            ties=part(4 * slices),
            bests=part(_BEST_BYTES * slices),
            arrived=part(4 * every),
            chosen=part(4 * every),
        )

    def of_slot(self, slot: int) -> tuple[DevicePointer, DevicePointer]:
        """Settings and masks of the slots from this one on."""
        masks = 4 * self.rows * mask_words(self.columns)  # bytes from a slot's to the next one's
        return self.settings.behind(SETTINGS.itemsize * slot), self.masks.behind(masks * slot)

    def clear(self, gpu: Gpu) -> None:
        """Bring everything to the state between launches."""
        for pointer in (self.settings, self.bins, self.chunks, self.arrived):
            gpu.fill(pointer)
        gpu.fill(self.tops, 0xFF)


def mask_words(columns: int) -> int:
    """Words of one row's mask."""
    return (columns + 31) // 32


def write_sampling(settings: Array, sampling: Sampling) -> None:
    """Put the request's part into ``settings`` of a slot."""
    settings["temperature"], settings["top_p"] = sampling.temperature, sampling.top_p
    settings["seed"], settings["top_k"] = sampling.seed, min(sampling.top_k, _MOST_K)


class Sampler(KernelFace):
    """Loaded kernels. A row's choice depends on its logits, its mask, its position and the settings alone."""

    _signatures = _SIGNATURES

    def choose(
        self,
        buffers: SamplingBuffers,
        logits: Matrix,
        ids: DevicePointer,
        block: Block | None = None,
        span: Span | None = None,
    ) -> None:
        """ids[r] (int32) = choice of row r of BF16 ``logits``; rows and position as in the settings, or ``block``.

        ``logits`` has a stride of a multiple of 8, and what of its rows lies in its memory may be read. Masks only
        count without a block. ``span``: the slots; without one, slot 0 has all rows. Four launches, of which three do
        nothing without top_k and top_p.
        """
        if logits.stride % 8 or logits.stride < buffers.columns:
            raise ValueError(f"logits have row stride {logits.stride}; a multiple of 8, at least {buffers.columns}")
        b, columns, there = block or Block(NULL, 0, 0, 0), buffers.columns, logits.pointer.nbytes // (2 * logits.stride)
        span = span or Span(b.stop if block else min(buffers.rows, there))
        rows, (settings, masks) = span.slots * span.rows, buffers.of_slot(span.first)
        if rows > there:
            raise ValueError(f"choices of {rows} rows, of which logits have {there}")
        job = _Job.of(
            b,
            logits=logits,
            settings=settings,
            masks=None if block else masks,
            stride=logits.stride,
            columns=columns,
            words=mask_words(columns),
            block=span.rows,
            apart=buffers.rows,
        )
        grid, given = (-(-columns // _SLICE), rows, 1), {"job": job, "ids": ids}
        self._launch("sample_count", grid, _COUNT_THREADS, buffers, **given)
        self._launch("sample_cut", (rows, 1, 1), _CHUNKS, buffers, **given, sums=buffers.chunks)
        self._launch("sample_ties", grid, _THREADS, buffers, **given)
        self._launch("sample_choose", grid, _THREADS, buffers, **given)

    def logprobs(self, logits: Matrix, columns: int, ids: DevicePointer, found: DevicePointer) -> None:
        """found[r] (float32) = log-probability of ids[r] (int32) by row r, of as many rows as there are ids."""
        given = {"logits": logits, "ids": ids, "found": found, "stride": logits.stride, "columns": columns}
        self._launch("row_logprobs", (ids.nbytes // 4, 1, 1), _LOGPROB_THREADS, **given)


class Chooser:
    """Page-locked memory of settings and masks, and for each slot the graph of choices that the host asks for."""

    def __init__(
        self, gpu: Gpu, sampler: Sampler, buffers: SamplingBuffers, logits: Matrix, block: int | None = None
    ) -> None:
        """``block``: rows from a slot's logits to the next one's in what the host chooses from; None: all that fit."""
        self._gpu, self._sampler, self._buffers, self._logits = gpu, sampler, buffers, logits
        self._settings = gpu.pinned((buffers.slots,), SETTINGS)
        self._masks = gpu.pinned((buffers.slots * buffers.rows, mask_words(buffers.columns)), np.uint32)
        self._chosen = gpu.pinned((buffers.slots * buffers.rows,), np.int32)
        self._ids = gpu.pinned((buffers.rows,), np.int32)
        self._logprobs = gpu.pinned((buffers.rows,), np.float32)
        self._known: list[Sampling | None] = [None] * buffers.slots  # what the device's settings say
        block = block or buffers.rows
        self._graphs: list[Graph] = [
            gpu.capture(partial(self._choose, slot, logits.behind(slot * block) if slot else logits))
            for slot in range(buffers.slots)
        ]

    @property
    def stop(self) -> DevicePointer:
        """Where the device's settings of slot 0 say behind which row they end: int32; SETTINGS further on of slot 1."""
        return self._buffers.settings.at(SETTINGS.fields["stop"][1], 4)  # type: ignore[index]  # it has fields

    def chosen(self, slot: int) -> DevicePointer:
        """Where choices of a slot that the host asks for go: [rows] int32."""
        each = 4 * self._buffers.rows
        return self._buffers.chosen.at(slot * each, each)

    def enqueue(self, ids: DevicePointer | None, logits: Matrix | None = None, span: Span | None = None) -> None:
        """The settings of slots up, and the choices of their rows into ``ids`` [rows] int32; None: no choice.

        ``logits``: other ones, of which the settings then name the rows. Without a ``span`` all of slot 0.
        """
        first, slots = (span.first, span.slots) if span else (0, 1)
        size = SETTINGS.itemsize
        self._gpu.write_from(self._buffers.settings.at(first * size, slots * size), self._settings[first:][:slots])
        if ids is not None:
            self._sampler.choose(self._buffers, logits or self._logits, ids, span=span)

    def _choose(self, slot: int, logits: Matrix) -> None:
        self.enqueue(self.chosen(slot), logits, self.alone(slot, logits) if slot else None)
        self._gpu.read_into(self.chosen(slot), self._chosen[slot * self._buffers.rows :][: self._buffers.rows])

    def alone(self, slot: int, logits: Matrix) -> Span:
        """One slot, whose rows are the first of ``logits``."""
        return Span(min(self._buffers.rows, logits.pointer.nbytes // (2 * logits.stride)), first=slot)

    def prepare(self, *samplings: Sampling) -> None:
        """Enqueue settings of slots 0, 1, ... if the device has others; the caller waits before the next call."""
        count = len(samplings)
        if list(samplings) != self._known[:count]:
            for slot, sampling in enumerate(samplings):
                write_sampling(self._settings[slot : slot + 1], sampling)
            self._gpu.write_from(self._buffers.settings.at(0, SETTINGS.itemsize * count), self._settings[:count])
            self._known[:count] = samplings

    def write(
        self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0, slot: int = 0
    ) -> None:
        """Say what the next launch chooses: a slot's rows first, first + 1, ..., one a mask, and enqueue masks."""
        stop, settings, start = first + len(masks), self._settings[slot : slot + 1], slot * self._buffers.rows
        there = [row for row, mask in enumerate(masks, first) if mask is not None]
        self._known[slot] = None  # until a launch, which may never come, the device has others
        for row in there:
            self._masks[start + row] = masks[row - first]
        if there:
            rows, width = slice(start + there[0], start + there[-1] + 1), self._masks.strides[0]
            part = self._buffers.masks.at(rows.start * width, (rows.stop - rows.start) * width)
            self._gpu.write_from(part, self._masks[rows])
        write_sampling(settings, sampling)
        settings["position"], settings["first"], settings["stop"] = position, first, stop
        settings["masked"] = sum(1 << row for row in there)

    def choose(
        self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int, slot: int = 0
    ) -> list[int]:
        """Choices of a slot's rows first, first + 1, ... of the logits, one for each mask; waits for them."""
        self.write(sampling, position, masks, first, slot)
        self._graphs[slot].launch()
        self._known[slot] = sampling
        self._gpu.synchronize()
        start = slot * self._buffers.rows + first
        found: list[int] = self._chosen[start : start + len(masks)].tolist()
        return found

    def logprobs(self, ids: Sequence[int], first: int) -> list[float]:
        """Log-probability of each of ``ids`` by the rows of all logits from ``first`` on; waits for them."""
        self._ids[: len(ids)] = ids
        asked, found = self._ids[: len(ids)], self._logprobs[: len(ids)]
        there = [DevicePointer(one.ctypes.data, one.nbytes) for one in (asked, found)]  # the same, for the device
        self._sampler.logprobs(self._logits.behind(first), self._buffers.columns, *there)
        self._gpu.synchronize()
        values: list[float] = found.tolist()
        return values
