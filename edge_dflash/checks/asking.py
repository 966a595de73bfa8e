"""Cycles asked in other ways than the loop asks them: of given drafts, of another number of drafts each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome, Rows
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.sampling import Packed


@dataclass(frozen=True)
class GivenDrafts:
    """Steers a cycle to given drafts, and nothing else."""

    tokens: list[int]
    tolerant: bool = False

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """See Steering."""
        return self.tokens

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Steering."""
        return [None] * (len(drafts) + 1)

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """See Steering."""
        return []


class ByTurns(Delegate):
    """``backend``, whose cycle c verifies at most c mod (K + 1) drafts: each number in turn, and none of them too."""

    def __init__(self, backend: Backend, start: int = 0) -> None:
        super().__init__(backend)
        self._cycle = start

    def cycle(self, asked: Asked) -> Cycle:
        """The backend's own cycle of fewer drafts."""
        return self._backend.cycle(self._fewer(asked))

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """The backend's own joint cycle, of fewer drafts in each lane."""
        return self._backend.cycles([self._fewer(one) for one in asked])

    def _fewer(self, asked: Asked) -> Asked:
        drafts = self._cycle % self.shape.verify_rows
        self._cycle += 1
        return replace(asked, drafts=drafts if asked.drafts is None else min(drafts, asked.drafts))
