"""Rows of one pass of the native backend: where they lie on the device, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.chooser import Chooser
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.decode.sampling import Packed, Sampling
from edge_dflash.weights.formats import bf16_to_f32


class _Owner(Protocol):
    """What rows ask of their backend."""

    @property
    def chooser(self) -> Chooser: ...

    @property
    def loaded(self) -> Loaded: ...

    gpu: Gpu
    passes: int

    def enter(self, number: int) -> None: ...


class NativeRows:
    """Logits of one pass, on the device until they are asked for; the next pass replaces them.

    Everything raises BackendError after a later pass.
    """

    def __init__(self, backend: _Owner, count: int, first: int, ids: npt.NDArray[np.int32]) -> None:
        """``ids`` [all rows]: largest logit of each row, there when the pass has run; ours begin at ``first``."""
        self._backend, self._count, self._first, self._ids = backend, count, first, ids
        self._pass = backend.passes

    def __len__(self) -> int:
        return self._count

    def argmax(self) -> list[int]:
        """Id of the largest logit of each row, the lowest on a tie."""
        self._backend.enter(self._pass)
        self._backend.gpu.synchronize()
        found: list[int] = self._ids[self._first : self._first + self._count].tolist()
        return found

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits [rows, V] float32."""
        self._backend.enter(self._pass)
        self._backend.gpu.synchronize()
        logits, columns = self._backend.loaded.buffers.logits, self._backend.loaded.plan.vocabulary
        part = logits.pointer.at(2 * self._first * logits.stride, 2 * self._count * logits.stride)
        bits = self._backend.gpu.read(part, (self._count, logits.stride), np.uint16)
        return bf16_to_f32(bits[:, :columns])

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> list[int]:
        """Choices of rows first, first + 1, ..., one for each mask; row first + i chooses for ``position + i``.

        Raises ValueError when there are not as many rows.
        """
        if not 0 <= first <= first + len(masks) <= self._count:
            raise ValueError(f"{len(masks)} choices from row {first} on were asked of {self._count} rows")
        self._backend.enter(self._pass)
        return self._backend.chooser.choose(sampling, position, masks, self._first + first)
