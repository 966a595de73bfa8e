"""The op set: what a backend has to be able to do, and nothing about how.

Every tensor is ``[rows, columns]``; ``rows`` (tokens in this pass) is the only free dimension. An op names its input
tensors, its output tensor, its weights and, for state ops, the state it touches. Row r of a pass is the token at
absolute position ``length + r``, where ``length`` is the number of committed rows, kept by the backend.

Dense ops are pure and row-wise, but for :class:`GroupedConv` and the walks, which only propose passes have. State ops
read and write memory that outlives the pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edge_dflash.model.specs import Confidence, MarkovKind, RopeSpec


@dataclass(frozen=True, kw_only=True)
class Op:
    """Base of all ops."""

    inputs: tuple[str, ...]
    output: str

    @property
    def weights(self) -> tuple[str, ...]:
        """Canonical names of the weights this op reads."""
        return ()

    def rows(self, rows: int) -> int:
        """Rows of the output, by rows of the first input."""
        return rows


@dataclass(frozen=True, kw_only=True)
class DenseOp(Op):
    """Pure: reads no memory. Output row r depends on input row r alone, if the op does not say otherwise."""


@dataclass(frozen=True, kw_only=True)
class Elementwise(DenseOp):
    """Inputs and output have the same columns, and each value depends on the inputs' values at its place alone."""


@dataclass(frozen=True, kw_only=True)
class StateOp(Op):
    """Reads or writes memory that outlives the pass."""

    state: str


@dataclass(frozen=True, kw_only=True)
class Embed(DenseOp):
    """ids [rows] -> rows of ``weight`` [V, H]."""

    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class Linear(DenseOp):
    """y = x W^T; ``weight`` [N, K] is BF16, FP8 or NVFP4. FP32 accumulation, one rounding of the output.

    The output head is no exception: logits are BF16 when activations are, so ties occur and the lowest id wins.
    """

    weight: str

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class RmsNorm(DenseOp):
    """y = w' x / sqrt(mean(x^2) + eps), in FP32 with one rounding; w' = w, or 1 + w when ``plus_one``."""

    weight: str
    eps: float
    plus_one: bool

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.weight,)


@dataclass(frozen=True, kw_only=True)
class Add(Elementwise):
    """y = a + b (residual)."""


@dataclass(frozen=True, kw_only=True)
class SwiGlu(Elementwise):
    """y = silu(gate) * up; inputs (gate, up)."""


@dataclass(frozen=True, kw_only=True)
class Concat(DenseOp):
    """Concatenation along columns, in the order of ``inputs`` (taps)."""


@dataclass(frozen=True, kw_only=True)
class SelectRows(DenseOp):
    """``last``: the last valid row only (prefill logits). ``drafts``: every row but row 0 (invariant I4)."""

    which: Literal["last", "drafts"]

    def rows(self, rows: int) -> int:
        """See :class:`Op`."""
        return 1 if self.which == "last" else rows - 1


@dataclass(frozen=True, kw_only=True)
class KvAppend(StateOp):
    """Inputs (k, v) [rows, Hkv*D]: k-norm, RoPE at the rows' own positions, store K and V in ``state``.

    The output is an empty marker tensor: the op is run for its effect.
    """

    k_norm: str
    eps: float
    plus_one: bool
    rope: RopeSpec
    kv_heads: int
    head_dim: int

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.k_norm,)


@dataclass(frozen=True, kw_only=True)
class Attend(StateOp):
    """Inputs (q, k, v): QK-norm, RoPE, append K/V to ``state``, attention over all stored rows, output gate.

    q is [rows, Hq*D], or [rows, Hq*2*D] with query and gate interleaved per head when ``gated``. The row at position
    p sees key position j iff j is committed or in the block, and (``bidirectional`` or j <= p), and, with a
    ``window`` S, p - S < j and (causal or j < p + S). Output [rows, Hq*D]. Scale 1/sqrt(D), softmax in FP32. K and V
    are read back as stored, so a row sees what a later pass will see (invariant I5).
    """

    q_norm: str
    k_norm: str
    eps: float
    plus_one: bool
    rope: RopeSpec
    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    bidirectional: bool
    window: int | None

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.q_norm, self.k_norm)


