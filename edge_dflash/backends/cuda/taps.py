"""Taps of whole sequences by the native backend's own prefill, for the training of a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.loading import Launches
from edge_dflash.backends.cuda.weights import BundleWeights, NativeWeights
from edge_dflash.bundle.reader import Bundle
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import RmsNorm, SelectRows
from edge_dflash.weights.formats import bf16_to_f32

Bits = npt.NDArray[np.uint16]


class NativeTapper:
    """Runs prompts and answers through the prefill pass and reads the taps behind each chunk, as BF16 bits.

    ``last``: also what the target's head reads of every row. Raises BackendError for what cannot run here.
    """

    def __init__(self, bundle: Bundle, *, last: bool, weights: NativeWeights | None = None) -> None:
        manifest, program = bundle.manifest, pair_programs(bundle.pair).prefill
        self._names = {"taps": program.outputs["taps"]}
        self._norm: RmsNorm | None = None
        if last:
            select = next(op for op in program.ops if isinstance(op, SelectRows))
            self._norm = next(op for op in program.ops if isinstance(op, RmsNorm) and op.inputs == (select.output,))
            self._names["last"] = select.inputs[0]
        weights = weights or BundleWeights(bundle)
        self._widths = {name: program.columns[tensor] for name, tensor in self._names.items()}
        self._weights = weights
        self._backend = NativeBackend(
            bundle.pair,
            weights,
            manifest.precision,
            cubin=bundle.cubin,
            max_context=manifest.max_context,
            prefill_chunk=manifest.prefill_chunk,
            dense=Launches(weights, bundle.cubin, tuple(self._names.values())),
        )

    def rows(self, ids: Sequence[int]) -> dict[str, Bits]:
        """Rows of a sequence by name, [tokens, columns] each."""
        backend, chunk = self._backend, self._backend.shape.prefill_chunk
        backend.reset()
        parts: dict[str, list[Bits]] = {name: [] for name in self._names}
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            backend.prefill(part)
            for name in parts:
                parts[name].append(self._read(name, len(part)))
        found = {name: np.concatenate(rows) for name, rows in parts.items()}
        if self._norm is not None:
            found["last"] = self._normed(self._norm, found["last"])
        return found

    def close(self) -> None:
        """Free the device."""
        self._backend.close()

    def _read(self, name: str, rows: int) -> Bits:
        common = self._backend.loaded.common
        root, column = common.layout.schedules["prefill"].place(self._names[name])
        place = common.layout.places["prefill"][root]
        arena = common.buffers.arena.at(place.offset, 2 * rows * place.stride)
        self._backend.gpu.synchronize()
        whole: Bits = self._backend.gpu.read(arena, (rows, place.stride), np.uint16)
        return whole[:, column : column + self._widths[name]]

    def _normed(self, op: RmsNorm, bits: Bits) -> Bits:
        x, weight = bf16_to_f32(bits), self._weights.vector(op.weight) + float(op.plus_one)
        y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + op.eps) * weight
        words = np.ascontiguousarray(y, np.float32).view(np.uint32)
        return ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
