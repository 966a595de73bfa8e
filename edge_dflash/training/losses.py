"""What each kind of drafter learns from, given the rows of its blocks and the target's answer. Earlier rows weigh more.

DFlash (arXiv 2602.06036, section on training): cross-entropy. DFlash2: the same, and that of the selector among its
candidates. DSpark: cross-entropy, distance to the target's distribution, and the confidence.

What a walk scores: :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`, after
the answer's tokens, or after those that it chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edge_dflash.model.ops import UNDRAFTED, MarkovWalk, SelectorWalk
from edge_dflash.training.drafter import HEAD, BlockDrafter

Weights = Callable[[str], torch.Tensor]  # by canonical name


class SelectorScores:
    """Scores of DFlash2's selector among the likeliest tokens of each row."""

    def __init__(self, op: SelectorWalk, weights: Weights) -> None:
        self._op, self._weights = op, weights

    def scores(
        self, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates [..., k] by descending logit and their scores: hidden [..., H], logits [..., V], before [...]."""
        op = self._op
        base, candidates = logits.float().topk(op.top_k, -1)
        row = F.linear(hidden, self._weights(op.projection)).float() * F.embedding(
            before, self._weights(op.predecessor)
        )
        return candidates, base + (F.embedding(candidates, self._weights(op.successor)) * row.unsqueeze(-2)).sum(-1)

    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Tokens [..., K] of rows [..., K, H] with logits [..., K, V] behind the token ``first`` [...]."""
        chosen = [first]
        for row in range(hidden.shape[-2]):
            candidates, scores = self.scores(hidden[..., row, :], logits[..., row, :], chosen[-1])
            chosen.append(candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0])
        return torch.stack(chosen[1:], -1)


