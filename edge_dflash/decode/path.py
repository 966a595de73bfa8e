"""Choosing tokens along a path: free, or under a grammar that walks with the drafts."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.decode.backend import Rows, Steering
from edge_dflash.decode.constraint import Constraint, Packed
from edge_dflash.decode.relaxed import Relaxation, ThinkingSpan
from edge_dflash.decode.sampling import Sampling, choose


class Path:
    """The choices of one request.

    With a grammar, drafts that it forbids are replaced before they are verified and tokens that it forces are
    proposed without asking the drafter; both only raise the accept length. The target's own choice at every row is
    made among the tokens that the grammar allows there, whatever was drafted, so constrained speculative decoding
    equals constrained plain decoding. A grammar that becomes too complex along the drafts ends the path there: plain
    decoding may never come that way, and where it does, it fails in the same place.
    """

    def __init__(
        self,
        sampling: Sampling,
        constraint: Constraint | None,
        relaxation: Relaxation | None,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._stop = frozenset(stop_token_ids)
        self._thinking = ThinkingSpan(relaxation, stop_token_ids) if relaxation is not None else None

    @property
    def steering(self) -> Steering | None:
        """What a cycle asks the host; None where logits and sampling alone make every choice."""
        return None if self._constraint is None and self._thinking is None else self

    @property
    def tolerant(self) -> bool:
        """Whether acceptance is relaxed."""
        return self._thinking is not None

    def first(self, rows: Rows, position: int) -> int:
        """The choice behind the prompt, for ``position``; ``rows`` has one row."""
        masks = self.masks(()) if self._constraint is not None else None
        return choose(rows, self.sampling, position, masks)[0]

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """Draft tokens for positions ``position``, ...; fewer than rows when the grammar ends or gives up before.

        The drafter is asked once more at the first draft that is refused where nothing is forced; at the second the
        path ends. Behind the first the block has mostly parted from what was drafted (out of its domain the demo pair
        commits 3.74 tokens a cycle asked once, as asked each time, and 3.58 not asked), and each asking is a wait.
        """
        free = choose(rows, self.sampling, position)
        if self._constraint is None:
            return free
        asked = False

        def ask(row: int, mask: Packed | None) -> int | None:
            nonlocal asked
            if asked:
                return None
            asked = True
            return choose(rows, self.sampling, position + row, [mask], first=row)[0]

        path = self._constraint.walk(free, ask)
        return path[: self._stops_at(path) + 1]

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """What may follow the anchor and each draft; fewer where the grammar gives up on the way."""
        if self._constraint is None:
            return [None] * (len(drafts) + 1)
        end = self._stops_at(drafts)  # nothing follows a stop token, and nothing is chosen there
        masks = self._constraint.masks(drafts[:end])
        return masks + [None] * (len(drafts) - end) if len(masks) > end else masks

    def _stops_at(self, tokens: Sequence[int]) -> int:
        """Where the first stop token is; behind all tokens when none is."""
        return next((at for at, token in enumerate(tokens) if token in self._stop), len(tokens))

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """Which drafts are nearly as good as the choices (lossy)."""
        return [] if self._thinking is None else self._thinking.tolerated(rows.logits(), drafts, choices)

    def commit(self, tokens: Sequence[int]) -> None:
        """Walk over tokens that became final."""
        if self._constraint is not None:
            self._constraint.advance(tokens)
        if self._thinking is not None:
            self._thinking.commit(tokens)
