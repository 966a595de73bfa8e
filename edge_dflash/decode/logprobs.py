"""How likely a token was, and which were likelier: log-probabilities of the target's own logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_ALTERNATIVES = 20
_GROUPS = 64  # of a row, of whose largest logits one bounds the search for alternatives


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely a token was, and which were likelier: natural logarithms, -inf for a token of logit -inf.

    The first token of a prompt, which nothing comes before, has NaN (``math.nan`` itself) and no others.
    """

    token: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()  # the most likely tokens, the best first, the lower id first on a tie
    text: bytes | None = None  # of the token: UTF-8, perhaps a part of a character; None without a tokenizer


def token_logprobs(
    logits: Callable[[], npt.NDArray[np.float32]],
    tokens: Sequence[int],
    alternatives: int,
    spell: Callable[[int], bytes | None] = lambda token: None,
    known: Callable[[], Sequence[float]] | None = None,
) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of ``tokens``, with the text that ``spell`` gives each.

    Row r of ``logits`` [at least len(tokens), V] is the distribution of ``tokens[r]``. Without ``alternatives`` it is
    not called where ``known`` gives those of the tokens.
    """
    if alternatives == 0 and known is not None:
        return tuple(TokenLogprob(token, one, (), spell(token)) for token, one in zip(tokens, known(), strict=False))
    return tuple(_of_row(row, token, alternatives, spell) for row, token in zip(logits(), tokens, strict=False))


def _of_row(
    row: npt.NDArray[np.float32], token: int, alternatives: int, spell: Callable[[int], bytes | None]
) -> TokenLogprob:
    """Terms of the sum are float32, everything else float64: an error below 1e-6 at any size of vocabulary."""
    best = row.max()
    with np.errstate(invalid="ignore"):  # a row that holds inf or NaN has no probabilities
        whole = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
        ids = _largest(row, alternatives).tolist()
        top = tuple(TokenLogprob(other, float(row[other]) - whole, (), spell(other)) for other in ids)
        return TokenLogprob(token, float(row[token]) - whole, top, spell(token))


def _largest(row: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Ids of the ``count`` largest logits, as a stable sort of the whole row has them, but 20 times as fast."""
    if count == 0:
        return np.empty(0, np.intp)
    width = len(row) // _GROUPS
    groups = row[: width * _GROUPS].reshape(_GROUPS, width).max(axis=0) if width >= count else row
    bound = np.partition(groups, -min(count, len(groups)))[-min(count, len(groups))]  # as many are at least as large
    ids = np.flatnonzero(row >= bound)
    return ids[np.argsort(-row[ids], kind="stable")][:count]
