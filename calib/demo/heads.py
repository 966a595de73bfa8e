"""What drafters put on top of the target's lm_head: a selector of candidates (DFlash2), a Markov head (DSpark).

Both score a row's tokens by the token before it: in training that is the answer's, in a walk the one just chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from calib.demo.fakequant import Linear


@dataclass(frozen=True)
class SelectorConfig:
    """Sizes of a candidate selector."""

    rank: int = 64
    top_k: int = 16


@dataclass(frozen=True)
class MarkovConfig:
    """Form and sizes of a Markov head and of the confidence head beside it."""

    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int = 64
    confidence: Literal["hidden", "markov"] | None = "markov"  # what it reads: the row alone, or the token before too


class Selector(nn.Module):
    """Of each row's most likely tokens, the one that best follows the token before it."""

    def __init__(self, vocabulary: int, hidden: int, c: SelectorConfig) -> None:
        super().__init__()
        self.top_k = c.top_k
        self.predecessor_codebook = nn.Parameter(torch.randn(vocabulary, c.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocabulary, c.rank))  # so that it starts as the plain head
        self.hidden_projection = Linear(hidden, c.rank, wide=True)

    def forward(
        self, hidden: torch.Tensor, logits: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Candidates [..., k] by descending logit and their scores, of rows [..., H], logits [..., V], before [...]."""
        base, candidates = logits.float().topk(self.top_k, -1)
        row = self.hidden_projection(hidden).float() * self.predecessor_codebook[before]
        return candidates, base + (self.successor_codebook[candidates] * row.unsqueeze(-2)).sum(-1)

    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Tokens [..., K] of rows [..., K, H] with logits [..., K, V] after the token ``first`` [...]."""
        chosen = [first]
        for row in range(hidden.shape[-2]):
            candidates, scores = self(hidden[..., row, :], logits[..., row, :], chosen[-1])
            chosen.append(candidates.gather(-1, scores.argmax(-1, keepdim=True))[..., 0])
        return torch.stack(chosen[1:], -1)


class MarkovHead(nn.Module):
    """A term for every token's logit, from the token before it; gated by the row, or with a state along the block."""

    def __init__(self, vocabulary: int, hidden: int, c: MarkovConfig) -> None:
        super().__init__()
        self.c = c
        self.markov_w1 = nn.Embedding(vocabulary, c.rank)
        self.markov_w2 = Linear(c.rank, vocabulary, wide=True)
        nn.init.zeros_(self.markov_w2.weight)
        if c.kind == "gated":
            self.gate_proj = nn.Linear(hidden + c.rank, c.rank)
        elif c.kind == "rnn":
            self.joint_proj = nn.Linear(2 * c.rank + hidden, 3 * c.rank)

    def start(self, first: torch.Tensor) -> torch.Tensor:
        """The state before the first row."""
        return self.markov_w1.weight.new_zeros(*first.shape, self.c.rank)

    def step(
        self, hidden: torch.Tensor, before: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Terms [..., V] of rows [..., H] after the tokens ``before`` [...], and the next state."""
        e = self.markov_w1(before)
        if self.c.kind == "gated":
            e = torch.sigmoid(self.gate_proj(torch.cat((hidden, e), -1))) * e
        elif self.c.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat((state, e, hidden), -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, e = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(out)
        return self.markov_w2(e).float(), state

    def forward(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Terms [..., K, V] of the rows [..., K, H] of blocks whose tokens before each row are known [..., K]."""
        if self.c.kind != "rnn":
            return self.step(hidden, before, self.start(before))[0]
        state, terms = self.start(before[..., 0]), []
        for row in range(hidden.shape[-2]):
            term, state = self.step(hidden[..., row, :], before[..., row], state)
            terms.append(term)
        return torch.stack(terms, -2)

    def walk(self, hidden: torch.Tensor, logits: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Tokens [..., K] of rows [..., K, H] with logits [..., K, V] after the token ``first`` [...]."""
        state, chosen = self.start(first), [first]
        for row in range(hidden.shape[-2]):
            term, state = self.step(hidden[..., row, :], chosen[-1], state)
            chosen.append((logits[..., row, :].float() + term).argmax(-1))
        return torch.stack(chosen[1:], -1)


class Confidence(nn.Module):
    """How likely a row's draft is accepted, as a logit; float32."""

    def __init__(self, hidden: int, c: MarkovConfig) -> None:
        super().__init__()
        self.reads_markov = c.confidence == "markov"
        self.proj = nn.Linear(hidden + c.rank * self.reads_markov, 1)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[...] of rows [..., H] and the Markov embedding [..., r] of the token before each."""
        row = torch.cat((hidden, embedded), -1) if self.reads_markov else hidden
        with torch.autocast(row.device.type, enabled=False):
            out: torch.Tensor = self.proj(row.float())[..., 0]
        return out
