"""What each kind of drafter learns from, given the rows of its blocks and the target's answer. Earlier rows weigh more.

DFlash (arXiv 2602.06036, section on training): cross-entropy. DFlash2: the same, and that of the selector among its
candidates. DSpark: cross-entropy, distance to the target's distribution, and the confidence.

What a walk scores: :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`, after
the answer's tokens, or after those that it chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edge_dflash.backends.reference.dense import Arithmetic
from edge_dflash.model.ops import UNDRAFTED, MarkovWalk, SelectorWalk
from edge_dflash.training.drafter import HEAD, BlockDrafter


def selector_scores(
    op: SelectorWalk, how: Arithmetic, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates [..., k] by descending logit and their scores: hidden [..., H], logits [..., V], before [...]."""
    base, candidates = logits.float().topk(op.top_k, -1)
    row = how.linear(hidden, op.projection).float() * F.embedding(before, how.tensor(op.predecessor))
    return candidates, base + (F.embedding(candidates, how.tensor(op.successor)) * row.unsqueeze(-2)).sum(-1)


def markov_term(
    op: MarkovWalk, how: Arithmetic, hidden: torch.Tensor, before: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is added to logits [..., V] behind the tokens ``before`` [...], and the next state; None: the first one."""
    e = F.embedding(before, how.tensor(op.predecessor))
    if op.mix is not None:
        matrix, bias = (how.tensor(name) for name in op.mix)
        if op.kind == "gated":
            e = torch.sigmoid(F.linear(torch.cat((hidden, e), -1), matrix, bias)) * e
        else:
            state = torch.zeros_like(e) if state is None else state
            gate, candidate, out = F.linear(torch.cat((state, e, hidden), -1), matrix, bias).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, e = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(out)
    return how.linear(e, op.successor).float(), state


def markov_scores(
    op: MarkovWalk, how: Arithmetic, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """Scores [..., K, V] of rows [..., K, H] of blocks whose tokens before each row are ``before`` [..., K].

    Over all tokens: in training ``top_k`` does not matter.
    """
    if op.kind != "rnn":
        return logits + markov_term(op, how, hidden, before, None)[0]
    state, terms = None, []
    for row in range(hidden.shape[-2]):
        term, state = markov_term(op, how, hidden[..., row, :], before[..., row], state)
        terms.append(term)
    return logits + torch.stack(terms, -2)


def confidence(op: MarkovWalk, how: Arithmetic, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
    """How likely each row's draft is accepted, as a logit [...]; None without such a head."""
    if op.judge is None:
        return None
    matrix, bias = (how.tensor(name) for name in op.judge)
    if op.confidence == "markov":
        hidden = torch.cat((hidden, F.embedding(before, how.tensor(op.predecessor))), -1)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), matrix, bias)[..., 0]


@torch.no_grad()
def drafts(drafter: BlockDrafter, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Greedy drafts [B, A, K] of rows [B, A, K, H] behind the anchors' tokens ``first`` [B, A]."""
    logits, walk = drafter.logits(hidden).float(), drafter.propose.walk
    if walk is None:
        return logits.argmax(-1)
    state, chosen = None, [first]
    for h, base in zip(hidden.unbind(-2), logits.unbind(-2), strict=True):
        if isinstance(walk, SelectorWalk):
            candidates, scores = selector_scores(walk, drafter, h, base, chosen[-1])
            chosen.append(candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0])
        elif isinstance(walk, MarkovWalk):
            term, state = markov_term(walk, drafter, h, chosen[-1], state)
            if walk.top_k is not None:
                term = term.masked_fill(base < base.topk(walk.top_k, -1).values[..., -1:], -torch.inf)
            chosen.append((base + term).argmax(-1))
    return torch.stack(chosen[1:], -1)


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
            return one.float() if device == "cpu" and one.is_floating_point() else one.to(device, non_blocking=True)

        last = None if self.last is None else moved(self.last)
        return Batch(moved(self.ids), moved(self.lengths), moved(self.anchors), moved(self.taps), last)


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
    match drafter.propose.walk:
        case MarkovWalk() as walk:
            return _markov_loss(walk, drafter, rows, batch.last, place.clamp(max=last))
        case SelectorWalk() as walk:
            return rows.mean(rows.cross_entropy(rows.logits)) + _selector_loss(walk, drafter, rows)
        case _:
            return rows.mean(rows.cross_entropy(rows.logits))


def _selector_loss(walk: SelectorWalk, drafter: BlockDrafter, rows: _Rows) -> torch.Tensor:
    """Cross-entropy among the candidates, of rows whose candidates hold the answer's token."""
    candidates, scores = selector_scores(walk, drafter, rows.hidden, rows.logits, rows.before)
    found = candidates == rows.labels[..., None]
    each = scores.logsumexp(-1) - (scores * found).sum(-1)
    return rows.mean(each.where(found.any(-1), 0.0))


def _markov_loss(
    walk: MarkovWalk, drafter: BlockDrafter, rows: _Rows, last: torch.Tensor | None, place: torch.Tensor
) -> torch.Tensor:
    """With the target's distribution where its last rows are known; cross-entropy alone otherwise."""
    scores = markov_scores(walk, drafter, rows.hidden, rows.logits, rows.before)
    if last is None:
        return rows.mean(rows.cross_entropy(scores))
    with torch.no_grad():
        x = last.gather(1, place.flatten(1)[..., None].expand(-1, -1, last.shape[2]))
        p = drafter.linear(x, HEAD).float().softmax(-1).view(rows.logits.shape)
    distance = (p - scores.softmax(-1)).abs().sum(-1)
    each = LABEL * rows.cross_entropy(scores) + DISTANCE * distance
    if (sure := confidence(walk, drafter, rows.hidden, rows.before)) is not None:
        each = each + CONFIDENCE * F.binary_cross_entropy_with_logits(sure, 1 - distance.detach() / 2, reduction="none")
    return rows.mean(each)
