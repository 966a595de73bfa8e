"""The rules of acceptance, as pure functions of token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

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


def cut(
    tokens: Sequence[int], stop_token_ids: Collection[int], budget: int, at_budget: FinishReason
) -> tuple[list[int], FinishReason | None]:
    """Keep tokens up to the first stop token (kept) or the budget; return them and why generation ends, if it does."""
    for index, token in enumerate(tokens[:budget]):
        if token in stop_token_ids:
            return list(tokens[: index + 1]), "stop"
    if len(tokens) >= budget:
        return list(tokens[:budget]), at_budget
    return list(tokens), None
