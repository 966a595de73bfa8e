"""A Program: one forward pass as a list of ops over named tensors, with the weights and states it needs; its segments.

A Program is cut at its state ops into segments of dense ops, each followed by the state ops that wait for it. An op's
level is the number of state ops on the longest path to it. Dense ops of one level form a segment; they depend on
nothing but earlier levels and each other, so a segment may become one TensorRT engine or any sequence of kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from edge_dflash.model.ops import DenseOp, Op, StateOp, Walk
from edge_dflash.model.specs import GatedDeltaSpec

WeightKind = Literal["linear", "embedding", "vector", "conv", "walk"]


@dataclass(frozen=True)
class WeightSpec:
    """What a Program expects of a weight. Only ``linear`` weights may be stored as FP8 or NVFP4.

    ``walk``: a matrix of a walk, [V, rank] of which rows are gathered, or a small one that is multiplied with.
    ``module`` is the part of the network for recipes: "attention", "gated_delta", "gates", "mlp", "experts", "router",
    "lm_head", "fc", "embedding", "norm", "conv", "walk" or "vision".
    """

    shape: tuple[int, ...]
    kind: WeightKind
    module: str


@dataclass(frozen=True)
class KvState:
    """Keys and values of one attention layer, [max_context, Hkv, D] each. Rows past the length are garbage."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class DeltaState(GatedDeltaSpec):
    """Gated delta state of one layer: S [Hv, Dk, Dv] FP32, K-1 conv rows, and a tape of the rows in flight."""

    @property
    def state_bytes(self) -> int:
        """Bytes of S (FP32)."""
        return 4 * self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_bytes(self) -> int:
        """Bytes of the conv history (BF16)."""
        return 2 * self.conv_channels * (self.conv_kernel - 1)

    @property
    def tape_bytes_per_row(self) -> int:
        """Bytes of one tape row: the conv input in BF16, decay and beta of each value head in FP32."""
        return 2 * self.conv_channels + 8 * self.value_heads


State = KvState | DeltaState


@dataclass(frozen=True)
class Program:
    """One forward pass.

    ``commits``: the pass commits its own rows (prefill); otherwise its rows stay in flight until ``commit(k)``.
    ``outputs`` maps a role ("logits", "taps", "hidden") to a tensor name. Behind
    the logits of a propose pass there may be a walk; its inputs are outputs "draft_hidden" and "logits".
    """

    name: str
    ops: tuple[Op, ...]
    weights: Mapping[str, WeightSpec]
    states: Mapping[str, State]
    columns: Mapping[str, int]  # of every tensor, inputs included; 0: an op run for its effect
    outputs: Mapping[str, str]
    commits: bool
    inputs: tuple[str, ...] = ("ids",)  # tensors that no op makes

    @property
    def walk(self) -> Walk | None:
        """What chooses the drafts; None: each row's logits alone do."""
        return next((op for op in self.ops if isinstance(op, Walk)), None)

    @cached_property
    def freed(self) -> tuple[tuple[str, ...], ...]:
        """After each op, the tensors that nothing reads any more and that are no results."""
        last: dict[str, int] = {}
        for index, op in enumerate(self.ops):
            last |= dict.fromkeys((*op.inputs, op.output), index)
        freed: list[list[str]] = [[] for _ in self.ops]
        for name in last.keys() - set(self.outputs.values()):
            freed[last[name]].append(name)
        return tuple(map(tuple, freed))

    @cached_property
    def read_whole(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the weights that are no tables of which rows are gathered, by model: "target" and "drafter"."""
        found: dict[str, list[str]] = {}
        for name, weight in self.weights.items():
            if weight.kind not in ("embedding", "walk"):
                found.setdefault(name.partition(".")[0], []).append(name)
        return {model: tuple(names) for model, names in found.items()}


@dataclass(frozen=True)
class PairPrograms:
    """The three passes of a target and its drafter, and that of the target's vision tower.

    prefill: ids -> logits of the last row; appends target KV, gated-delta state and drafter context; commits.
    verify: ids (1..K + 1 rows) -> logits of every row; same appends, in flight until commit.
    propose: ids [B] = [anchor, mask, ...] -> logits of the K draft rows; writes only scratch.
    """

    prefill: Program
    verify: Program
    propose: Program
    see: Program | None = None  # the vision tower: patches of a picture -> rows of the language model

    @cached_property
    def weights(self) -> Mapping[str, WeightSpec]:
        """All weights of the pair, in the order of first use."""
        tower = self.see.weights if self.see else {}
        return {**self.prefill.weights, **self.verify.weights, **self.propose.weights, **tower}

    @cached_property
    def states(self) -> Mapping[str, State]:
        """All states of the pair."""
        return {**self.prefill.states, **self.verify.states, **self.propose.states}


@dataclass(frozen=True)
class Segment:
    """Dense ops of one level, then the state ops of that level, each in the Program's order."""

    dense: tuple[DenseOp, ...]
    state: tuple[StateOp, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in an order in which they may run."""
        return (*self.dense, *self.state)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that the dense ops read and do not make, in order of first use."""
        made = {op.output for op in self.dense}
        read = dict.fromkeys(name for op in self.dense for name in op.inputs)
        return tuple(name for name in read if name not in made)


def segments(program: Program) -> tuple[Segment, ...]:
    """Segments of a pass in the order in which they run. Every op of the Program is in exactly one."""
    after = dict.fromkeys(program.inputs, 0)  # level at which a tensor is there
    dense: dict[int, list[DenseOp]] = {}
    state: dict[int, list[StateOp]] = {}
    for op in program.ops:
        level = max(after[name] for name in op.inputs)
        if isinstance(op, StateOp):
            state.setdefault(level, []).append(op)
            after[op.output] = level + 1
        elif isinstance(op, DenseOp):
            dense.setdefault(level, []).append(op)
            after[op.output] = level
        else:
            raise TypeError(f"{program.name}: {type(op).__name__} is neither a dense nor a state op")
    levels = sorted(dense.keys() | state.keys())
    return tuple(Segment(tuple(dense.get(level, ())), tuple(state.get(level, ()))) for level in levels)


def outputs(program: Program) -> tuple[tuple[str, ...], ...]:
    """For each of the :func:`segments`, tensors of its dense ops that something else reads or that are results."""
    parts = segments(program)
    results = set(program.outputs.values())
    wanted = []
    for index, segment in enumerate(parts):
        outside = {name for other in (*parts[:index], *parts[index + 1 :]) for op in other.dense for name in op.inputs}
        outside |= {name for other in parts for op in other.state for name in op.inputs} | results
        wanted.append(tuple(op.output for op in segment.dense if op.output in outside))
    return tuple(wanted)
