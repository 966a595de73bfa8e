"""Distributions of the next token compared, without ever holding them: a slice of the vocabulary at a time.

With logits z of p and z' of q: KL(p || q) = E_p[z - z'] - log sum exp z + log sum exp z'. Sums are float64, and the
mean over p so far is weighted again when a slice raises log sum exp z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import exp

import torch

from edge_dflash.quality.report import Figures, Perplexity, Spread
from edge_dflash.quality.stream import values_of
from edge_dflash.weights.formats import Weight

TOP = 5
Compared = torch.Tensor
"""[5, tokens] float64 on the CPU: KLD in nats; whether the first token and the first five agree (0 or 1);
log-probability of the next token by the source and by the other."""
Side = tuple[torch.Tensor, int | None]
"""A distribution: hidden [rows, H] float32 and which head reads it, or logits [rows, V] and None."""
_SLICE = 1 << 22  # logits of a slice, and values of a head's: at most 8 times as many
_LARGEST = 700.0  # of an exponent that is a float's


def figures(found: Compared) -> Figures:
    """Of one token at least."""
    kld, (mean, top1, top5, *logprobs) = found[0], found.mean(1).tolist()
    p50, p99, p999 = torch.quantile(kld, kld.new_tensor([0.5, 0.99, 0.999])).tolist()
    perplexity = Perplexity(*(exp(min(-one, _LARGEST)) for one in logprobs))
    return Figures(Spread(mean, p50, p99, p999, float(kld.max())), top1, top5, perplexity, len(kld))


def summed(parts: Sequence[Compared]) -> Compared:
    """Costs of changes that were measured one by one, added up; agreement where all agree."""
    kld, top1, top5, source, other = torch.stack(list(parts), 1)
    return torch.stack((kld.sum(0), top1.amin(0), top5.amin(0), source[0], source[0] + (other - source).sum(0)))


class _Sums:
    """What is kept of one distribution's logits, of slices so far; [rows] float64 each."""

    def __init__(self, rows: int) -> None:
        nothing = torch.full((rows, TOP), -torch.inf, dtype=torch.float64)
        self.lse = self.best = nothing[:, 0]
        self.top = nothing
        self.ids = torch.full((rows,), -1)  # of the most probable token; of several the first one
        self.next = torch.zeros(rows, dtype=torch.float64)  # logit of the next token
        self.chosen = self.next  # logit of the token that p finds most probable
        self.gap = self.next  # mean of z - z' over p

    def add(self, z: torch.Tensor, first: int, following: torch.Tensor) -> None:
        """Take logits z [rows, n] of ids first, first + 1, ..."""
        self.lse = torch.logaddexp(self.lse, z.logsumexp(1))
        self.next = _picked(z, following - first, self.next)
        best, ids = z.max(1)
        self.ids = torch.where(best > self.best, ids + first, self.ids)
        self.best = torch.maximum(best, self.best)


def _picked(z: torch.Tensor, at: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Of each row of z [rows, n] the value at its index, where it has that."""
    inside = (at >= 0) & (at < z.shape[1])
    return torch.where(inside, z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None])[:, 0], otherwise)


def _logits(side: Side, ids: slice, heads: Sequence[torch.Tensor]) -> torch.Tensor:
    rows, head = side
    return (rows[:, ids] if head is None else rows @ heads[head].T).double()


def compare(
    base: Side,
    sides: Mapping[str, Side],
    heads: Sequence[Weight],
    following: torch.Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Compared]:
    """Each side's distribution q against that of ``base``, p; a side has the first rows of the base's, or all.

    ``heads``: matrices [V, H] of any format. ``following``: id of the token after each row, [rows].
    """
    vocabulary, hidden = heads[0].shape
    step = max(1, min(_SLICE // max(1, len(following)), 8 * _SLICE // hidden))
    p, sums = _Sums(len(following)), {name: _Sums(len(rows)) for name, (rows, _) in sides.items()}
    for first in range(0, vocabulary, step):
        progress(first, vocabulary)
        ids = slice(first, min(vocabulary, first + step))
        matrices = [values_of(head.rows(ids)) for head in heads]
        z, before = _logits(base, ids, matrices), p.lse
        p.add(z, first, following)
        share, older = torch.exp(z - p.lse[:, None]), torch.exp(before - p.lse)
        for name, side in sides.items():
            q, rows, other = sums[name], slice(len(side[0])), _logits(side, ids, matrices)
            q.add(other, first, following[rows])
            q.gap = q.gap * older[rows] + (share[rows] * (z[rows] - other)).sum(1)
            q.chosen = _picked(other, p.ids[rows] - first, q.chosen)
            q.top = torch.cat((q.top, other), 1).topk(TOP).values
    progress(vocabulary, vocabulary)
    return {name: _compared(p, q) for name, q in sums.items()}


def _compared(p: _Sums, q: _Sums) -> Compared:
    lse, ids, following = (x[: len(q.lse)] for x in (p.lse, p.ids, p.next))
    kld = (q.gap - lse + q.lse).clamp(min=0)  # a rounding below zero
    return torch.stack((kld, ids == q.ids, q.chosen >= q.top[:, -1], following - lse, q.next - q.lse)).cpu()
