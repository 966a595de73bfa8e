"""The gated delta rule, two ways: token by token, and in chunks for training. Float32, autograd, any device.

Per value head, with S [Dk, Dv]: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q (Gated DeltaNet, arXiv
2412.06464). In a chunk the rows d solve a unit lower triangular system, so all of it is matrix products. Knows
nothing of layers or projections.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch

CHUNK = 64


def sequential_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, T, Hv, Dv] and the last state [B, Hv, Dk, Dv].

    q, k [B, T, Hk, Dk] are normalised (q also scaled); v [B, T, Hv, Dv]; g, beta [B, T, Hv].
    """
    ratio = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
    if state is None:
        state = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        d = (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * d[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def chunked_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from a zero state, for training. T may be any length: padding rows have beta 0 and g 0."""
    length = v.shape[1]
    pad = -length % CHUNK
    q, k, v, g, beta = (_chunks(x, pad) for x in (q, k, v, g, beta))  # [B, H, N, C, ...]
    ratio = v.shape[1] // k.shape[1]
    total = g.cumsum(-1)  # log decay from the chunk's start, this row included
    row = torch.arange(CHUNK, device=v.device)
    span = total[..., :, None] - total[..., None, :]  # [B, Hv, N, C, C], row minus column
    decay = span.masked_fill(row[:, None] < row[None, :], -math.inf).exp()
    kk = _per_value_head(k @ k.transpose(-1, -2), decay)
    qk = _per_value_head(q @ k.transpose(-1, -2), decay)
    inverse = cast(torch.Tensor, UnitLowerInverse.apply(kk * beta[..., None]))  # type: ignore[no-untyped-call]
    k, q = k.repeat_interleave(ratio, 1), q.repeat_interleave(ratio, 1)
    grown = total.exp()
    both = inverse @ torch.cat((v * beta[..., None], k * (beta * grown)[..., None]), -1)
    u, w = torch.split(both, [v.shape[-1], k.shape[-1]], -1)
    k_out = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)  # [.., Dk, C]
    state = v.new_zeros(v.shape[0], v.shape[1], k.shape[-1], v.shape[-1])
    starts, rows = [], []
    for n in range(v.shape[2]):
        starts.append(state)
        d = u[:, :, n] - w[:, :, n] @ state
        rows.append(d)
        state = state * grown[:, :, n, -1, None, None] + k_out[:, :, n] @ d
    out = (q * grown[..., None]) @ torch.stack(starts, 2) + qk @ torch.stack(rows, 2)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2), state


def _chunks(x: torch.Tensor, pad: int) -> torch.Tensor:
    """[B, T, H, ...] -> [B, H, N, CHUNK, ...], zeros appended."""
    x = x.transpose(1, 2)
    if pad:
        x = torch.cat((x, x.new_zeros(*x.shape[:2], pad, *x.shape[3:])), 2)
    return torch.unflatten(x, 2, (-1, CHUNK)).contiguous()


def _per_value_head(products: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """products [B, Hk, N, C, C] * decay [B, Hv, N, C, C]; a key head serves consecutive value heads."""
    return (products.unsqueeze(2) * torch.unflatten(decay, 1, (products.shape[1], -1))).flatten(1, 2)


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 where L is the part of a matrix [..., n, n] below its diagonal; the rest of it is not read."""

    @staticmethod
    def forward(ctx: Any, matrix: torch.Tensor) -> torch.Tensor:
        """Forward substitution."""
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device).expand_as(matrix)
        inverse: torch.Tensor = torch.linalg.solve_triangular(matrix, eye, upper=False, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Gradient -T^T G T^T, strictly lower part: products are faster than a second solve."""
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        grad: torch.Tensor = -(transposed @ grads[0] @ transposed).tril(-1)
        return grad
