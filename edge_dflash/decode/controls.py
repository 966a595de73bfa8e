"""What steers a running request from outside: how long it may take, its grammar, the engine's measured pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_dflash.decode.accept import FinishReason, Relaxation
from edge_dflash.decode.steering import Constraint

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
    """Measured times of one engine, and what follows from them: may a pass start, does drafting pay. Not thread-safe.

    One Pace belongs to one loaded backend and outlives requests: the second request starts with the times of the first.
    """

    def __init__(self, *, fallback: bool = True) -> None:
        """``fallback`` False: cycles draft whether it pays or not."""
        self._fallback = fallback
        self._drafted, self._plain = _Cycles(), _Cycles()
        self._prefills: deque[tuple[int, float]] = deque(maxlen=RECENT)  # tokens, seconds
        self._resting = 0  # plain cycles left before drafting is tried again
        self._rest = REST

    @property
    def drafting(self) -> bool:
        """Whether the next cycle should draft; False while drafting was seen to cost more than it gives."""
        return not self._fallback or self._resting == 0

    def cycle_seconds(self, *, speculative: bool) -> float:
        """Longest of the recent cycles of a kind, else of the other kind; 0 before the first cycle."""
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

    def refuse(self, patience: Patience, seconds: Callable[[], float]) -> FinishReason | None:
        """Why a pass that is expected to take ``seconds`` must not start now; None when it may.

        By a deadline: of each kind the longest pass is forgotten, but never the last. Else one that took very long (a
        suspended machine) would have every request with a deadline refused, and nothing that is refused is measured.
        """
        reason = patience.refuse(seconds)
        if reason == "deadline":
            for cycles in (self._drafted, self._plain):
                if len(cycles) > 1:
                    cycles.remove(cycles.longest)
            if len(self._prefills) > 1:
                self._prefills.remove(max(self._prefills, key=lambda prefill: prefill[1] / prefill[0]))
        return reason

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


class Interrupted(Exception):
    """Waiting for a grammar was given up: no answer is wanted any more."""

    def __init__(self, reason: Literal["deadline", "cancelled"]) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Patience:
    """How long somebody waits."""

    deadline: float | None = None  # time.perf_counter() by which the last step must have ended
    cancelled: Callable[[], bool] = lambda: False  # asked between passes

    def refuse(self, seconds: Callable[[], float] = lambda: 0.0) -> Literal["cancelled", "deadline"] | None:
        """Why what is expected to take ``seconds`` must not start now; None when it may."""
        if self.cancelled():
            return "cancelled"
        if self.deadline is not None and time.perf_counter() + seconds() > self.deadline:
            return "deadline"
        return None

    def check(self) -> None:
        """Raise Interrupted when it is over."""
        if (reason := self.refuse()) is not None:
            raise Interrupted(reason)


ENDLESS = Patience()


@dataclass(frozen=True, kw_only=True)
class Controls(Patience):
    """What steers a running request. Only ``relaxation`` changes which tokens come; the rest decides when to end."""

    constraint: Constraint | None = None  # grammar, standing at the beginning of the answer
    relaxation: Relaxation | None = None  # lossy acceptance inside the thinking span
    # Told all tokens in order, before they are committed: how many of them the answer still takes; None: it goes on.
    ends: Callable[[Sequence[int]], int | None] = lambda tokens: None
    pace: Pace | None = None  # the engine's measured times; None: nothing is known, and drafting never rests
    spell: Callable[[int], bytes | None] = lambda token: None  # a token's text, for log-probabilities


NO_CONTROLS = Controls()