class MarkovScores:
    """Scores of DSpark's Markov head over all tokens; in training its ``top_k`` does not matter."""

    def __init__(self, op: MarkovWalk, weights: Weights) -> None:
        self._op, self._weights = op, weights

    def scores(self, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Scores [..., K, V] of rows [..., K, H] of blocks whose tokens before each row are ``before`` [..., K]."""
        if self._op.kind != "rnn":
            return logits + self._term(hidden, before, None)[0]
        state, terms = self._start(before[..., 0]), []
        for row in range(hidden.shape[-2]):
            term, state = self._term(hidden[..., row, :], before[..., row], state)
            terms.append(term)
        return logits + torch.stack(terms, -2)

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """How likely each row's draft is accepted, as a logit [...]; None without such a head."""
        if self._op.judge is None:
            return None
        matrix, bias = (self._weights(name) for name in self._op.judge)
        read = hidden
        if self._op.confidence == "markov":
            read = torch.cat((hidden, F.embedding(before, self._weights(self._op.predecessor))), -1)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(read.float(), matrix, bias)[..., 0]

    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """See :meth:`SelectorScores.walk`."""
        state, chosen = self._start(first), [first]
        for row in range(hidden.shape[-2]):
            base = logits[..., row, :].float()
            term, state = self._term(hidden[..., row, :], chosen[-1], state)
            if self._op.top_k is not None and self._op.top_k < base.shape[-1]:
                least = base.topk(self._op.top_k, -1).values[..., -1:]
                term = torch.where(base < least, -torch.inf, term)
            chosen.append((base + term).argmax(-1))
        return torch.stack(chosen[1:], -1)

    def _start(self, first: torch.Tensor) -> torch.Tensor:
        return self._weights(self._op.predecessor).new_zeros(*first.shape, self._op.rank)

    def _term(
        self, hidden: torch.Tensor, before: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to the logits [..., V] behind the tokens ``before``, and the next state."""
        op = self._op
        e = F.embedding(before, self._weights(op.predecessor))
        if op.kind == "gated" and op.mix is not None:
            matrix, bias = (self._weights(name) for name in op.mix)
            e = torch.sigmoid(F.linear(torch.cat((hidden, e), -1), matrix, bias)) * e
        elif op.kind == "rnn" and op.mix is not None and state is not None:
            matrix, bias = (self._weights(name) for name in op.mix)
            gate, candidate, out = F.linear(torch.cat((state, e, hidden), -1), matrix, bias).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, e = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(out)
        return F.linear(e, self._weights(op.successor)).float(), e if state is None else state


def scorer(op: object, weights: Weights) -> SelectorScores | MarkovScores | None:
    """What scores the drafts of a walk; None without one."""
    match op:
        case SelectorWalk():
            return SelectorScores(op, weights)
        case MarkovWalk():
            return MarkovScores(op, weights)
        case _:
            return None


LABEL, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0  # weights of DSpark's three parts


@dataclass(frozen=True)
class Batch:
    """Sequences with the anchors of their blocks."""

    ids: torch.Tensor  # [B, T]
    lengths: torch.Tensor  # [B]
    anchors: torch.Tensor  # [B, A]
    taps: torch.Tensor  # [B, T, n * H]
    last: torch.Tensor | None = None  # [B, T, H] what the target's head reads; of drafters that learn its distribution

    def to(self, device: str) -> Batch:
        """The batch on a device; taps are float32 on a CPU and stay BF16 on a GPU."""

        def moved(one: torch.Tensor) -> torch.Tensor:
            return one.to(device, non_blocking=True)

        def rows(one: torch.Tensor) -> torch.Tensor:
            return one.float() if device == "cpu" else moved(one)

        last = None if self.last is None else rows(self.last)
        return Batch(moved(self.ids), moved(self.lengths), moved(self.anchors), rows(self.taps), last)


@dataclass(frozen=True)
class _Rows:
    """The proposing rows of all blocks."""

    hidden: torch.Tensor  # [B, A, K, H]
    logits: torch.Tensor  # [B, A, K, V] float32
    before: torch.Tensor  # [B, A, K] the answer's token before each draft
    labels: torch.Tensor  # [B, A, K] the answer's token
    weight: torch.Tensor  # [B, A, K]; 0 behind the end

    def mean(self, each: torch.Tensor) -> torch.Tensor:
        """The weighted mean of a loss of every row."""
        return (each * self.weight).sum() / self.weight.sum().clamp_min(1e-6)

    def cross_entropy(self, scores: torch.Tensor) -> torch.Tensor:
        """Of each row, [B, A, K], from scores [B, A, K, n]; 0 for a token that cannot be drafted."""
        each = F.cross_entropy(scores.flatten(0, 2), self.labels.flatten(), reduction="none").view(self.labels.shape)
        return each.where(self.logits.gather(-1, self.labels[..., None])[..., 0] > UNDRAFTED / 2, 0.0)


def decay(block_size: int) -> int:
    """Draft j of a block, from 0, weighs exp(-j / decay): 7 in blocks of 16, 5 of 10, 4 of 8, and 4 of DSpark's 7."""
    return round(1 + 3 * block_size / 8)


def block_loss(drafter: BlockDrafter, batch: Batch) -> torch.Tensor:
    """The loss of the drafter's kind over a batch."""
    first = batch.ids.gather(1, batch.anchors)
    hidden = drafter.block(drafter.context(batch.taps), batch.anchors, first)
    draft = torch.arange(hidden.shape[2], device=batch.ids.device)
    place = batch.anchors[..., None] + draft  # of the token before each draft
    last = batch.ids.shape[1] - 1
    ids = batch.ids[:, None].expand(-1, batch.anchors.shape[1], -1)
    rows = _Rows(
        hidden,
        drafter.logits(hidden),
        ids.gather(2, place.clamp(max=last)),
        ids.gather(2, (place + 1).clamp(max=last)),
        (place + 1 < batch.lengths[:, None, None]) * torch.exp(-draft / decay(drafter.spec.block_size)),
    )
    match scorer(drafter.propose.walk, drafter.tensor):
        case MarkovScores() as scores:
            return _markov_loss(scores, drafter, rows, batch.last, place.clamp(max=last))
        case SelectorScores() as scores:
            return rows.mean(rows.cross_entropy(rows.logits)) + _selector_loss(scores, rows)
        case _:
            return rows.mean(rows.cross_entropy(rows.logits))


def _selector_loss(selector: SelectorScores, rows: _Rows) -> torch.Tensor:
    """Cross-entropy among the candidates, of rows whose candidates hold the answer's token."""
    candidates, scores = selector.scores(rows.hidden, rows.logits, rows.before)
    found = candidates == rows.labels[..., None]
    each = scores.logsumexp(-1) - (scores * found).sum(-1)
    return rows.mean(each.where(found.any(-1), 0.0))


def _markov_loss(
    head: MarkovScores, drafter: BlockDrafter, rows: _Rows, last: torch.Tensor | None, place: torch.Tensor
) -> torch.Tensor:
    """With the target's distribution where its last rows are known; cross-entropy alone otherwise."""
    scores = head.scores(rows.hidden, rows.logits, rows.before)
    if last is None:
        return rows.mean(rows.cross_entropy(scores))
    with torch.no_grad():
        x = last.gather(1, place.flatten(1)[..., None].expand(-1, -1, last.shape[2]))
        p = drafter.linear(x, HEAD).float().softmax(-1).view(rows.logits.shape)
    distance = (p - scores.softmax(-1)).abs().sum(-1)
    each = LABEL * rows.cross_entropy(scores) + DISTANCE * distance
    if (sure := head.confidence(rows.hidden, rows.before)) is not None:
        each = each + CONFIDENCE * F.binary_cross_entropy_with_logits(sure, 1 - distance.detach() / 2, reduction="none")
    return rows.mean(each)


@torch.no_grad()
def drafts(drafter: BlockDrafter, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Greedy drafts [B, A, K] of rows [B, A, K, H] behind the anchors' tokens ``first`` [B, A]."""
    logits = drafter.logits(hidden)
    walk = scorer(drafter.propose.walk, drafter.tensor)
    return logits.argmax(-1) if walk is None else walk.walk(hidden, logits, first)
