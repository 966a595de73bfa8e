"""What steers a running request from outside: how long it may take, its grammar, the engine's measured pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_dflash.decode.accept import FinishReason, Relaxation
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.drafts import LIMIT_SECONDS, DraftChoice
from edge_dflash.decode.shape import lane_steps, nearest
from edge_dflash.decode.steering import Constraint

RECENT = 32  # cycles that an estimate looks back on


class _Recent:
    """Seconds of the last RECENT passes of a kind, and their rows; a cycle counts as one row."""

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=RECENT)

    def append(self, rows: int, seconds: float) -> None:
        """Note a measured pass."""
        self._passes.append((rows, seconds))

    @property
    def longest(self) -> float:
        """Seconds of the longest one; 0 before the first."""
        return max((seconds for _, seconds in self._passes), default=0.0)

    def estimate(self, rows: int, most: int | None) -> float:
        """Seconds of ``rows`` in passes of at most ``most`` (None: of all); see :meth:`Pace.prefill_seconds`."""
        now = rows if most is None else min(rows, most)
        rates = [seconds / n for n, seconds in self._passes if 4 * n >= now]
        return max(rates) * now + sum(rates) / len(rates) * (rows - now) if rates else 0.0

    def forget_slowest(self) -> None:
        """Forget the pass of the slowest rate, but never the last pass."""
        if len(self._passes) > 1:
            self._passes.remove(max(self._passes, key=lambda one: one[1] / one[0]))


class Pace:
    """Measured times of one engine, and what follows: may a pass start, how many drafts pay. Not thread-safe.

    One Pace belongs to one loaded backend and outlives requests: the second request starts with the times of the first.
    """

    def __init__(self, drafts: DraftChoice | int | None = None) -> None:
        """``drafts`` of a cycle: chosen by what is measured, always the same number, or (None) always all."""
        self.load = 1  # sequences of the next cycle
        self._choice = drafts
        self._choices = {1: drafts} if isinstance(drafts, DraftChoice) else {}  # by load
        self._cycles: dict[tuple[int, bool], _Recent] = {}  # by load, and whether they drafted
        self.prefills, self.towers = _Recent(), _Recent()  # parts of prompts; pictures that the vision tower saw
        self.told = _Recent()  # cycles that were told their tokens, of which no other estimate learns

    @property
    def drafts(self) -> int | None:
        """Most drafts of the next cycle; None: all. 0 while drafting was seen to cost more than it gives."""
        return choice.drafts if (choice := self._chooser) else self._choice if isinstance(self._choice, int) else None

    @property
    def _chooser(self) -> DraftChoice | None:
        """That of the load, or of the next one above that was measured."""
        return self._choices[nearest(self._choices, self.load)] if self._choices else None

    def begin(self, backend: Backend, accept_length: float | None) -> None:
        """Measure a backend that nobody uses yet, where numbers of drafts are chosen; see :class:`DraftChoice`."""
        if not isinstance(self._choice, DraftChoice):
            return
        self._choice.begin(backend, accept_length)
        loads = lane_steps(backend.shape.lanes)[1:]
        for lanes in loads:
            self._choices[lanes] = choice = DraftChoice(backend.shape.drafts, acceptance=self._choice.acceptance)
            choice.begin(backend, None, lanes, LIMIT_SECONDS / len(loads))

    def cycle_seconds(self, *, speculative: bool) -> float:
        """Longest of the recent cycles of a kind at this load, else of what is nearest; 0 before the first cycle."""
        loads = [load for load, drafted in self._cycles if drafted == speculative] or [load for load, _ in self._cycles]
        if not loads:
            return 0.0
        load = nearest(loads, self.load)
        return (self._cycles.get((load, speculative)) or self._cycles[load, not speculative]).longest

    def prefill_seconds(self, tokens: int, chunk: int | None = None) -> float:
        """Estimate for a prompt of ``tokens`` in passes of ``chunk`` (None: in one pass); 0 when nothing is known.

        The next pass by the slowest rate of the recent ones, as it must end in time; those after it by their mean.
        Passes of less than a quarter of its tokens do not count: they are mostly the fixed cost of a pass, and would
        have requests refused that could be served.
        """
        return self.prefills.estimate(tokens, chunk)

    def refuse(self, patience: Patience, seconds: Callable[[], float]) -> FinishReason | None:
        """Why a pass that is expected to take ``seconds`` must not start now; None when it may.

        By a deadline: of each kind the longest pass is forgotten, but never the last. Else one that took very long (a
        suspended machine) would have every request with a deadline refused, and nothing that is refused is measured.
        """
        reason = patience.refuse(seconds)
        if reason == "deadline":
            for recent in (*self._cycles.values(), self.prefills, self.towers, self.told):
                recent.forget_slowest()
        return reason

    def record(
        self,
        propose_seconds: float,
        verify_seconds: float,
        asked: int | None = None,
        drafts: int = 0,
        accepted: int = 0,
    ) -> None:
        """Note a measured cycle, plain if it proposed in 0 seconds, of which the choice of drafts learns.

        ``asked``: drafts that this pace had chosen; None: the number was not of its choice. ``drafts``: verified.
        """
        kind = self.load, propose_seconds > 0.0
        self._cycles.setdefault(kind, _Recent()).append(1, propose_seconds + verify_seconds)
        if (choice := self._chooser) and asked is not None:
            choice.record(asked, drafts, accepted, propose_seconds, verify_seconds)


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
    # Told all tokens in order, before they are committed: how many of them the answer still takes; None: it continues.
    ends: Callable[[Sequence[int]], int | None] = lambda tokens: None
    pace: Pace | None = None  # the engine's measured times; None: nothing is known, and cycles verify all drafts
    spell: Callable[[int], bytes | None] = lambda token: None  # a token's text, for log-probabilities


NO_CONTROLS = Controls()
