"""How many drafts a cycle verifies: the number that gives most tokens a second. It changes speed, never a token.

Two things are measured: the seconds of a cycle by its number of drafts, once at load and then by every cycle that runs,
and how often a draft stands, by position, in recent cycles. What is not seen fades: seconds to those of the load,
acceptance to that of the position before. So a number that was given up is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, mode

from edge_dflash.decode.backend import Asked, Backend
from edge_dflash.decode.shape import nearest, row_steps
from edge_dflash.errors import RequestError

DECAY = 0.985  # share of what was seen that is left one cycle later
WEIGHT = 2.0  # cycles that the position before counts as
FIRST = 0.8  # acceptance of the first position where nothing is known
START = 16.0  # cycles that the accept length at build counts as
GAIN = 0.99  # another number is taken when the time a token with it is below this share
EVERY = 8  # cycles between two choices; a new number is looked at sooner
SHARE = 0.1  # of a cycle's deviation that goes into all estimates of seconds
NEW, NEW_SHARE = 4, 0.3  # cycles after a change of the number, whose deviation goes into its own estimate alone
REPEATS = 7  # measured cycles of each number at load
LEAST_MORE = 0.01  # of a plain token that a draft's row costs, where rows choose what is read
SLOWER = 0.25  # how fast that share fades while nothing is drafted, of how fast other things do
STRIDE = 7919  # between the ids of their anchors
LIMIT_SECONDS = 2.0  # of measuring one lane at load, about, and of all other numbers of lanes together


@dataclass(frozen=True)
class Drafting:
    """What became of the drafts of a request, cycle by cycle."""

    drafts: tuple[int, ...] = ()  # verified
    accepted: tuple[int, ...] = ()  # of them, those that a stop or the budget cut away included

    def __add__(self, other: Drafting) -> Drafting:
        """The cycles of both."""
        return Drafting(self.drafts + other.drafts, self.accepted + other.accepted)

    @property
    def usual(self) -> int:
        """Drafts that most cycles verified; 0 without a cycle."""
        return mode(self.drafts) if self.drafts else 0

    @property
    def accept_length(self) -> float:
        """Tokens of a cycle, mean; 0 without one."""
        return 1.0 + sum(self.accepted) / len(self.accepted) if self.accepted else 0.0

    @property
    def mean(self) -> float:
        """Drafts that a cycle verified."""
        return sum(self.drafts) / len(self.drafts) if self.drafts else 0.0

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        """For each position of a block: cycles that verified its draft, and those of them that accepted it."""
        return tuple(
            (sum(drafts > at for drafts in self.drafts), sum(accepted > at for accepted in self.accepted))
            for at in range(max(self.drafts, default=0))
        )

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of its verified drafts that were accepted, by position."""
        return tuple(accepted / drafts for drafts, accepted in self.positions)


NO_DRAFTING = Drafting()


class Acceptance:
    """How often a draft is accepted after accepted ones, by position, in recent cycles."""

    def __init__(self, most: int) -> None:
        self._tried, self._stood = [0.0] * (most + 1), [0.0] * (most + 1)  # cycles by how many drafts were so
        self._weight = 1.0  # of the next cycle: those before it have less

    def begin(self, accept_length: float) -> None:
        """Start as if a few cycles of this accept length had just run; they fade as cycles do."""
        most = len(self._stood) - 1
        share = share_of(accept_length, most)
        for stood in range(most + 1):
            cycles = START * share**stood * (1.0 if stood == most else 1.0 - share)
            self._tried[min(stood + 1, most)] += cycles
            self._stood[stood] += cycles

    def record(self, drafts: int, accepted: int) -> None:
        """Note a cycle that verified ``drafts`` and accepted some."""
        self._tried[min(accepted + 1, drafts)] += self._weight
        self._stood[accepted] += self._weight
        self._weight /= DECAY

    def tokens(self) -> list[float]:
        """Expected tokens of a cycle that verifies 0, 1, ... drafts."""
        weight, self._weight = self._weight, 1.0
        self._tried = [tried / weight for tried in self._tried]
        self._stood = [stood / weight for stood in self._stood]
        share, reaches, expected = FIRST, 1.0, [1.0]
        tried, stood = sum(self._tried), sum(self._stood)
        for tried_less, stood_less in zip(self._tried, self._stood[:-1], strict=False):
            tried, stood = tried - tried_less, stood - stood_less
            share = (stood + WEIGHT * share) / (tried + WEIGHT)
            reaches *= min(share, 1.0)
            expected.append(expected[-1] + reaches)
        return expected


