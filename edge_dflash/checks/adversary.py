"""Drafters made to break the loop: a Backend whose ``propose`` is replaced and nothing else.

With the plain continuation known, they can force every accept length on demand: always wrong, an oracle, an oracle
that goes wrong after j drafts (the same j in every cycle, or another one each time), and noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.host import Delegate, host_cycle
from edge_dflash.decode.backend import Asked, Backend, Cycle, PairShape, Rows
from edge_dflash.decode.sampling import Packed

SURE = 1e30  # a logit that no temperature, filter or noise outvotes

Drafter = Callable[[int, Sequence[int], PairShape], list[int]]
"""(cycle, the true next B - 1 tokens, shape) -> B - 1 drafts."""


@dataclass(frozen=True)
class TokenRows:
    """Rows that choose the given tokens at any temperature."""

    tokens: tuple[int, ...]
    vocab_size: int

    def __len__(self) -> int:
        return len(self.tokens)

    def argmax(self) -> list[int]:
        """Return the tokens."""
        return list(self.tokens)

    def logits(self) -> npt.NDArray[np.float32]:
        """Logits [rows, V] float32: SURE for the token, 0 for all others."""
        rows = np.zeros((len(self.tokens), self.vocab_size), np.float32)
        rows[np.arange(len(self.tokens)), self.tokens] = SURE
        return rows


class Adversary(Delegate):
    """``backend`` with its drafter replaced. ``sequence`` is the prompt followed by the plain continuation."""

    def __init__(self, backend: Backend, sequence: Sequence[int], drafter: Drafter) -> None:
        super().__init__(backend)
        self._sequence = list(sequence)
        self._drafter = drafter
        self._cycle = 0

    def cycle(self, asked: Asked) -> Cycle:
        """The backend's own cycle, with other drafts: what a device accepts and commits is tried, too."""
        if asked.steering is not None or not asked.drafting:
            return host_cycle(self, asked)
        return self._backend.cycle(replace(asked, steering=_Drafts(self._next(asked.lane))))

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """Rows that choose the adversary's drafts."""
        return TokenRows(tuple(self._next(lane)), self.shape.vocab_size)

    def _next(self, lane: int) -> list[int]:
        """Drafts of the adversary; past the known continuation the true token is taken to be 0."""
        shape, first = self.shape, self.length(lane) + 1
        truth = self._sequence[first : first + shape.block_size - 1]
        truth += [0] * (shape.block_size - 1 - len(truth))
        drafts = self._drafter(self._cycle, truth, shape)
        self._cycle += 1
        return drafts


@dataclass(frozen=True)
class _Drafts:
    """Steers a cycle to given drafts, and nothing else."""

    tokens: list[int]
    tolerant: bool = False

    def drafts(self, rows: Rows, position: int) -> list[int]:
        return self.tokens

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        return [None] * (len(drafts) + 1)

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        return []


def oracle_until(right: int) -> Drafter:
    """The first ``right`` drafts are true and the next is not: every cycle commits ``right`` + 1 tokens."""

    def drafts(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
        return [*truth[:right], *((token + 1) % shape.vocab_size for token in truth[right:])]

    return drafts


def always_wrong(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
    """No draft is ever accepted."""
    return oracle_until(0)(cycle, truth, shape)


def oracle(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
    """Every draft is accepted."""
    return list(truth)


def staircase(start: int = 0) -> Drafter:
    """Cycle c accepts (start + c) mod B drafts, so B cycles go through every accept length."""

    def drafts(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
        return oracle_until((start + cycle) % shape.block_size)(cycle, truth, shape)

    return drafts


def noise(seed: int = 0) -> Drafter:
    """Half of the drafts true, half random, drawn anew for every cycle."""

    def drafts(cycle: int, truth: Sequence[int], shape: PairShape) -> list[int]:
        random = np.random.default_rng((seed, cycle))
        return [
            token if random.random() < 0.5 else int(random.integers(shape.vocab_size))  # a coin, then an id
            for token in truth
        ]

    return drafts


def drafters(run: int, runs: int, block_size: int) -> dict[str, Drafter]:
    """Adversaries for one of ``runs`` generations; the staircases of all of them together start all over the block."""
    return {
        "always_wrong": always_wrong,
        "oracle": oracle,
        "staircase": staircase(run * block_size // runs),
        "noise": noise(run),
    }
