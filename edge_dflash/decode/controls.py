"""What steers a running request from outside: how long it may take, its grammar, the engine's measured pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_dflash.decode.accept import FinishReason, Relaxation, cut
from edge_dflash.decode.steering import Constraint


class Interrupted(Exception):
    """Waiting for a grammar was given up: no answer is wanted any more."""

    def __init__(self, reason: Literal["deadline", "cancelled"]) -> None:
        super().__init__(reason)
        self.reason = reason


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Patience:
    """How long somebody waits for a grammar."""

    deadline: float | None = None  # time.perf_counter()
    cancelled: Callable[[], bool] = _never

    def check(self) -> None:
        """Raise Interrupted when it is over."""
        if self.cancelled():
            raise Interrupted("cancelled")
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise Interrupted("deadline")


ENDLESS = Patience()


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


RECENT = 32  # cycles that an estimate looks back on
PROBE = 4  # speculative cycles of a new try after plain decoding
REST = 32  # plain cycles before drafting is tried again; doubles up to REST_LIMIT while it does not pay
REST_LIMIT = 512
GAIN = 0.98  # drafting pays when its time a token is below this share of plain decoding's


@dataclass(frozen=True)
class CycleTime:
    """One measured cycle."""

    propose_seconds: float  # 0 when it was plain
    verify_seconds: float
    tokens: int  # committed

    @property
    def seconds(self) -> float:
        """The whole cycle."""
        return self.propose_seconds + self.verify_seconds


class _Cycles:
    """The last RECENT cycles of a kind, and their sums, which every cycle asks for."""

    def __init__(self) -> None:
        self._cycles: deque[CycleTime] = deque()
        self.seconds = self.verify_seconds = 0.0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._cycles)

    @property
    def longest(self) -> CycleTime:
        """The one that took longest."""
        return max(self._cycles, key=lambda cycle: cycle.seconds)

    def append(self, cycle: CycleTime) -> None:
        self._cycles.append(cycle)
        self._count(cycle, 1)
        if len(self._cycles) > RECENT:
            self._count(self._cycles.popleft(), -1)

    def remove(self, cycle: CycleTime) -> None:
        self._cycles.remove(cycle)
        self._count(cycle, -1)

    def _count(self, cycle: CycleTime, sign: int) -> None:
        self.seconds += sign * cycle.seconds
        self.verify_seconds += sign * cycle.verify_seconds
        self.tokens += sign * cycle.tokens


class Pace:
    """Recent cycle and prefill times. Not thread-safe."""

    def __init__(self) -> None:
        self._drafted, self._plain = _Cycles(), _Cycles()
        self._prefills: deque[tuple[int, float]] = deque(maxlen=RECENT)  # tokens, seconds
        self._resting = 0  # plain cycles left before drafting is tried again
        self._rest = REST

    @property
    def drafting(self) -> bool:
        """Whether the next cycle should draft; False while drafting was seen to cost more than it gives."""
        return self._resting == 0

    def cycle_seconds(self, *, speculative: bool) -> float:
        """Longest of the recent cycles of a kind; of the other kind when there is none; 0 when nothing is known."""
        cycles = (self._drafted if speculative else self._plain) or self._drafted or self._plain
        return cycles.longest.seconds if cycles else 0.0

    def prefill_seconds(self, tokens: int, chunk: int | None = None) -> float:
        """Estimate for a prompt of ``tokens`` in passes of ``chunk`` (None: in one pass); 0 when nothing is known.

        The next pass by the slowest rate of the recent ones, as it must end in time; those behind it by their mean.
        Passes of less than a quarter of its tokens do not count: they are mostly the fixed cost of a pass, and would
        have requests refused that could be served.
        """
        now = tokens if chunk is None else min(tokens, chunk)
        rates = [seconds / n for n, seconds in self._prefills if 4 * n >= now]
        return max(rates) * now + sum(rates) / len(rates) * (tokens - now) if rates else 0.0

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Note a measured pass over a part of a prompt."""
        self._prefills.append((tokens, seconds))

    def record_refusal(self, reason: FinishReason) -> None:
        """Note why no more pass was started. By a deadline: of each kind the longest is forgotten, but never the last.

        Else one pass that took very long (a suspended machine) would have every request with a deadline refused, and
        nothing that is refused is measured again.
        """
        if reason != "deadline":
            return
        for cycles in (self._drafted, self._plain):
            if len(cycles) > 1:
                cycles.remove(cycles.longest)
        if len(self._prefills) > 1:
            self._prefills.remove(max(self._prefills, key=lambda prefill: prefill[1] / prefill[0]))

    def record(self, cycle: CycleTime) -> None:
        """Note a measured cycle and decide how to go on.

        Drafting pays when (propose + verify) / accept length is below the time of a plain cycle, which reads the same
        weights once for one token; without a measured plain cycle, verify alone stands for it.
        """
        if cycle.propose_seconds == 0.0:
            self._plain.append(cycle)
            if self._resting:
                self._resting -= 1
                if self._resting == 0:
                    self._drafted = _Cycles()  # the new try is judged by itself
            return
        self._drafted.append(cycle)
        if len(self._drafted) >= PROBE and not self._pays():
            self._resting = self._rest
            self._rest = min(2 * self._rest, REST_LIMIT)
        elif len(self._drafted) == RECENT:
            self._rest = REST

    def _pays(self) -> bool:
        reference = self._plain or self._drafted
        plain = reference.verify_seconds / len(reference)
        return self._drafted.seconds / self._drafted.tokens < GAIN * plain
