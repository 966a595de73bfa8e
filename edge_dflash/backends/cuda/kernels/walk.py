"""Drafts that are chosen one after the other, on the device: sizes, weights, memory and launches of kernels/walk.cu.

See :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from edge_dflash.backends.cuda.kernels.sample import SamplingBuffers, mask_words
from edge_dflash.backends.cuda.kernels.source import Signature, Struct, structure
from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer, Matrix
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import MarkovWalk, SelectorWalk, Walk

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Module

UNIT = "walk"
SPLITS = 8  # of a hidden row's columns
_SLICE = 8192
_MOST_TOP, _MOST_KEYS, _MOST_WHOLE, _MOST_RANK = 256, 8192, 4096, 1024
_MOST_SHARED = 96 << 10  # bytes of shared memory that blocks of every architecture have
_TOP_THREADS, _PROJECT_THREADS, _MIX_WARPS, _WALK_THREADS = 256, 128, 8, 512
_TOP, _PROJECT, _MIX, _WALK = (Signature("walk.cu", f"walk_{name}") for name in ("top", "project", "mix", "rows"))
_Mix, _Walk = structure("walk.cu", "Mix"), structure("walk.cu", "Walk")


@dataclass(frozen=True)
class WalkShape:
    """A walk over ``rows`` draft rows of ``columns`` hidden columns, in each slot."""

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
    def kind(self) -> Literal["selector", "vanilla", "gated", "rnn"]:
        """How a step's vector is made: the selector's factors, or a Markov head of a kind."""
        return self.op.kind if isinstance(self.op, MarkovWalk) else "selector"

    @property
    def outputs(self) -> int:
        """Products of a hidden row that steps need: of the selector's factors, or of a Markov head's gates."""
        return {"selector": 1, "vanilla": 0, "gated": 1, "rnn": 3}[self.kind] * self.rank

    @property
    def stride(self) -> int:
        """Columns of the matrix that hidden rows are multiplied with: before or after them those of the vectors."""
        return self.columns + {"selector": 0, "vanilla": 0, "gated": 1, "rnn": 2}[self.kind] * self.rank

    @property
    def step_launches(self) -> bool:
        """Whether the vector of a step takes a matrix, and so a launch."""
        return self.kind in ("gated", "rnn")

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
    """Device memory of walks: what of slot 0 stands here, and behind it that of the others."""

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
    def take(cls, memory: Allocator, shape: WalkShape, slots: int = 1) -> WalkBuffers:
        """Take all from ``memory``."""
        rows, found = shape.rows, 0 if shape.whole else shape.rows * shape.top
        sums = SPLITS * rows * shape.outputs, SPLITS * rows
        sizes = (found * shape.slices, rows, found, found, *sums, 2 * shape.rank, shape.rank, rows * shape.top, rows)
        return cls(*(memory.take("walk", 4 * slots * max(size, 1)) for size in sizes))


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
        self._top, self._project, self._mix = (module.kernel(f"walk_{name}") for name in ("top", "project", "mix"))
        self._rows = module.kernel("walk_rows", shared_bytes=shape.shared_bytes)
        gpu.fill(buffers.arrived)

    @property
    def judges(self) -> bool:
        """Whether there is a confidence head."""
        return self._weights.judge != NULL

    def prepare(self, hidden: Matrix, logits: Matrix, slots: int = 1) -> None:
        """What no step waits for: each row's candidates, and products of the hidden rows."""
        shape, weights, buffers = self.shape, self._weights, self.buffers
        if not shape.whole:
            given = {"logits": logits, "stride": logits.stride, "columns": shape.vocabulary, "apart": self.apart}
            grid = (shape.slices, slots * shape.rows, 1)
            self._gpu.launch(self._top, grid, _TOP_THREADS, _TOP(buffers, shape, **given), overlap=True)
        if shape.outputs:
            skipped = 2 * shape.rank if shape.kind == "rnn" else 0
            matrix = weights.matrix.at(2 * skipped, weights.matrix.nbytes - 2 * skipped)
            self._multiply(hidden, matrix, shape.stride, shape.outputs, buffers.sums, slots)
        if self.judges:
            self._multiply(hidden, weights.judge, shape.columns, 1, buffers.sure, slots)

    def _multiply(
        self, x: Matrix, matrix: DevicePointer, stride: int, outputs: int, sums: DevicePointer, slots: int
    ) -> None:
        given: dict[str, Any] = {"x": x, "matrix": matrix, "matrix_stride": stride, "outputs": outputs, "sums": sums}
        grid = (-(-outputs // 8), SPLITS, slots * -(-self.shape.rows // 16))
        arguments = _PROJECT(self.shape, **given, apart=self.apart)
        self._gpu.launch(self._project, grid, _PROJECT_THREADS, arguments, overlap=True)

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
        by_predecessor = isinstance(op, MarkovWalk) and op.confidence == "markov"
        given = {"control": control, "tokens": tokens, "apart": self.apart}
        walk = _Walk.of(
            weights,
            buffers,
            shape,
            **given,
            sums=buffers.sums if shape.kind == "selector" else NULL,
            mixed=buffers.mixed if shape.step_launches else NULL,
            ids=NULL if shape.whole else buffers.ids,
            logits=logits,
            settings=sampling.settings if sampling else NULL,
            masks=sampling.of_slot(slot)[1] if sampling and others != NULL else NULL,
            others=others,
            sure=buffers.sure if self.judges else NULL,
            sure_before=DevicePointer(weights.judge.address + 2 * shape.columns, 0) if by_predecessor else NULL,
            sure_bias=weights.judge_bias,
            counted=counted,
            stride=logits.stride,
            words=mask_words(shape.vocabulary),
            by_id=isinstance(op, MarkovWalk),
        )
        if not shape.step_launches:
            self._step(walk, 0, shape.rows, slot, slots)
            return
        rnn = shape.kind == "rnn"
        own = 2 * (shape.rank if rnn else shape.columns)  # columns of the predecessor
        mix = _Mix.of(
            weights,
            buffers,
            shape,
            **given,
            matrix=DevicePointer(weights.matrix.address + own, 0),
            recurrent=weights.matrix if rnn else NULL,
        )
        blocks = (-(-shape.rank // _MIX_WARPS), slots, 1)
        for row in range(shape.rows):
            arguments, shared = _MIX(m=mix, row=row, slot=slot), 8 * shape.rank
            self._gpu.launch(self._mix, blocks, 32 * _MIX_WARPS, arguments, shared_bytes=shared, overlap=True)
            self._step(walk, row, row + 1, slot, slots)

    def _step(self, walk: Struct, first: int, stop: int, slot: int, slots: int) -> None:
        arguments = _WALK(self.shape, all=walk, first=first, stop=stop, slot=slot)
        shared = self.shape.shared_bytes
        self._gpu.launch(self._rows, (slots, 1, 1), _WALK_THREADS, arguments, shared_bytes=shared, overlap=True)
