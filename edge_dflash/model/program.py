"""A Program: one forward pass as a list of ops over named tensors, with the weights and states it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from edge_dflash.model.ops import Op

WeightKind = Literal["linear", "embedding", "vector", "conv"]


@dataclass(frozen=True)
class WeightSpec:
    """What a Program expects of a weight. Only ``linear`` weights may be stored as FP8 or NVFP4.

    ``module`` is the part of the network for recipes: "attention", "gated_delta", "gates", "mlp", "lm_head", "fc",
    "embedding", "norm" or "conv".
    """

    shape: tuple[int, ...]
    kind: WeightKind
    module: str


@dataclass(frozen=True)
class KvState:
    """Keys and values of one attention layer, [max_context, Hkv, D] each. Rows past the length are garbage."""

    kv_heads: int
    head_dim: int

    @property
    def values_per_token(self) -> int:
        """Stored numbers per token, K and V together."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class DeltaState:
    """Gated delta state of one layer: S [Hv, Dk, Dv] FP32, K-1 conv rows, and a tape of the rows in flight."""

    value_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int

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
    ``outputs`` maps a role ("logits", "taps", "hidden") to a tensor name. The single input tensor is ``ids``.
    """

    name: str
    ops: tuple[Op, ...]
    weights: Mapping[str, WeightSpec]
    states: Mapping[str, State]
    outputs: Mapping[str, str]
    commits: bool


@dataclass(frozen=True)
class PairPrograms:
    """The three passes of a target and its drafter.

    prefill: ids -> logits of the last row; appends target KV, gated-delta state and drafter context; commits.
    verify: ids (1..B rows) -> logits of every row; same appends, in flight until commit.
    propose: ids [B] = [anchor, mask, ...] -> logits of the B - 1 draft rows; writes only scratch.
    """

    prefill: Program
    verify: Program
    propose: Program

    @property
    def weights(self) -> dict[str, WeightSpec]:
        """All weights of the pair, in the order of first use."""
        return {**self.prefill.weights, **self.verify.weights, **self.propose.weights}

    @property
    def states(self) -> dict[str, State]:
        """All states of the pair."""
        return {**self.prefill.states, **self.verify.states, **self.propose.states}
