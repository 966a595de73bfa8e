"""Drafts that are chosen one after the other, on the device: kernels/walk.cu.

See :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.memory import NULL, DevicePointer, Matrix
from edge_dflash.backends.cuda.sample import SamplingBuffers, mask_words
from edge_dflash.backends.cuda.walk_shape import SPLITS, WalkBuffers, WalkShape, WalkWeights
from edge_dflash.model.ops import MarkovWalk, SelectorWalk

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Module

UNIT = "walk"
_TOP_THREADS, _PROJECT_THREADS, _MIX_WARPS, _WALK_THREADS = 256, 128, 8, 512


class _Mix(ctypes.Structure):
    """``Mix`` of kernels/walk.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "matrix", "recurrent", "sums", "bias", "control", "tokens")),
        *((name, ctypes.c_void_p) for name in ("state", "mixed")),
        *((name, ctypes.c_int32) for name in ("rank", "rows", "stride", "vocabulary", "apart")),
    )


class _Walk(ctypes.Structure):
    """``Walk`` of kernels/walk.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "after", "sums", "mixed", "ids", "values", "logits")),
        *((name, ctypes.c_void_p) for name in ("control", "settings", "masks", "others", "tokens", "scores")),
        *((name, ctypes.c_void_p) for name in ("sure", "sure_before", "sure_bias", "confidence", "counted")),
        *((name, ctypes.c_int32) for name in ("rank", "top", "rows", "stride", "vocabulary", "words", "by_id")),
        ("apart", ctypes.c_int32),
    )


class DeviceWalk:
    """Loaded kernels over the memory of walks. A slot's draft rows are rows 0, 1, ... of the matrices here."""

    def __init__(
        self,
        gpu: Gpu,
        module: Module,
        shape: WalkShape,
        weights: WalkWeights,
        buffers: WalkBuffers,
        apart: int | None = None,
    ) -> None:
        """``apart``: from a slot's first row to the next one's; None: their drafts lie close."""
        self._gpu, self.shape, self._weights, self.buffers = gpu, shape, weights, buffers
        self.apart = shape.rows if apart is None else apart
        self._kernels = {name: module.kernel(name) for name in ("walk_top", "walk_project", "walk_mix")}
        self._kernels["walk_rows"] = module.kernel("walk_rows", shared_bytes=shape.shared_bytes)
        gpu.fill(buffers.arrived)

    @property
    def judges(self) -> bool:
        """Whether there is a confidence head."""
        return self._weights.judge != NULL

    def prepare(self, hidden: Matrix, logits: Matrix, slots: int = 1) -> None:
        """What no step waits for: each row's candidates, and products of the hidden rows."""
        shape, buffers = self.shape, self.buffers
        if not shape.whole:
            found = (buffers.found, buffers.arrived, buffers.ids, buffers.values)
            what = (logits.pointer, logits.stride, shape.vocabulary, shape.top, *found, shape.rows, self.apart)
            self._launch("walk_top", (shape.slices, slots * shape.rows, 1), _TOP_THREADS, *what)
        op, weights, skipped = shape.op, self._weights, 0
        if isinstance(op, MarkovWalk):
            skipped = {"vanilla": 0, "gated": 0, "rnn": 2 * op.rank}[op.kind]
        if shape.outputs:
            self._project(hidden, weights.matrix, skipped, self._stride, shape.outputs, buffers.sums, slots)
        if self.judges:
            self._project(hidden, weights.judge, 0, shape.columns, 1, buffers.sure, slots)

    def walk(
        self,
        logits: Matrix,
        control: DevicePointer,
        counted: DevicePointer,
        tokens: DevicePointer,
        sampling: SamplingBuffers | None = None,
        others: DevicePointer = NULL,
        *,
        slot: int = 0,
        slots: int = 1,
    ) -> None:
        """tokens [rows] int32 = the walk's, behind ``prepare``: greedy, or sampled by the settings of ``sampling``.

        With ``others`` [rows] int32 rows, position and masks are the settings', too: rows before keep their tokens,
        rows behind are greedy, and where a mask leaves no candidate the token is the row's of ``others``; of one slot.
        The walks are those of ``slots`` slots from ``slot`` on; logits, control words, counts and tokens are slot 0's.
        """
        shape, buffers, weights, op = self.shape, self.buffers, self._weights, self.shape.op
        steered = others != NULL
        judged = (
            weights.judge.address + 2 * shape.columns
            if isinstance(op, MarkovWalk) and op.confidence == "markov"
            else None
        )
        walk = _Walk(
            *(weights.before.address, weights.after.address),
            *(buffers.sums.address if isinstance(op, SelectorWalk) else None,),
            *(buffers.mixed.address if shape.step_launches else None,),
            *(None if shape.whole else buffers.ids.address, buffers.values.address, logits.pointer.address),
            *(control.address, sampling.settings.address if sampling else None),
            *(sampling.of_slot(slot)[1].address if sampling and steered else None, others.address or None),
            tokens.address,
            *(
                buffers.scores.address,
                buffers.sure.address if self.judges else None,
                judged,
                weights.judge_bias.address or None,
            ),
            *(buffers.confidence.address, counted.address),
            *(shape.rank, shape.top, shape.rows, logits.stride, shape.vocabulary, mask_words(shape.vocabulary)),
            *(int(isinstance(op, MarkovWalk)), self.apart),
        )
        if not shape.step_launches:
            self._walk(walk, 0, shape.rows, slot, slots)
            return
        for row in range(shape.rows):
            self._mix(control, tokens, row, slot, slots)
            self._walk(walk, row, row + 1, slot, slots)

    @property
    def _stride(self) -> int:
        """Columns of the matrix that hidden rows are multiplied with."""
        op = self.shape.op
        before = {"vanilla": 0, "gated": 1, "rnn": 2}[op.kind] if isinstance(op, MarkovWalk) else 0
        return self.shape.columns + before * self.shape.rank

    def _project(
        self,
        hidden: Matrix,
        matrix: DevicePointer,
        skipped: int,
        stride: int,
        outputs: int,
        sums: DevicePointer,
        slots: int,
    ) -> None:
        shape, part = self.shape, matrix.at(2 * skipped, matrix.nbytes - 2 * skipped)
        what = (hidden.pointer, hidden.stride, shape.rows, shape.columns, part, stride, outputs, sums, self.apart)
        grid = (-(-outputs // 8), SPLITS, slots * -(-shape.rows // 16))
        self._launch("walk_project", grid, _PROJECT_THREADS, *what)

    def _mix(self, control: DevicePointer, tokens: DevicePointer, row: int, slot: int, slots: int) -> None:
        shape, weights, buffers = self.shape, self._weights, self.buffers
        rnn = isinstance(shape.op, MarkovWalk) and shape.op.kind == "rnn"
        own = weights.matrix.address + 2 * (shape.rank if rnn else shape.columns)  # columns of the predecessor
        mix = _Mix(
            *(weights.before.address, own, weights.matrix.address if rnn else None, buffers.sums.address),
            *(weights.bias.address, control.address, tokens.address, buffers.state.address, buffers.mixed.address),
            *(shape.rank, shape.rows, self._stride, shape.vocabulary, self.apart),
        )
        blocks, shared = (-(-shape.rank // _MIX_WARPS), slots, 1), 8 * shape.rank
        kernel = self._kernels["walk_mix"]
        self._gpu.launch(kernel, blocks, 32 * _MIX_WARPS, (mix, row, slot), shared_bytes=shared, overlap=True)

    def _walk(self, walk: _Walk, first: int, stop: int, slot: int, slots: int) -> None:
        arguments, shared = (walk, first, stop, int(self.shape.staged), slot), self.shape.shared_bytes
        kernel = self._kernels["walk_rows"]
        self._gpu.launch(kernel, (slots, 1, 1), _WALK_THREADS, arguments, shared_bytes=shared, overlap=True)

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: DevicePointer | int) -> None:
        self._gpu.launch(self._kernels[name], grid, threads, arguments, overlap=True)
