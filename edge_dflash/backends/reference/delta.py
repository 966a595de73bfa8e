"""Gated delta state in torch: replay slots.

S in memory is the state at the last base. A verify pass keeps each row's small inputs on a tape and does not write
S; ``commit(k)`` makes k tape rows pending, and the next pass (or ``flush``) replays them into S by the function that
ran them the first time, so replayed bits equal those of token-by-token decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edge_dflash.backends.reference.dense import pointwise, rms_norm, sigmoid, silu
from edge_dflash.model.ops import GatedDelta
from edge_dflash.model.program import DeltaState

_L2_EPS = 1e-6  # inside the root of the q/k normalisation; fixed by the architecture


@dataclass(frozen=True)
class DeltaWeights:
    """Float32 parameters of one layer."""

    conv: torch.Tensor  # [C, K]
    a_log: torch.Tensor  # [Hv]
    dt_bias: torch.Tensor  # [Hv]
    norm: torch.Tensor  # [Dv]


@dataclass(frozen=True)
class Tape:
    """Inputs of the recurrence for some rows: conv input u [rows, C], log decay g and beta [rows, Hv]."""

    u: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def __len__(self) -> int:
        return self.u.shape[0]

    def head(self, rows: int) -> Tape:
        """Return the first ``rows`` rows."""
        return Tape(self.u[:rows], self.g[:rows], self.beta[:rows])


class DeltaMemory:
    """State of one gated delta layer.

    ``state`` S [Hv, Dk, Dv] and ``history`` [K-1, C] (oldest first) hold the base; ``pending`` rows are committed but
    not replayed; ``in_flight`` rows belong to the last verify.
    """

    def __init__(self, spec: DeltaState) -> None:
        self.state = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        self.history = torch.zeros(spec.conv_kernel - 1, spec.conv_channels)
        self.in_flight: Tape | None = None
        self.pending: Tape | None = None

    def clear(self) -> None:
        """Forget the sequence."""
        self.state, self.history = torch.zeros_like(self.state), torch.zeros_like(self.history)
        self.in_flight = self.pending = None

    def commit(self, rows: int) -> None:
        """Make the first ``rows`` rows in flight pending."""
        if self.in_flight is not None and rows:
            self.pending = self.in_flight.head(rows)
        self.in_flight = None

    def replay(self, op: GatedDelta, weights: DeltaWeights) -> None:
        """Run pending rows into S and the conv history."""
        if self.pending is not None:
            self.state, _ = _recurrence(op, weights, self.state, self.history, self.pending, want_output=False)
            self.history = torch.cat((self.history, self.pending.u))[-self.history.shape[0] :].clone()
            self.pending = None


def gated_delta(
    op: GatedDelta,
    weights: DeltaWeights,
    memory: DeltaMemory,
    inputs: tuple[torch.Tensor, ...],
    rows: int,
    *,
    commits: bool,
) -> torch.Tensor:
    """One pass of the layer. inputs (qkv, z, a, b) are [R, ...] padded; ``rows`` are valid. Returns [R, Hv*Dv]."""
    qkv, z, a, b = inputs
    g = -pointwise(torch.exp, weights.a_log) * pointwise(F.softplus, a + weights.dt_bias)
    tape = Tape(qkv[:rows].clone(), g[:rows], sigmoid(b)[:rows])
    memory.replay(op, weights)
    state, output = _recurrence(op, weights, memory.state, memory.history, tape, want_output=True)
    if commits:
        memory.in_flight = None
        memory.state = state
        memory.history = torch.cat((memory.history, tape.u))[-memory.history.shape[0] :].clone()
    else:
        memory.in_flight = tape
    gated = rms_norm(output, weights.norm, op.eps, plus_one=False)  # [rows, Hv, Dv]
    gated = F.pad(gated.flatten(1), (0, 0, 0, z.shape[0] - rows))
    return gated * silu(z)


def _recurrence(
    op: GatedDelta, weights: DeltaWeights, state: torch.Tensor, history: torch.Tensor, tape: Tape, *, want_output: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q. ``state`` is not changed."""
    rows, heads, key_width = len(tape), op.value_heads, op.key_heads * op.key_dim
    c = _convolve(weights.conv, history, tape.u)
    q, k, v = c[:, :key_width], c[:, key_width : 2 * key_width], c[:, 2 * key_width :]
    ratio = heads // op.key_heads  # value head j uses key head j // ratio
    q = _normalise(q, op).mul(op.key_dim**-0.5).repeat_interleave(ratio, dim=1)
    k = _normalise(k, op).repeat_interleave(ratio, dim=1)
    decay = pointwise(torch.exp, tape.g)[:, :, None, None].unbind()
    keys, queries = k.unsqueeze(2).unbind(), q.unsqueeze(2).unbind()  # of [Hv, 1, Dk]
    values, beta = v.reshape(rows, heads, 1, op.value_dim).unbind(), tape.beta[:, :, None, None].unbind()
    outputs = []
    for r, key in enumerate(keys):
        state = state * decay[r]
        d = (values[r] - torch.bmm(key, state)) * beta[r]
        state.baddbmm_(key.mT, d)
        if want_output:
            outputs.append(torch.bmm(queries[r], state))
    return state, torch.cat(outputs, 1).transpose(0, 1) if outputs else state.new_zeros(0, heads, op.value_dim)


def _convolve(weight: torch.Tensor, history: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of u [rows, C] behind ``history`` [K-1, C], then SiLU."""
    rows = u.shape[0]
    line = torch.cat((history, u))
    total = line[:rows] * weight[:, 0]
    for n in range(1, weight.shape[1]):
        total = total + line[n : n + rows] * weight[:, n]
    return silu(total)


def _normalise(x: torch.Tensor, op: GatedDelta) -> torch.Tensor:
    """L2-normalise each key head: x / sqrt(sum(x^2) + 1e-6). x [rows, Hk*Dk] -> [rows, Hk, Dk]."""
    x = x.reshape(-1, op.key_heads, op.key_dim)
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
