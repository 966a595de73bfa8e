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

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.base import Rows
from edge_dflash.errors import RequestError
from edge_dflash.spec.constraint import Mask

Floats = npt.NDArray[np.float64]


MIN_TEMPERATURE = 1e-4  # below, logits divided by it leave the range in which noise is of any effect


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 do not filter; top_k applies before top_p."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise RequestError on a value outside its range."""
        for name, kinds in (
            ("temperature", (int, float)),
            ("top_k", (int,)),
            ("top_p", (int, float)),
            ("seed", (int,)),
        ):
            if type(getattr(self, name)) not in kinds:
                raise RequestError(
                    f"{name} is {getattr(self, name)!r}; give a number{'' if float in kinds else ' without a fraction'}"
                )
        if self.temperature != 0.0 and not MIN_TEMPERATURE <= self.temperature < float("inf"):
            raise RequestError(f"temperature is {self.temperature}; give 0 (greedy) or at least {MIN_TEMPERATURE}")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; give 0 (no limit) or a positive count")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; give a value above 0 and at most 1")
        if not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; give 0 to 2**64 - 1")


def choose(rows: Rows, sampling: Sampling, position: int, masks: Sequence[Mask | None] | None = None) -> list[int]:
    """Token of each row; row r chooses for absolute position ``position + r``, among those that its mask allows."""
    if masks is None and sampling.temperature == 0.0:
        return rows.argmax()
    logits = rows.logits()
    return [
        choose_row(row, sampling, position + r, None if masks is None else masks[r]) for r, row in enumerate(logits)
    ]


def choose_row(row: npt.NDArray[np.float32], sampling: Sampling, position: int, mask: Mask | None = None) -> int:
    """Choice of one row of logits [V] for an absolute position."""
    if mask is not None:
        row = np.where(mask, row, np.float32(-np.inf))
    if sampling.temperature == 0.0:
        return int(row.argmax())
    return _sample(row, sampling, position)


def candidates(row: Floats, sampling: Sampling) -> npt.NDArray[np.intp]:
    """Ids that top_k and then top_p keep, of a row of logits already divided by the temperature."""
    if sampling.top_k == 0 and sampling.top_p == 1.0:
        return np.arange(len(row))
    order = np.argsort(-row, kind="stable")  # the lower id first on a tie
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        weights = np.exp(row[order] - row[order[0]])
        mass_before = (np.cumsum(weights) - weights) / weights.sum()
        order = order[mass_before < sampling.top_p]  # the first is always kept
    return order


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


def _sample(row: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    scaled = row.astype(np.float64) / sampling.temperature
    ids = candidates(scaled, sampling)
    score = scaled[ids] + gumbel(sampling.seed, position, ids)
    best = ids[score == score.max()]
    return int(best.min())
