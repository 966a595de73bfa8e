"""Accept lengths of answers, one for each verify: their mean, and the share of drafts accepted at each position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Acceptance:
    """What speculative decoding of some answers committed."""

    tokens: int  # after the first of each answer, which the prompt's pass gives
    cycles: int
    by_position: tuple[float, ...]  # of the cycles that could accept draft j and one token more, the share that did

    @property
    def mean(self) -> float:
        """Tokens for each verify, bonus token included."""
        return self.tokens / max(self.cycles, 1)


def accepted(answers: Iterable[Sequence[int]]) -> Acceptance:
    """The figures of answers, each given as the tokens committed by each verify, bonus token included."""
    made = [(length, sum(answer[i:])) for answer in answers for i, length in enumerate(answer)]  # and tokens left
    longest = max((length for length, _ in made), default=0)
    could = [[length for length, left in made if left > j + 1] for j in range(longest - 1)]
    shares = tuple(sum(length > j + 1 for length in lengths) / len(lengths) for j, lengths in enumerate(could))
    return Acceptance(sum(length for length, _ in made), len(made), shares)
