"""Distributions of the next token compared, without ever holding them: a slice of the vocabulary at a time.

With logits z of p and z' of q: KL(p || q) = E_p[z - z'] - log sum exp z + log sum exp z'. Sums are float64 and carry
the largest logit so far, which a later slice may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from edge_dflash.quality.report import Figures, Perplexity, Spread
from edge_dflash.quality.stream import values_of
from edge_dflash.weights.formats import Weight

TOP = 5
_SLICE = 1 << 22  # logits of a slice, and values of a head's: at most 8 times as many
_LARGEST = 700.0  # of an exponent that is a float's


@dataclass(frozen=True)
class Side:
    """One of the distributions."""

    rows: torch.Tensor  # hidden [rows, H] float32 that a head reads, or logits [rows, V]
    head: int | None  # which head; None: rows are logits

    def logits(self, ids: slice, heads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Logits [rows, ids] in float64."""
        z = self.rows[:, ids] if self.head is None else self.rows @ heads[self.head].T
        return z.double()


@dataclass(frozen=True)
class Compared:
    """By token, [rows] on the CPU: KLD in nats, agreement, and log-probability of the next token (float64)."""

    kld: torch.Tensor
    top1: torch.Tensor
    top5: torch.Tensor
    source: torch.Tensor
    other: torch.Tensor

    def figures(self, chosen: torch.Tensor | None = None) -> Figures:
        """Over all tokens, or those of a mask."""
        kld, top1, top5, source, other = (
            x if chosen is None else x[chosen] for x in (self.kld, self.top1, self.top5, self.source, self.other)
        )
        p50, p99, p999 = torch.quantile(kld, torch.tensor([0.5, 0.99, 0.999], dtype=torch.float64)).tolist()
        source_nll, other_nll = (-float(x.mean()) for x in (source, other))
        return Figures(
            Spread(float(kld.mean()), p50, p99, p999, float(kld.max())),
            float(top1.double().mean()),
            float(top5.double().mean()),
            Perplexity(*(float(torch.tensor(min(x, _LARGEST)).double().exp()) for x in (source_nll, other_nll))),
            len(kld),
        )

    @classmethod
    def summed(cls, parts: Sequence[Compared]) -> Compared:
        """Costs of changes that were measured one by one, added up; agreement where all agree."""
        first = parts[0]
        return cls(
            torch.stack([part.kld for part in parts]).sum(0),
            torch.stack([part.top1 for part in parts]).all(0),
            torch.stack([part.top5 for part in parts]).all(0),
            first.source,
            first.source + torch.stack([part.other - part.source for part in parts]).sum(0),
        )


class _Sums:
    """What is kept of one distribution's logits, of slices so far; [rows] float64 each."""

    def __init__(self, rows: int) -> None:
        self.largest = torch.full((rows,), -torch.inf, dtype=torch.float64)
        self.total = torch.zeros(rows, dtype=torch.float64)  # of exp(z - largest)
        self.gap = torch.zeros(rows, dtype=torch.float64)  # of p's exp(z - largest) (z - z')
        self.next = torch.zeros(rows, dtype=torch.float64)  # logit of the next token
        self.best = torch.full((rows, TOP), -torch.inf, dtype=torch.float64)
        self.ids = torch.full((rows, TOP), -1)

    def add(self, z: torch.Tensor, first: int, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take logits z [rows, n] of ids first, first + 1, ...; exp(z - largest), and the factor of older sums."""
        largest = torch.maximum(self.largest, z.amax(1))
        older = torch.exp(self.largest - largest)
        e = torch.exp(z - largest[:, None])
        self.largest, self.total = largest, self.total * older + e.sum(1)
        at = following - first
        inside = (at >= 0) & (at < z.shape[1])
        self.next = torch.where(inside, z.gather(1, at.clamp(0, z.shape[1] - 1)[:, None])[:, 0], self.next)
        values, ids = z.topk(min(TOP, z.shape[1]))
        values, ids = torch.cat((self.best, values), 1), torch.cat((self.ids, ids + first), 1)
        self.best, order = values.sort(dim=1, descending=True, stable=True)
        self.best, self.ids = self.best[:, :TOP], ids.gather(1, order)[:, :TOP]
        return e, older

    @property
    def lse(self) -> torch.Tensor:
        """Log of the sum of exp z."""
        return self.largest + self.total.log()


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
    p, sums = _Sums(len(following)), {name: _Sums(len(side.rows)) for name, side in sides.items()}
    for first in range(0, vocabulary, step):
        progress(first, vocabulary)
        ids = slice(first, min(vocabulary, first + step))
        matrices = [values_of(head.rows(ids)) for head in heads]
        z = base.logits(ids, matrices)
        e, older = p.add(z, first, following)
        for name, side in sides.items():
            q, rows = sums[name], len(side.rows)
            other = side.logits(ids, matrices)
            q.add(other, first, following[:rows])
            q.gap = q.gap * older[:rows] + (e[:rows] * (z[:rows] - other)).sum(1)
    progress(vocabulary, vocabulary)
    return {name: _compared(p, q) for name, q in sums.items()}


def _compared(p: _Sums, q: _Sums) -> Compared:
    rows = len(q.total)
    source_lse, lse, chosen = p.lse[:rows], q.lse, p.ids[:rows, :1]
    kld = (q.gap / p.total[:rows] - source_lse + lse).clamp(min=0)  # a rounding below zero
    found = (kld, chosen[:, 0] == q.ids[:, 0], (chosen == q.ids).any(1), p.next[:rows] - source_lse, q.next - lse)
    return Compared(*(x.cpu() for x in found))