def share_of(accept_length: float, most: int) -> float:
    """The acceptance, the same at each of ``most`` positions, that gives an accept length."""
    low, high = 0.0, 1.0
    for _ in range(20):
        share = (low + high) / 2
        low, high = (share, high) if sum(share**n for n in range(most + 1)) < accept_length else (low, share)
    return low


class Seconds:
    """Seconds of a cycle by its number of drafts."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """``measured`` at load, and may be empty: then a number is known when a cycle ran with it."""
        self._measured, self._deviation, self._scale = dict(measured), dict.fromkeys(measured, 1.0), 1.0
        self._verify = 0.0  # of the last cycle that drafted: stands for plain decoding that was not measured
        self._last, self.runs = -1, 0  # the number of the last cycles, and how many of them

    def of(self, drafts: int) -> float:
        """The estimate; of a number that was not measured, that of the next one above, else below."""
        if drafts in self._measured:
            return self._scale * self._measured[drafts] * self._deviation[drafts]
        if drafts == 0:
            return self._verify
        return self.of(nearest([one for one in self._measured if one] or [0], drafts)) if self._measured else 0.0

    def record(self, drafts: int, propose_seconds: float, verify_seconds: float) -> None:
        """Note a cycle."""
        seconds = propose_seconds + verify_seconds
        self.runs = self.runs + 1 if drafts == self._last else 1
        self._last, self._verify = drafts, verify_seconds if drafts else self._verify
        if drafts not in self._measured:
            self._measured[drafts], self._deviation[drafts] = seconds / self._scale, 1.0
        excess = min(2.0, max(0.5, seconds / self.of(drafts))) - 1.0 if seconds > 0.0 else 0.0
        if self.runs <= NEW:
            self._deviation[drafts] *= 1.0 + NEW_SHARE * excess
        else:
            self._scale *= 1.0 + SHARE * excess

    def fade(self, left: float) -> None:
        """Leave so much of what was noticed of single numbers."""
        self._deviation = {one: 1.0 + left * (share - 1.0) for one, share in self._deviation.items()}


class VaryingSeconds(Seconds):
    """Seconds of a cycle where its tokens say what is read: a target with experts.

    A token without drafts costs the same whatever it is; how much more rows cost is learned, as a share of how much
    more they cost at load. The machine's own pace is that of drafting, which is the same for all tokens.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        super().__init__(measured)
        self._growth, self._propose = 1.0, 0.0  # the share; seconds of drafting at the pace of the load

    def of(self, drafts: int) -> float:
        """The estimate; see :class:`Seconds` for what was not measured."""
        if drafts == 0 or not {0, drafts} <= self._measured.keys():
            return super().of(drafts)
        return self._scale * (self._measured[0] + self._propose + self._growth * self._more(drafts))

    def record(self, drafts: int, propose_seconds: float, verify_seconds: float) -> None:
        """Note a cycle."""
        if drafts == 0 or not {0, drafts} <= self._measured.keys():
            super().record(drafts, propose_seconds, verify_seconds)
            return
        self.runs = self.runs + 1 if drafts == self._last else 1
        self._last, self._verify = drafts, verify_seconds
        self._propose = self._propose or propose_seconds / self._scale
        seconds, more = self.of(drafts), self._more(drafts)
        if self._propose > 0.0:
            self._scale *= 1.0 + SHARE * (min(2.0, max(0.5, propose_seconds / self._scale / self._propose)) - 1.0)
        excess = min(2.0, max(0.5, (propose_seconds + verify_seconds) / seconds)) - 1.0
        share = NEW_SHARE if self.runs <= NEW else SHARE
        self._growth = max(0.0, self._growth + share * excess * seconds / self._scale / more)

    def fade(self, left: float) -> None:
        """What was learned stays, being of the tokens and not of single numbers; slowly less while none is drafted."""
        if self._last == 0:
            self._growth = 1.0 + left**SLOWER * (self._growth - 1.0)

    def _more(self, drafts: int) -> float:
        """What the rows of this number of drafts cost more than one row at load, without drafting them."""
        least = LEAST_MORE * self._measured[0] * drafts
        return max(self._measured[drafts] - self._measured[0] - self._propose, least)


