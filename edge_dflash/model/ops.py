"""The op set: what a backend has to be able to do, and nothing about how.

Every tensor is ``[rows, columns]``; ``rows`` (tokens in this pass) is the only free dimension. An op names its input
tensors, its output tensor, its weights and, for state ops, the state it touches; what a spec says of it are fields that
it inherits from the spec. Row r of a pass is the token at absolute position ``length + r``, where ``length`` is the
number of committed rows, kept by the backend.

Dense ops are pure and row-wise, but for :class:`GroupedConv` and the walks, which only propose passes have, and for
:class:`FrameAttend` and :class:`Fold` of a vision tower. State ops read and write memory that outlives the pass.

In a tower's pass the rows are the patches of one frame. Inputs that depend on the grid of patches alone come from
:func:`edge_dflash.model.vision.patch_tables`. Every op rounds its output once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from edge_dflash.model.specs import Activation, AttentionSpec, GatedDeltaSpec, GroupedConvSpec, MarkovSpec, RopeSpec


@dataclass(frozen=True, kw_only=True)
class Op:
    """Base of all ops."""

    inputs: tuple[str, ...]
    output: str

    reads: ClassVar[tuple[str, ...]] = ()  # fields that hold names of weights: one, some, or None

    @property
    def weights(self) -> tuple[str, ...]:
        """Canonical names of the weights this op reads."""
        held: list[str | tuple[str, ...] | None] = [getattr(self, field) for field in self.reads]
        return tuple(name for one in held if one for name in ((one,) if isinstance(one, str) else one))

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

    reads = ("weight",)
    weight: str


@dataclass(frozen=True, kw_only=True)
class Linear(DenseOp):
    """y = x W^T; ``weight`` [N, K] is BF16, FP8 or NVFP4. FP32 accumulation, one rounding of the output.

    The output head is no exception: logits are BF16 when activations are, so ties occur and the lowest id wins.
    """

    reads = ("weight",)
    weight: str


@dataclass(frozen=True, kw_only=True)
class RmsNorm(DenseOp):
    """y = w' x / sqrt(mean(x^2) + eps), in FP32 with one rounding; w' = w, or 1 + w when ``plus_one``."""

    reads = ("weight",)
    weight: str
    eps: float
    plus_one: bool


@dataclass(frozen=True, kw_only=True)
class Add(Elementwise):
    """y = a + b (residual)."""


@dataclass(frozen=True, kw_only=True)
class SwiGlu(Elementwise):
    """y = silu(gate) * up; inputs (gate, up)."""


GATED: Mapping[Activation, type[Elementwise]] = {"silu": SwiGlu}
"""What an MLP makes of its gate and up, by the activation of its layer."""


@dataclass(frozen=True, kw_only=True)
class Concat(DenseOp):
    """Concatenation along columns, in the order of ``inputs`` (taps)."""


@dataclass(frozen=True, kw_only=True)
class SelectRows(DenseOp):
    """``last``: the last valid row only (prefill logits). ``drafts``: every row but row 0, the anchor's."""

    which: Literal["last", "drafts"]

    def rows(self, rows: int) -> int:
        """See :class:`Op`."""
        return 1 if self.which == "last" else rows - 1


@dataclass(frozen=True, kw_only=True)
class KvAppend(StateOp):
    """Inputs (k, v) [rows, Hkv*D]: k-norm, RoPE at the rows' own positions, store K and V in ``state``.

    The output is an empty marker tensor: the op is run for its effect.
    """

    reads = ("k_norm",)
    k_norm: str
    eps: float
    plus_one: bool
    rope: RopeSpec
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Attend(StateOp, AttentionSpec):
    """Inputs (q, k, v): QK-norm, RoPE, append K/V to ``state``, attention over all stored rows, output gate.

    q is [rows, Hq*D], or [rows, Hq*2*D] with query and gate interleaved per head when ``gated``. The row at position
    p sees key position j iff j is committed or in the block, and (``bidirectional`` or j <= p), and, with a
    ``window`` S, p - S < j and (causal or j < p + S). Output [rows, Hq*D]. Scale 1/sqrt(D), softmax in FP32. K and V
    are read back as stored, so a row sees what a later pass will see.
    """

    reads = ("q_norm", "k_norm")
    q_norm: str
    k_norm: str
    eps: float
    plus_one: bool
    bidirectional: bool
    window: int | None


@dataclass(frozen=True, kw_only=True)
class GatedDelta(StateOp, GatedDeltaSpec):
    """Inputs (qkv, z, a, b): causal conv + SiLU, L2 norm, gated delta rule, gated RMS norm (plain weight).

    First replays the ``pending`` rows of the tape into S, then runs its own rows without writing S (a pass that
    commits writes S after its last row instead). Output [rows, Hv*Dv].
    """

    reads = ("conv", "a_log", "dt_bias", "norm")
    conv: str  # [C, 1, K]
    a_log: str  # [Hv]
    dt_bias: str  # [Hv]
    norm: str  # [Dv]
    eps: float


