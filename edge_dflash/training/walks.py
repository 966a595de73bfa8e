"""What a walk of the propose pass scores, with gradients: behind the answer's tokens, or behind those that it chose.

Formulas: :class:`~edge_dflash.model.ops.SelectorWalk` and :class:`~edge_dflash.model.ops.MarkovWalk`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from edge_dflash.model.ops import MarkovWalk, SelectorWalk

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
