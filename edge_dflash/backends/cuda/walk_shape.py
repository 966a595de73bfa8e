"""Sizes, weights and device memory of a walk: kernels/walk.cu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import MarkovWalk, SelectorWalk, Walk

SPLITS = 8  # of a hidden row's columns
_SLICE = 8192
_MOST_TOP, _MOST_KEYS, _MOST_WHOLE, _MOST_RANK = 256, 8192, 4096, 1024
_MOST_SHARED = 96 << 10  # bytes of shared memory that blocks of every architecture have


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
        found = 0 if shape.whole else shape.rows * shape.top
        sizes = (
            *(found * shape.slices, shape.rows, found, found, SPLITS * shape.rows * shape.outputs),
            *(SPLITS * shape.rows, 2 * shape.rank, shape.rank, shape.rows * shape.top, shape.rows),
        )
        return cls(*(memory.take("walk", 4 * slots * max(size, 1)) for size in sizes))