@dataclass(frozen=True, kw_only=True)
class GatedDelta(StateOp):
    """Inputs (qkv, z, a, b): causal conv + SiLU, L2 norm, gated delta rule, gated RMS norm (plain weight).

    First replays the ``pending`` rows of the tape into S, then runs its own rows without writing S (a pass that
    commits writes S after its last row instead). Output [rows, Hv*Dv].
    """

    conv: str  # [C, 1, K]
    a_log: str  # [Hv]
    dt_bias: str  # [Hv]
    norm: str  # [Dv]
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.conv, self.a_log, self.dt_bias, self.norm)


@dataclass(frozen=True, kw_only=True)
class Remap(DenseOp):
    """Columns of a draft vocabulary at their places in the target's: y[r, ids[j]] = x[r, j], UNDRAFTED elsewhere.

    ``weight`` holds the ids, each once, as float32.
    """

    weight: str
    vocab: int  # columns of y

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.weight,)


UNDRAFTED = -1e30  # logit of a token that the drafter cannot draft; above that of one that a grammar forbids


@dataclass(frozen=True, kw_only=True)
class GroupedConv(DenseOp):
    """Inputs (u [rows, H], c [rows, 2 * taps * H / group_size]): causal convolution over the rows of a block.

    With b = ``base`` [2, taps, H] and c seen as d [rows, 2, taps, groups], both taken at ``side`` (0 before a sublayer,
    1 behind it): y[r, ch] = sum over t of (b[t, ch] + d[r, t, ch // group_size]) u[r - t, ch]. Terms with r < t are
    zero: the anchor, row 0 of the block, has no row before it. Summed from t = 0 on, one rounding.
    """

    base: str
    side: Literal[0, 1]
    taps: int
    group_size: int

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.base,)


@dataclass(frozen=True, kw_only=True)
class Walk(DenseOp):
    """Inputs (hidden [K, H], logits [K, V]) of the draft rows: choose drafts one after the other.

    The last op of a propose pass. Its output is an empty marker: tokens are chosen when it is known how, greedily or
    sampled. Row l's predecessor is the token chosen in row l - 1, that of row 0 the anchor. All maths in FP32.
    """

    rank: int
    top_k: int | None  # tokens of a row that are chosen among; None: all
    predecessor: str  # [V, rank], of which a row reads that of its predecessor
    successor: str  # [V, rank], of which a row reads those of the tokens that it chooses among


@dataclass(frozen=True, kw_only=True)
class SelectorWalk(Walk):
    """DFlash2: score(c | p) = logit[c] + sum over r of A[p, r] g[r] B[c, r] over the row's ``top_k`` largest logits.

    g = P h with P = ``projection`` [rank, H]; A = ``predecessor`` and B = ``successor`` [V, rank]; p is the
    predecessor. Candidates stand by descending logit, the lower id first on a tie. Greedy takes the largest score, the
    earlier candidate on a tie.
    """

    top_k: int
    projection: str

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.projection, self.predecessor, self.successor)


@dataclass(frozen=True, kw_only=True)
class MarkovWalk(Walk):
    """DSpark: score = logit + W2 x over the row's ``top_k`` largest logits (None: all), with e = W1[predecessor].

    vanilla: x = e. gated: x = sigmoid(M [h; e] + m) * e. rnn: [g; c; o] = M [s; e; h] + m, x = tanh(o), and the next
    row's s is sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c); the first row's is 0. Greedy takes the largest score, the
    lowest id on a tie. Confidence of a row: sigmoid(n h + b), or sigmoid(n [h; e] + b) for "markov".
    """

    kind: MarkovKind
    mix: tuple[str, str] | None  # M and m: [rank, H + rank] if gated, [3 rank, 2 rank + H] if rnn
    confidence: Confidence | None
    judge: tuple[str, str] | None  # n [1, H] or [1, H + rank], and b [1]

    @property
    def weights(self) -> tuple[str, ...]:
        """See :class:`Op`."""
        return (self.predecessor, self.successor, *(self.mix or ()), *(self.judge or ()))
