"""The rows that a pass leaves on the device: of the head alone, and of drafts that a walk chooses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.sample import Chooser
from edge_dflash.backends.cuda.kernels.walk import DeviceWalk
from edge_dflash.backends.cuda.loading import Buffers
from edge_dflash.backends.cuda.memory import DevicePointer
from edge_dflash.decode.sampling import GREEDY, Packed, Sampling
from edge_dflash.weights.formats import bf16_to_f32

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.backend import NativeBackend


class NativeRows:
    """Logits of one pass, on the device until they are asked for; the next pass replaces them.

    Everything raises BackendError after a later pass.
    """

    def __init__(
        self, backend: NativeBackend, count: int, first: int, ids: npt.NDArray[np.int32], slot: int = 0, block: int = 0
    ) -> None:
        """``ids`` [all rows]: largest logit of each row, there when the pass has run; ours begin at ``first``.

        Of a pass of slots with ``block`` rows each, ``first`` is a row of slot ``slot``.
        """
        self._backend, self._count, self._ids = backend, count, ids
        self._slot, self._own, self._first = slot, first, slot * block + first  # first: of the slot's, of all rows
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
        common = self._backend.loaded.common
        logits = common.buffers.logits
        part = logits.pointer.at(2 * self._first * logits.stride, 2 * self._count * logits.stride)
        bits = self._backend.gpu.read(part, (self._count, logits.stride), np.uint16)
        return bf16_to_f32(bits[:, : common.layout.vocabulary])

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> list[int]:
        """Choices of rows first, first + 1, ..., one for each mask; row first + i chooses for ``position + i``.

        Raises ValueError when there are not as many rows.
        """
        self._check(len(masks), first)
        return self._backend.chooser.choose(sampling, position, masks, self._own + first, self._slot)

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probability of a token by each of the first rows: natural, to 1e-5, NaN where a logit is inf or NaN.

        Raises ValueError for more tokens than rows.
        """
        self._check(len(tokens), 0)
        return self._backend.chooser.logprobs(tokens, self._first)

    def _check(self, count: int, first: int) -> None:
        if not 0 <= first <= first + count <= self._count:
            raise ValueError(f"{count} choices from row {first} on were asked of {self._count} rows")
        self._backend.enter(self._pass)


class HostWalk:
    """For each slot the graph of walks that the host asks for, behind a propose pass."""

    def __init__(self, gpu: Gpu, walker: DeviceWalk, chooser: Chooser, buffers: Buffers, first: int) -> None:
        """``first``: row of the first draft of a slot in logits and drafts."""
        self._gpu, self._chooser = gpu, chooser
        self.walker, self._buffers, self._first = walker, buffers, first
        self._found = gpu.pinned((buffers.sampling.slots, walker.shape.rows), np.int32)
        self._graphs = [gpu.capture(partial(self._walk, slot)) for slot in range(buffers.sampling.slots)]

    def choose(
        self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int, slot: int = 0
    ) -> list[int]:
        """Walk on from a slot's row ``first``: tokens of as many rows as there are masks; waits for them."""
        self._chooser.write(sampling, position, masks, first, slot)
        self._graphs[slot].launch()
        self._gpu.synchronize()
        found: list[int] = self._found[slot, first : first + len(masks)].tolist()
        return found

    def _walk(self, slot: int) -> None:
        buffers, chooser, walker, rows = self._buffers, self._chooser, self.walker, self.walker.shape.rows
        logits, skipped, chosen = buffers.logits, slot * walker.apart + self._first, chooser.chosen(slot)
        own = logits.behind(skipped)
        # for rows of whose candidates a mask leaves none
        chooser.enqueue(chosen, own, chooser.alone(slot, own) if slot else None)
        tokens, sampling = buffers.drafts.behind(4 * self._first), buffers.sampling
        walker.walk(logits.behind(self._first), buffers.control, buffers.counted, tokens, sampling, chosen, slot=slot)
        self._gpu.read_into(buffers.drafts.at(4 * skipped, 4 * rows), self._found[slot])


class WalkedRows(NativeRows):
    """Draft rows behind a walk: the last one stands until another replaces it, whole or from some row on.

    See :class:`edge_dflash.decode.walk.WalkRows`.
    """

    def __init__(
        self, backend: NativeBackend, walk: HostWalk, first: int, ids: npt.NDArray[np.int32], slot: int = 0
    ) -> None:
        super().__init__(backend, walk.walker.shape.rows, first, ids, slot, walk.walker.apart)
        self._walk, self._greedy = walk, True  # whether the walk that stands is the pass's own

    def argmax(self) -> list[int]:
        """Tokens of the greedy walk."""
        if not self._greedy:
            self.choose(GREEDY, 0, [None] * self._count)
            self._greedy = True
        return super().argmax()

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> list[int]:
        """Walk on from row ``first``, behind the tokens that the last walk chose before it; greedily behind the masks.

        Where a mask leaves none of a row's candidates, the choice is among all tokens by the row's logits.
        """
        self._check(len(masks), first)
        self._greedy = False
        return self._walk.choose(sampling, position, masks, first, self._slot)

    def logits(self) -> npt.NDArray[np.float32]:
        """Scores along the walk [K, V]; -inf for tokens that are no candidates."""
        shape, buffers = self._walk.walker.shape, self._walk.walker.buffers
        scores = self._read(buffers.scores, shape.top)
        if shape.whole:
            return scores
        rows = np.full((self._count, shape.vocabulary), -np.inf, np.float32)
        np.put_along_axis(rows, self._read(buffers.ids, shape.top).view(np.int32), scores, axis=1)
        return rows

    def confidence(self) -> list[float]:
        """How sure the drafter is of each row, from 0 to 1; empty where it has no confidence head."""
        if not self._walk.walker.judges:
            return []
        found: list[float] = self._read(self._walk.walker.buffers.confidence, 1)[:, 0].tolist()
        return found

    def _read(self, pointer: DevicePointer, columns: int) -> npt.NDArray[np.float32]:
        self._backend.enter(self._pass)
        self._backend.gpu.synchronize()
        each = 4 * self._count * columns
        return self._backend.gpu.read(pointer.at(self._slot * each, each), (self._count, columns), np.float32)
