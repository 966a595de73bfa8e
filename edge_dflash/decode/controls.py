"""What steers a running request from outside: its grammar, its deadline, who waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_dflash.decode.accept import FinishReason, cut
from edge_dflash.decode.constraint import Constraint
from edge_dflash.decode.pace import Pace
from edge_dflash.decode.relaxed import Relaxation


def _never() -> bool:
    return False


def _nowhere(tokens: Sequence[int]) -> int | None:
    return None


def _unspelled(token: int) -> bytes | None:
    return None


@dataclass(frozen=True)
class Controls:
    """What steers a running request. Only ``relaxation`` changes which tokens come; the rest decides when to end."""

    constraint: Constraint | None = None  # grammar, standing at the beginning of the answer
    relaxation: Relaxation | None = None  # lossy acceptance inside the thinking span
    deadline: float | None = None  # time.perf_counter() by which the last step must have ended
    cancelled: Callable[[], bool] = _never  # asked between cycles
    # Told all tokens in order, before they are committed: how many of them the answer still takes; None: it goes on.
    ends: Callable[[Sequence[int]], int | None] = _nowhere
    pace: Pace | None = None  # the engine's measured times; None: nothing is known, and drafting never rests
    # Called before every pass: the backend must hold the sequence's state when it returns. None: it always does.
    hold: Callable[[], None] | None = None
    cuts: tuple[int, ...] = ()  # lengths of the sequence, ascending, at which a chunk of the prompt has to end
    spell: Callable[[int], bytes | None] = _unspelled  # a token's text, for log-probabilities

    def cut(
        self, tokens: Sequence[int], stop_token_ids: Sequence[int], budget: int, at_budget: FinishReason
    ) -> tuple[list[int], FinishReason | None]:
        """Cut what may be committed by stop tokens and budget, then by ``ends``."""
        kept, reason = cut(tokens, stop_token_ids, budget, at_budget)
        end = self.ends(kept)
        return (kept, reason) if end is None else (kept[:end], "stop")

    def refuse(self, seconds: Callable[[], float]) -> FinishReason | None:
        """Why a pass that is expected to take ``seconds`` must not start now; None when it may."""
        if self.cancelled():
            return "cancelled"
        if self.deadline is not None and time.perf_counter() + seconds() > self.deadline:
            return "deadline"
        return None


NO_CONTROLS = Controls()