@dataclass(frozen=True, kw_only=True)
class Remap(DenseOp):
    """Columns of a draft vocabulary at their places in the target's: y[r, ids[j]] = x[r, j], UNDRAFTED elsewhere.

    ``weight`` holds the ids, each once, as float32.
    """

    reads = ("weight",)
    weight: str
    vocab: int  # columns of y


UNDRAFTED = -1e30  # logit of a token that the drafter cannot draft; above that of one that a grammar forbids


@dataclass(frozen=True, kw_only=True)
class GroupedConv(DenseOp, GroupedConvSpec):
    """Inputs (u [rows, H], c [rows, 2 * taps * H / group_size]): causal convolution over the rows of a block.

    With b = ``base`` [2, taps, H] and c seen as d [rows, 2, taps, groups], both taken at ``side`` (0 before a sublayer,
    1 after it): y[r, ch] = sum over t of (b[t, ch] + d[r, t, ch // group_size]) u[r - t, ch]. Terms with r < t are
    zero: the anchor, row 0 of the block, has no row before it. Summed from t = 0 on, one rounding.
    """

    reads = ("base",)
    base: str
    side: Literal[0, 1]


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

    reads = ("projection", "predecessor", "successor")
    top_k: int
    projection: str


@dataclass(frozen=True, kw_only=True)
class MarkovWalk(Walk, MarkovSpec):
    """DSpark: score = logit + W2 x over the row's ``top_k`` largest logits (None: all), with e = W1[predecessor].

    vanilla: x = e. gated: x = sigmoid(M [h; e] + m) * e. rnn: [g; c; o] = M [s; e; h] + m, x = tanh(o), and the next
    row's s is sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c); the first row's is 0. Greedy takes the largest score, the
    lowest id on a tie. Confidence of a row: sigmoid(n h + b), or sigmoid(n [h; e] + b) for "markov".
    """

    reads = ("predecessor", "successor", "mix", "judge")
    mix: tuple[str, str] | None  # M and m: [rank, H + rank] if gated, [3 rank, 2 rank + H] if rnn
    judge: tuple[str, str] | None  # n [1, H] or [1, H + rank], and b [1]


class SharedExpert(NamedTuple):
    """An MLP that every row takes, times the sigmoid of one number per row. Canonical names of its weights."""

    gate: str  # [Is, H]
    up: str
    down: str  # [H, Is]
    judge: str  # [1, H]


@dataclass(frozen=True, kw_only=True)
class Experts(DenseOp):
    """Input x [rows, H]: y = sum over the row's experts e of w_e D_e (silu(G_e x) * U_e x), and the shared expert.

    z = R x, rounded as any linear; p = softmax(z) in FP32. A row's experts are its ``top_k`` largest p, the lower index
    first on a tie (a kernel may go by z instead: it differs where two z give one p); w = p, divided by the sum of the
    chosen ones in ascending order of experts where ``renormalised``. G x, U x and their product are rounded as those of
    a dense MLP are; D_e a is not. y is summed in FP32 in ascending order of experts, the shared expert last with weight
    sigmoid(S x), S x rounded as any linear; then one rounding.
    """

    reads = ("router", "gates", "ups", "downs", "shared")
    router: str  # R [E, H]
    gates: tuple[str, ...]  # of each expert: [I, H]
    ups: tuple[str, ...]
    downs: tuple[str, ...]  # [H, I]
    top_k: int
    renormalised: bool
    shared: SharedExpert | None


@dataclass(frozen=True, kw_only=True)
class Bias(DenseOp):
    """y = x + b; ``weight`` b [columns]."""

    reads = ("weight",)
    weight: str


@dataclass(frozen=True, kw_only=True)
class LayerNorm(DenseOp):
    """y = w (x - mean) / sqrt(variance + eps) + b in FP32, mean and variance over the columns."""

    reads = ("weight", "bias")
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True, kw_only=True)
class GeluTanh(Elementwise):
    """y = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) in FP32."""


@dataclass(frozen=True, kw_only=True)
class GeluErf(Elementwise):
    """y = x / 2 (1 + erf(x / sqrt(2))) in FP32."""


@dataclass(frozen=True, kw_only=True)
class PositionRows(DenseOp):
    """Inputs (corners [rows, 4] int32, shares [rows, 4] float32): y = sum over t of shares[r, t] E[corners[r, t]].

    ``weight`` E [positions^2, H] is the table of position embeddings. FP32, summed from t = 0 on.
    """

    reads = ("weight",)
    weight: str


@dataclass(frozen=True, kw_only=True)
class FrameAttend(DenseOp):
    """Inputs (qkv [rows, 3 * heads * D], cos, sin [rows, D / 2] float32): every row attends to all rows of the pass.

    Columns of qkv: all heads of q, then of k, then of v. q and k are turned in FP32, dims j and j + D / 2 by the angle
    of column j, and rounded; softmax over q k / sqrt(D) in FP32. Output [rows, heads * D].
    """

    heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, kw_only=True)
class Fold(DenseOp):
    """``count`` rows that follow each other become one, side by side: [rows, C] -> [rows / count, count * C]."""

    count: int

    def rows(self, rows: int) -> int:
        """See :class:`~edge_dflash.model.ops.Op`."""
        return rows // self.count