class DraftChoice:
    """The number of drafts of the next cycle, for one number of lanes. Of one loaded backend; outlives requests."""

    def __init__(
        self, most: int, measured: Mapping[int, float] | None = None, acceptance: Acceptance | None = None
    ) -> None:
        """``most``: of the pair; ``measured``: see :func:`measure`; ``acceptance`` may be another choice's, too."""
        self.drafts = most  # of the next cycle
        self._steps = [rows - 1 for rows in row_steps(most + 1)]
        self.acceptance, self.seconds = acceptance or Acceptance(most), Seconds(measured or {})
        self._cycles = 0

    def begin(
        self, backend: Backend, accept_length: float | None, lanes: int = 1, limit: float = LIMIT_SECONDS
    ) -> None:
        """Measure the seconds on a backend that nobody uses yet, and start from an accept length that was seen."""
        self.seconds = (VaryingSeconds if backend.shape.varying else Seconds)(measure(backend, lanes, limit))
        if accept_length is not None:
            self.acceptance.begin(accept_length)

    def record(self, asked: int, drafts: int, accepted: int, propose_seconds: float, verify_seconds: float) -> None:
        """Note a cycle that was asked for ``asked`` drafts, verified some and accepted some of those; choose anew."""
        self.acceptance.record(drafts, accepted)
        self.seconds.record(asked, propose_seconds, verify_seconds)
        self._cycles += 1
        if self._cycles % EVERY == 0 or self.seconds.runs == NEW:
            tokens, of = self.acceptance.tokens(), self.seconds.of
            cost = {step: of(step) / tokens[step] for step in self._steps}
            self.seconds.fade(DECAY**EVERY)
            best = min(cost, key=cost.__getitem__)
            if cost[best] < GAIN * cost[self.drafts]:
                self.drafts = best


def draft_choice(most: int, drafts: int | None, *, measured: bool) -> DraftChoice | int | None:
    """What a pace needs: ``drafts`` if they are given, else the choice, or without ``measured`` None (all).

    Raises RequestError for more drafts than a cycle of the pair has.
    """
    if drafts is not None and drafts > most:
        raise RequestError(f"drafts is {drafts}, a cycle of this bundle has {most}; give 0 to {most}, or None")
    return DraftChoice(most) if drafts is None and measured else drafts


def measure(backend: Backend, lanes: int = 1, limit: float = LIMIT_SECONDS) -> dict[int, float]:
    """Seconds of a cycle of ``lanes`` lanes by its number of drafts, each the median of a few on empty sequences.

    The anchors are different tokens, as what rows cost may depend on them. After ``limit`` seconds each number that is
    left has one cycle. Empty where the context has no room. Resets the backend.
    """
    shape, found, began = backend.shape, dict[int, float](), time.perf_counter()
    if shape.usable_context < 2 + REPEATS:
        return found
    for rows in row_steps(shape.verify_rows):
        for lane in range(lanes):
            backend.reset(lane)
            backend.prefill([0], lane).argmax()
        times = []
        for at in range(1 + REPEATS):
            start = time.perf_counter()
            anchors = ((lane, (at * lanes + lane) * STRIDE % shape.vocab_size) for lane in range(lanes))
            asked = [Asked(anchor, drafts=rows - 1, lane=lane) for lane, anchor in anchors]
            _ = backend.cycles(asked) if lanes > 1 else backend.cycle(*asked)
            for lane in range(lanes):
                backend.commit(1, lane)
            times.append(time.perf_counter() - start)
            if time.perf_counter() - began > limit:
                break
        found[rows - 1] = median(times[1:] or times)
    for lane in range(lanes):
        backend.reset(lane)
    return found
