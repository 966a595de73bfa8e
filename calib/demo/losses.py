"""What each kind of drafter learns from, given the rows of its blocks and the target's answer.

DFlash: cross-entropy. DFlash2: the same, and that of the selector among its candidates. DSpark: cross-entropy, distance
to the target's distribution, and the confidence. Earlier rows weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from calib.demo.drafter import Drafter
from calib.demo.heads import Selector
from calib.demo.model import Target

DECAY = 7.0  # draft j of a block, from 0, weighs exp(-j / DECAY)
LABEL, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0  # weights of DSpark's three parts


@dataclass(frozen=True)
class Batch:
    """Sequences with the anchors of their blocks."""

    ids: torch.Tensor  # [B, T]
    lengths: torch.Tensor  # [B]
    anchors: torch.Tensor  # [B, A]
    taps: torch.Tensor  # [B, T, n * H]
    last: torch.Tensor  # [B, T, H] output of the target's last layer


@dataclass(frozen=True)
class Rows:
    """The proposing rows of all blocks."""

    hidden: torch.Tensor  # [B, A, K, H]
    logits: torch.Tensor  # [B, A, K, V] float32
    before: torch.Tensor  # [B, A, K] the answer's token before each draft
    labels: torch.Tensor  # [B, A, K] the answer's token
    weight: torch.Tensor  # [B, A, K]; 0 behind the end

    def mean(self, each: torch.Tensor) -> torch.Tensor:
        """The weighted mean of a loss of every row."""
        return (each * self.weight).sum() / self.weight.sum()

    def cross_entropy(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Of each row, [B, A, K], from scores [B, A, K, n]."""
        return F.cross_entropy(scores.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape)


def block_loss(target: Target, drafter: Drafter, batch: Batch) -> torch.Tensor:
    """The loss of the drafter's kind."""
    c = drafter.c
    first = batch.ids.gather(1, batch.anchors)
    hidden = drafter(batch.taps, batch.anchors, first, target.model.embed_tokens.weight)[:, :, -c.drafts :]
    draft = torch.arange(c.drafts, device=batch.ids.device)
    place = batch.anchors[..., None] + draft  # of the token before each draft
    last = batch.ids.shape[1] - 1
    ids = batch.ids[:, None].expand(-1, batch.anchors.shape[1], -1)
    rows = Rows(
        hidden,
        target.lm_head(hidden).float(),
        ids.gather(2, place.clamp(max=last)),
        ids.gather(2, (place + 1).clamp(max=last)),
        (place + 1 < batch.lengths[:, None, None]) * torch.exp(-draft / DECAY),
    )
    if drafter.markov_head is not None:
        return _markov_loss(target, drafter, rows, batch.last, place.clamp(max=last))
    base = rows.mean(rows.cross_entropy(rows.logits, rows.labels))
    return base if drafter.candidate_selector is None else base + selector_loss(drafter.candidate_selector, rows)


def selector_loss(selector: Selector, rows: Rows) -> torch.Tensor:
    """Cross-entropy among the candidates, of rows whose candidates hold the answer's token."""
    candidates, scores = selector(rows.hidden, rows.logits, rows.before)
    found = candidates == rows.labels[..., None]
    each = scores.logsumexp(-1) - (scores * found).sum(-1)
    return rows.mean(each.where(found.any(-1), 0.0))


def _markov_loss(target: Target, drafter: Drafter, rows: Rows, last: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    head = drafter.markov_head
    assert head is not None
    with torch.no_grad():
        x = last.gather(1, place.flatten(1)[..., None].expand(-1, -1, last.shape[2]))
        p = target.lm_head(target.model.norm(x)).float().softmax(-1).view(rows.logits.shape)
    scores = rows.logits + head(rows.hidden, rows.before)
    distance = (p - scores.softmax(-1)).abs().sum(-1)
    each = LABEL * rows.cross_entropy(scores, rows.labels) + DISTANCE * distance
    if drafter.confidence_head is not None:
        sure = drafter.confidence_head(rows.hidden, head.markov_w1(rows.before))
        wanted = 1 - distance.detach() / 2
        each = each + CONFIDENCE * F.binary_cross_entropy_with_logits(sure, wanted, reduction="none")
    return rows.mean(each)
