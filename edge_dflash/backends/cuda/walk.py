"""Drafts that are chosen one after the other, on the device: kernels/walk.cu.

See :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer, Matrix
from edge_dflash.backends.cuda.sample import SamplingBuffers, mask_words
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import MarkovWalk, SelectorWalk, Walk

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Module

UNIT = "walk"
_SLICE, _SPLITS = 8192, 8
_TOP_THREADS, _PROJECT_THREADS, _MIX_WARPS, _WALK_THREADS = 256, 128, 8, 512
_MOST_TOP, _MOST_KEYS, _MOST_WHOLE, _MOST_RANK = 256, 8192, 4096, 1024
_MOST_SHARED = 96 << 10  # bytes of shared memory that blocks of every architecture have


class _Mix(ctypes.Structure):
    """``Mix`` of kernels/walk.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "matrix", "recurrent", "sums", "bias", "control", "tokens")),
        *((name, ctypes.c_void_p) for name in ("state", "mixed")),
        *((name, ctypes.c_int32) for name in ("rank", "rows", "stride", "vocabulary")),
    )


class _Walk(ctypes.Structure):
    """``Walk`` of kernels/walk.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("before", "after", "sums", "mixed", "ids", "values", "logits")),
        *((name, ctypes.c_void_p) for name in ("control", "settings", "masks", "others", "tokens", "scores")),
        *((name, ctypes.c_void_p) for name in ("sure", "sure_before", "sure_bias", "confidence", "counted")),
        *((name, ctypes.c_int32) for name in ("rank", "top", "rows", "stride", "vocabulary", "words", "by_id")),
    )


@dataclass(frozen=True)
class WalkShape:
    """A walk over ``rows`` draft rows of ``columns`` hidden columns."""

    op: Walk
    rows: int
    columns: int
    vocabulary: int

    def __post_init__(self) -> None:
        if not isinstance(self.op, SelectorWalk | MarkovWalk):
            raise BackendError(f"the native backend has no kernel for op {type(self.op).__name__}")
        if self.rank % 8 or self.columns % 8 or self.rank > _MOST_RANK:
            raise BackendError(
                f"a walk has rank {self.rank} over {self.columns} columns; the native kernels take multiples of 8, the "
                f"rank at most {_MOST_RANK}"
            )
        if self.whole and self.vocabulary > _MOST_WHOLE:
            raise BackendError(
                f"a walk chooses among all {self.vocabulary} tokens; the native kernels take at most {_MOST_TOP} of a "
                f"row, or all of a vocabulary of {_MOST_WHOLE}: set dspark_draft_topk in the drafter's config.json"
            )
        if self._fixed_bytes > _MOST_SHARED:
            raise BackendError(
                f"a walk of rank {self.rank} over {self.rows} rows of {self.top} candidates needs {self._fixed_bytes} "
                f"bytes of shared memory; the native kernels have {_MOST_SHARED}"
            )
        if not self.whole and (self.top > _MOST_TOP or self.slices * self.top > _MOST_KEYS):
            most = min(_MOST_TOP, _MOST_KEYS // self.slices)
            raise BackendError(
                f"a walk chooses among {self.top} tokens of a row; the native kernels take at most {most}"
            )

    @property
    def _own(self) -> SelectorWalk | MarkovWalk:
        assert isinstance(self.op, SelectorWalk | MarkovWalk)
        return self.op

    @property
    def rank(self) -> int:
        """Columns of the codebooks."""
        return self._own.rank

    @property
    def top(self) -> int:
        """Candidates of a row."""
        return self.vocabulary if self.whole else min(self._own.top_k or 0, self.vocabulary)

    @property
    def whole(self) -> bool:
        """Whether all tokens are candidates, in the order of their ids."""
        return self._own.top_k is None or (isinstance(self.op, MarkovWalk) and self._own.top_k == self.vocabulary)

    @property
    def slices(self) -> int:
        """Blocks that look for a row's candidates."""
        return -(-self.vocabulary // _SLICE)

    @property
    def outputs(self) -> int:
        """Products of a hidden row that steps need: of the selector's factors, or of a Markov head's gates."""
        if isinstance(self.op, SelectorWalk):
            return self.rank
        return {"vanilla": 0, "gated": 1, "rnn": 3}[self._own.kind] * self.rank  # type: ignore[union-attr]

    @property
    def step_launches(self) -> bool:
        """Whether the vector of a step takes a matrix, and so a launch."""
        return isinstance(self.op, MarkovWalk) and self.op.kind != "vanilla"

    @property
    def staged(self) -> bool:
        """Whether candidates' rows are fetched a step ahead."""
        return self._fixed_bytes + 4 * self.top * self.rank <= _MOST_SHARED

    @property
    def _fixed_bytes(self) -> int:
        factors = 4 * self.rows * self.rank if isinstance(self.op, SelectorWalk) else 0
        return 22 * self.top + 4 * self.rank + factors + (0 if self.whole else 8 * self.rows * self.top)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a walk."""
        return self._fixed_bytes + (4 * self.top * self.rank if self.staged else 0)


@dataclass(frozen=True)
class WalkWeights:
    """Weights of a walk on the device: BF16 matrices as stored, FP32 biases. NULL: the walk has none."""

    before: DevicePointer  # [V, rank]
    after: DevicePointer
    matrix: DevicePointer = NULL  # the selector's projection, or a Markov head's gates
    bias: DevicePointer = NULL
    judge: DevicePointer = NULL
    judge_bias: DevicePointer = NULL

    @classmethod
    def load(
        cls, op: Walk, matrix: Callable[[str], DevicePointer], vector: Callable[[str], Array], memory: Allocator
    ) -> WalkWeights:
        """``matrix`` brings a BF16 matrix to the device, ``vector`` gives float32 values on the host."""

        def values(name: str) -> DevicePointer:
            return memory.put("vectors", vector(name))

        match op:
            case SelectorWalk():
                return cls(matrix(op.predecessor), matrix(op.successor), matrix(op.projection))
            case MarkovWalk():
                mix = (matrix(op.mix[0]), values(op.mix[1])) if op.mix else (NULL, NULL)
                judge = (matrix(op.judge[0]), values(op.judge[1])) if op.judge else (NULL, NULL)
                return cls(matrix(op.predecessor), matrix(op.successor), *mix, *judge)
            case _:
                raise TypeError(f"no kernel for op {type(op).__name__}")


@dataclass(frozen=True)
class WalkBuffers:
    """Device memory of a walk."""

    found: DevicePointer  # uint32 [rows, slices, top]
    arrived: DevicePointer  # uint32 [rows], 0 between launches
    ids: DevicePointer  # int32 [rows, top]: candidates; nothing where all tokens are
    values: DevicePointer  # FP32 [rows, top]: their logits
    sums: DevicePointer  # FP32 [splits, rows, outputs]
    sure: DevicePointer  # FP32 [splits, rows]
    state: DevicePointer  # FP32 [2, rank]
    mixed: DevicePointer  # FP32 [rank]
    scores: DevicePointer  # FP32 [rows, top], of the last walk
    confidence: DevicePointer  # FP32 [rows], of the last walk

    @classmethod
    def take(cls, memory: Allocator, shape: WalkShape) -> WalkBuffers:
        """Take all from ``memory``."""
        found = 0 if shape.whole else shape.rows * shape.top
        sizes = (
            *(found * shape.slices, shape.rows, found, found, _SPLITS * shape.rows * shape.outputs),
            *(_SPLITS * shape.rows, 2 * shape.rank, shape.rank, shape.rows * shape.top, shape.rows),
        )
        return cls(*(memory.take("walk", 4 * max(size, 1)) for size in sizes))


class DeviceWalk:
    """Loaded kernels over one walk's memory. Draft rows are rows 0, 1, ... of the matrices here."""

    def __init__(self, gpu: Gpu, module: Module, shape: WalkShape, weights: WalkWeights, buffers: WalkBuffers) -> None:
        self._gpu, self.shape, self._weights, self.buffers = gpu, shape, weights, buffers
        self._kernels = {name: module.kernel(name) for name in ("walk_top", "walk_project", "walk_mix")}
        self._kernels["walk_rows"] = module.kernel("walk_rows", shared_bytes=shape.shared_bytes)
        gpu.fill(buffers.arrived)

    @property
    def judges(self) -> bool:
        """Whether there is a confidence head."""
        return self._weights.judge != NULL

    def prepare(self, hidden: Matrix, logits: Matrix) -> None:
        """What no step waits for: each row's candidates, and products of the hidden rows."""
        shape, buffers = self.shape, self.buffers
        if not shape.whole:
            found = (buffers.found, buffers.arrived, buffers.ids, buffers.values)
            what = (logits.pointer, logits.stride, shape.vocabulary, shape.top, *found)
            self._launch("walk_top", (shape.slices, shape.rows, 1), _TOP_THREADS, *what)
        op, weights, skipped = shape.op, self._weights, 0
        if isinstance(op, MarkovWalk):
            skipped = {"vanilla": 0, "gated": 0, "rnn": 2 * op.rank}[op.kind]
        if shape.outputs:
            self._project(hidden, weights.matrix, skipped, self._stride, shape.outputs, buffers.sums)
        if self.judges:
            self._project(hidden, weights.judge, 0, shape.columns, 1, buffers.sure)

    def walk(
        self,
        logits: Matrix,
        control: DevicePointer,
        counted: DevicePointer,
        tokens: DevicePointer,
        sampling: SamplingBuffers | None = None,
        others: DevicePointer = NULL,
    ) -> None:
        """tokens [rows] int32 = the walk's, behind ``prepare``: greedy, or sampled by the settings of ``sampling``.

        With ``others`` [rows] int32 rows, position and masks are the settings', too: rows before keep their tokens,
        rows behind are greedy, and where a mask leaves no candidate the token is the row's of ``others``.
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
            *(sampling.masks.address if sampling and steered else None, others.address or None, tokens.address),
            *(
                buffers.scores.address,
                buffers.sure.address if self.judges else None,
                judged,
                weights.judge_bias.address or None,
            ),
            *(buffers.confidence.address, counted.address),
            *(shape.rank, shape.top, shape.rows, logits.stride, shape.vocabulary, mask_words(shape.vocabulary)),
            int(isinstance(op, MarkovWalk)),
        )
        if not shape.step_launches:
            self._walk(walk, 0, shape.rows)
            return
        for row in range(shape.rows):
            self._mix(control, tokens, row)
            self._walk(walk, row, row + 1)

    @property
    def _stride(self) -> int:
        """Columns of the matrix that hidden rows are multiplied with."""
        op = self.shape.op
        before = {"vanilla": 0, "gated": 1, "rnn": 2}[op.kind] if isinstance(op, MarkovWalk) else 0
        return self.shape.columns + before * self.shape.rank

    def _project(
        self, hidden: Matrix, matrix: DevicePointer, skipped: int, stride: int, outputs: int, sums: DevicePointer
    ) -> None:
        shape, part = self.shape, matrix.at(2 * skipped, matrix.nbytes - 2 * skipped)
        what = (hidden.pointer, hidden.stride, shape.rows, shape.columns, part, stride, outputs, sums)
        self._launch("walk_project", (-(-outputs // 8), _SPLITS, -(-shape.rows // 16)), _PROJECT_THREADS, *what)

    def _mix(self, control: DevicePointer, tokens: DevicePointer, row: int) -> None:
        shape, weights, buffers = self.shape, self._weights, self.buffers
        rnn = isinstance(shape.op, MarkovWalk) and shape.op.kind == "rnn"
        own = weights.matrix.address + 2 * (shape.rank if rnn else shape.columns)  # columns of the predecessor
        mix = _Mix(
            *(weights.before.address, own, weights.matrix.address if rnn else None, buffers.sums.address),
            *(weights.bias.address, control.address, tokens.address, buffers.state.address, buffers.mixed.address),
            *(shape.rank, shape.rows, self._stride, shape.vocabulary),
        )
        blocks, shared = (-(-shape.rank // _MIX_WARPS), 1, 1), 8 * shape.rank
        kernel = self._kernels["walk_mix"]
        self._gpu.launch(kernel, blocks, 32 * _MIX_WARPS, (mix, row), shared_bytes=shared, overlap=True)

    def _walk(self, walk: _Walk, first: int, stop: int) -> None:
        arguments, shared = (walk, first, stop, int(self.shape.staged)), self.shape.shared_bytes
        kernel = self._kernels["walk_rows"]
        self._gpu.launch(kernel, (1, 1, 1), _WALK_THREADS, arguments, shared_bytes=shared, overlap=True)

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, *arguments: DevicePointer | int) -> None:
        self._gpu.launch(self._kernels[name], grid, threads, arguments, overlap=True)
