"""The choice of a token: a pure function of (logits row, sampling settings, seed, absolute position).

Greedy takes the argmax. With a temperature the choice is the argmax of ``logit / T + g`` over the filtered tokens,
with Gumbel noise g from a counter-based generator keyed by (seed, position, token id): the Gumbel-max trick, which
samples from softmax(logit / T). Nothing depends on how many rows were computed or on what was drawn before, so
speculative and plain decoding choose the same tokens, and a seed reproduces a plan. The drafter chooses with the same
noise at the same positions, so its drafts agree with the target's choice more often than independent draws would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import RequestError

if TYPE_CHECKING:
    from edge_dflash.decode.backend import Rows


Floats = npt.NDArray[np.float64]

Mask = npt.NDArray[np.bool_]
"""One flag for each token id: whether it may come next."""

Packed = npt.NDArray[np.uint32]
"""The same in ceil(V / 32) words: bit t % 32 of word t // 32 is token t, bits past the last token are 0."""


MIN_TEMPERATURE = 1e-4  # below, logits divided by it leave the range in which noise is of any effect


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 do not filter; top_k applies before top_p.

    A temperature below MIN_TEMPERATURE is 0.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise RequestError on a value outside its range."""
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}; give 0 (greedy) or more")
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; give 0 (no limit) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; give a value above 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; give 0 to 2**64 - 1")


GREEDY = Sampling()


@runtime_checkable
class Choosing(Protocol):
    """What rows may add: choosing tokens where the logits lie, as :func:`choose_row` does."""

    def choose(self, sampling: Sampling, position: int, masks: Sequence[Packed | None], first: int = 0) -> list[int]:
        """Tokens of rows first, first + 1, ..., one for each mask; row first + i chooses for ``position + i``."""


def choose(
    rows: Rows, sampling: Sampling, position: int, masks: Sequence[Packed | None] | None = None, *, first: int = 0
) -> list[int]:
    """Tokens of the rows from ``first`` on, one for each of ``masks`` (None: of all, and every token may come).

    Row first + i chooses for absolute position ``position + i``. Rows that choose by themselves do.
    """
    if masks is None and sampling.temperature == 0.0:
        return rows.argmax()[first:]
    masks = [None] * (len(rows) - first) if masks is None else masks
    if isinstance(rows, Choosing):
        return rows.choose(sampling, position, masks, first)
    logits = rows.logits()[first:]
    return [choose_row(logits[i], sampling, position + i, mask) for i, mask in enumerate(masks)]


def choose_row(row: npt.NDArray[np.float32], sampling: Sampling, position: int, mask: Packed | None = None) -> int:
    """Choice of one row of logits [V] for an absolute position, among those that its mask allows."""
    if mask is not None:
        row = np.where(unpack(mask, len(row)), row, np.float32(-np.inf))
    if sampling.temperature == 0.0:
        return int(row.argmax())
    return _sample(row, sampling, position)


def candidates(row: Floats, sampling: Sampling) -> npt.NDArray[np.intp]:
    """Ids that top_k and then top_p keep, of a row of logits.

    Tokens stand in the order of their logits, the lower id first on a tie. One is kept by top_p while the mass before
    it is below top_p times the mass of all that top_k keeps; the first always is. Mass is counted in integers
    (:func:`weights`), so that a sum does not depend on its order.
    """
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return np.arange(len(row))
    order = np.argsort(-row, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        until = np.cumsum(weights(row[order], sampling.temperature))
        before = np.concatenate(([np.uint64(0)], until[:-1]))
        order = order[before.astype(np.float64) < np.float64(until[-1]) * sampling.top_p]
    return order


_SERIES = [1.0 / factorial(k) for k in range(13, -1, -1)]  # of exp(r)


def weights(logits: Floats, temperature: float) -> npt.NDArray[np.uint64]:
    """round(2^40 exp((logit - logits[0]) / temperature)) of logits that do not exceed the first.

    Made of additions and multiplications alone, each rounded once: every machine gets the same bits.
    """
    x = (logits - logits[0]) / temperature
    there = x >= -29.0  # below, less than half a unit
    x = np.where(there, x, 0.0)
    n = np.rint(x * 1.4426950408889634)
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10  # x - n ln 2
    series = np.full_like(r, _SERIES[0])
    for factor in _SERIES[1:]:
        series = series * r + factor
    return np.where(there, np.rint(np.ldexp(series, 40 + n.astype(np.int64))), 0.0).astype(np.uint64)


def gumbel(seed: int, position: int, tokens: npt.NDArray[np.intp]) -> Floats:
    """Standard Gumbel noise for token ids at one position."""
    bits = philox(tokens.astype(np.uint64), position, seed)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32  # strictly inside (0, 1)
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def philox(tokens: npt.NDArray[np.uint64], position: int, seed: int) -> npt.NDArray[np.uint64]:
    """First word of Philox4x32-10 for counter (token, position, 0, 0) and the seed as key, one per token.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0 = tokens & low
    c1 = np.full_like(c0, position & 0xFFFFFFFF)
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


_LEAST = float(np.finfo(np.float32).min)


def _sample(row: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    wide = row.astype(np.float64)
    if not np.isfinite(wide.max()):  # sums of a bad drafter may overflow: it then proposes some token
        wide = np.nan_to_num(wide, nan=_LEAST, posinf=-_LEAST, neginf=_LEAST)
    ids = candidates(wide, sampling)
    score = wide[ids] / sampling.temperature + gumbel(sampling.seed, position, ids)
    best = ids[score == score.max()]
    return int(best.min())


def pack(mask: Mask) -> Packed:
    """Words of flags [V]."""
    words = np.zeros((len(mask) + 31) // 32, "<u4")
    little = np.packbits(mask, bitorder="little")
    words.view(np.uint8)[: len(little)] = little
    return words.astype(np.uint32, copy=False)


def unpack(words: Packed, count: int) -> Mask:
    """The first ``count`` flags of words."""
    little = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little, count=count, bitorder="little").view(np.bool_)
