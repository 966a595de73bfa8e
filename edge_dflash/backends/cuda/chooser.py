"""What the host has to do with a choice on the device: settings and masks up, ids down. Knows no pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_dflash.backends.cuda import sample
from edge_dflash.backends.cuda.driver import DevicePointer, Gpu, Graph
from edge_dflash.backends.cuda.memory import Matrix
from edge_dflash.decode.sampling import Packed, Sampling


class Chooser:
    """Page-locked memory and the graph of choices that the host asks for."""

    def __init__(self, gpu: Gpu, sampler: sample.Sampler, buffers: sample.Buffers, logits: Matrix) -> None:
        self._gpu, self._sampler, self._buffers, self._logits = gpu, sampler, buffers, logits
        self._settings = gpu.pinned((1,), sample.SETTINGS)
        self._masks = gpu.pinned((buffers.rows, sample.mask_words(buffers.columns)), np.uint32)
        self._chosen = gpu.pinned((buffers.rows,), np.int32)
        self._known: Sampling | None = None  # what the device's settings say
        self._graph: Graph = gpu.capture(self._choose)
        self._graph.upload()

    @property
    def stop(self) -> DevicePointer:
        """Where the device's settings say behind which row they end: int32."""
        return self._buffers.settings.at(sample.SETTINGS.fields["stop"][1], 4)  # type: ignore[index]  # it has fields

    def enqueue(self, ids: DevicePointer | None) -> None:
        """The settings up, and the choices of their rows into ``ids`` [rows] int32; None: no choice."""
        self._gpu.write_from(self._buffers.settings, self._settings)
        if ids is not None:
            self._sampler.choose(self._buffers, self._logits, ids)

    def _choose(self) -> None:
        self.enqueue(self._buffers.chosen)
        self._gpu.read_into(self._buffers.chosen, self._chosen)

    def prepare(self, sampling: Sampling) -> None:
        """Enqueue the request's settings if the device has others; the caller waits before the next call."""
        if sampling != self._known:
            sample.write_sampling(self._settings, sampling)
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
        sample.write_sampling(settings, sampling)
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
