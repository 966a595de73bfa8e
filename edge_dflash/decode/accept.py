"""The rules of acceptance: strict as pure functions of token ids, and relaxed inside a thinking span (lossy)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import RequestError

FinishReason = Literal["stop", "length", "context", "deadline", "cancelled"]


def accepted(drafts: Sequence[int], choices: Sequence[int], tolerated: Sequence[bool] = ()) -> int:
    """Number n of leading drafts that equal the target's own choices.

    ``choices[r]`` is the target's choice after verify row r; there is one more of them than there are drafts, and
    ``choices[n]`` is the bonus token that is committed with the n drafts. ``tolerated`` (lossy, one flag for each
    draft) lets a draft pass that differs.
    """
    for n, draft in enumerate(drafts):
        if draft != choices[n] and not (tolerated and tolerated[n]):
            return n
    return len(drafts)


@dataclass(frozen=True)
class Relaxation:
    """A draft is tolerated when it is among the ``top_k`` tokens and within ``margin`` logits of the best."""

    close_token_ids: tuple[int, ...] = ()  # tokens that close the thinking span; at least one
    top_k: int = 3
    margin: float = 1.0

    def __post_init__(self) -> None:
        """Raise RequestError on values that make no sense."""
        ids, top_k, margin = self.close_token_ids, self.top_k, self.margin
        if not isinstance(ids, Sequence) or not all(isinstance(one, Integral) for one in ids):
            raise RequestError(f"relaxed acceptance has close_token_ids {ids!r}; give a tuple of token ids")
        if not ids:
            raise RequestError(
                "relaxed acceptance needs a token that closes thinking, and this model's tokenizer has none or "
                "close_token_ids was left out; give close_token_ids, or relaxed=True for a model that thinks"
            )
        numbers = isinstance(top_k, Integral) and isinstance(margin, Real)
        if not numbers or isinstance(top_k, bool) or top_k < 1 or not 0.0 <= margin < float("inf"):
            raise RequestError(
                f"relaxed acceptance has top_k {top_k!r} and margin {margin!r}; "
                "give a top_k of at least 1 and a margin of at least 0 logits"
            )


class ThinkingSpan:
    """Follows one request: is the span still open, and which drafts of a block are tolerated."""

    def __init__(self, relaxation: Relaxation, stop_token_ids: Collection[int]) -> None:
        self._relaxation = relaxation
        self._closing = frozenset(relaxation.close_token_ids)
        self._strict = self._closing | frozenset(stop_token_ids)
        self._open = True

    def commit(self, tokens: Sequence[int]) -> None:
        """Note tokens that became final; the span never opens again."""
        self._open = self._open and self._closing.isdisjoint(tokens)

    def tolerated(self, logits: npt.NDArray[np.float32], drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """For each draft, whether it may stand although the target chose otherwise. ``logits`` is [rows, V]."""
        allowed = []
        is_open = self._open
        for row, (draft, choice) in enumerate(zip(drafts, choices, strict=False)):
            near = is_open and self._strict.isdisjoint((draft, choice)) and self._near(logits[row], draft)
            allowed.append(near)
            is_open = is_open and draft not in self._closing
        return allowed

    def _near(self, row: npt.NDArray[np.float32], draft: int) -> bool:
        better = int((row > row[draft]).sum())
        return better < self._relaxation.top_k and float(row.max() - row[draft]) <= self._relaxation.margin
