"""What a benchmark forces: how many drafts each cycle accepts, and which experts each row of a block chooses."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import numpy.typing as npt

from edge_dflash.errors import RequestError

PROFILES = {"published": (0.854, 0.770, 0.713, 0.673, 0.642, 0.614)}
"""Share of cycles whose draft at a position is accepted, by position; behind them the last two's ratio goes on.

``published``: z-lab's drafter of Qwen3.6-35B-A3B, six positions, as vllm-project/speculators 761 reports them.
"""
_LONGEST_PERIOD = 100  # cycles of an accept pattern
_BLOCK, _BLOCKS = 32, 16  # cycles in which each quantile of a profile occurs once, and blocks of different orders


def accept_pattern(accept_length: float, rows: int) -> tuple[int, ...]:
    """Accepted drafts of each cycle, so that the mean of committed tokens (drafts + 1) is ``accept_length``.

    Only the two nearest lengths occur, evenly mixed; the mean is exact to 0.005. Raises RequestError outside 1..rows.
    """
    if not 1 <= accept_length <= rows:
        most = f"1..{rows}, the rows of a verify pass"
        raise RequestError(f"accept length {accept_length:g} is outside {most}; give one inside")
    periods = range(1, _LONGEST_PERIOD + 1)
    period = next(n for n in periods if abs(round(n * accept_length) / n - accept_length) <= 0.005)
    ends = [round(i * round(period * accept_length) / period) for i in range(period + 1)]
    return tuple(b - a - 1 for a, b in pairwise(ends))


def reached(profile: str, drafts: int) -> tuple[float, ...]:
    """Share of cycles that accept at least 1, 2, ... ``drafts`` drafts. Raises RequestError for an unknown profile."""
    if profile not in PROFILES:
        raise RequestError(f"--acceptance is {profile!r}; give one of {', '.join(PROFILES)}")
    shares = list(PROFILES[profile])
    while len(shares) < drafts:
        shares.append(shares[-1] * PROFILES[profile][-1] / PROFILES[profile][-2])
    return tuple(shares[:drafts])


def profile_pattern(profile: str, drafts: int) -> tuple[int, ...]:
    """Accepted drafts of each cycle by a profile: in every 32 cycles each quantile once, in another order.

    A cycle of fewer than ``drafts`` drafts accepts no more than it has, so that the profile holds for any number.
    """
    shares, random = reached(profile, drafts), Random(0)
    counts = [sum(share > (i + 0.5) / _BLOCK for share in shares) for i in range(_BLOCK)]
    return tuple(count for _ in range(_BLOCKS) for count in random.sample(counts, _BLOCK))


def routing(
    experts: int, chosen: int, correlation: float, positions: int = 1024, seed: int = 0
) -> npt.NDArray[np.int32]:
    """Experts that the token at each position chooses [positions, chosen], at random.

    ``correlation`` is the chance of each choice to be one of the same ``chosen`` experts for all: with 0 tokens choose
    independently, with 1 all the same. Raises RequestError outside 0..1.
    """
    if not 0.0 <= correlation <= 1.0:
        raise RequestError(f"--routing-correlation is {correlation:g}; give 0 (independent rows) to 1 (all rows alike)")
    rng, table = np.random.default_rng(seed), np.empty((positions, chosen), np.int32)
    common = rng.permutation(experts)[:chosen]
    for line in table:
        kept = common[rng.random(chosen) < correlation]
        others = rng.permutation(experts)
        others = others[~np.isin(others, kept)]
        line[:] = np.concatenate([kept, others[: chosen - len(kept)]])
    return table
