"""The self-test of a bundle: whether a loaded pair still computes what it computed when it was built.

A bundle carries ``selftest.json``: a prompt, the target's plain greedy tokens, and for each cycle what the pair's own
drafter proposed. Opening a bundle replays these passes along the *recorded* tokens, so that one differing choice does
not carry all later ones away, and compares these things:

- tokens: the target's choices. They must be equal where the recording's arithmetic promises the same bits. Elsewhere
  rounding may change a choice: it did if the best logits of the median row moved at most ``ROUNDING`` times as far as
  rounding moved them at build (BF16 against float32 activations), and those of any row ``ROUNDING_MOST`` times.
- drafts: equal where bits are promised; elsewhere ``DRAFT_FLOOR`` of them. This sees what an accept length hardly
  shows (taps off by one): the demo pair keeps 93 % of its drafts when activations and KV are rounded in another way,
  and at most 67 % with taps, theta or weights that are wrong.
- accept length: at least 70 % of the one seen at build, and never less than 1.
- log-probabilities of two lines: they move at most 3 times as far as rounding moved them at build. This sees
  faults that change no choice.
- rows of one picture, where the target has a vision tower: see :mod:`edge_dflash.bundle.selftest`.

:func:`check_acceptance` runs the loop's own cycles on the same prompt instead, and judges what comes of the drafts, in
all and at each position of a block that enough cycles have tried.

It cannot see what the recording cannot show: a drafter whose config was wrong at build time already (the build warns
when its accept length is low), a window longer than the prompt, or a fault that changes no choice of this prompt.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from operator import eq
from typing import Any, Literal

from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import (
    FLOOR_SHARE,
    SELFTEST,
    Moved,
    SelfTest,
    bf16_step,
    chart,
    load_selftest,
)
from edge_dflash.common.tables import finite
from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.replay import replay as replayed
from edge_dflash.decode.replay import scored
from edge_dflash.errors import BackendError, VerificationError
from edge_dflash.model.specs import VisionSpec

Mode = Literal["refuse", "warn", "off"]
MODES: tuple[Mode, ...] = ("refuse", "warn", "off")
DRAFT_FLOOR = 0.8  # share of the drafts, where bits are not promised
CYCLES = 12  # that must have tried a position, here and at build, for it to be judged
ERRORS = 2.0  # standard errors that a position's share may lie below FLOOR_SHARE of the one at build
ROUNDING = 3.0  # times the rounding seen at build: the most that the logits of the median row may move
ROUNDING_MOST = 8.0  # the same of single rows: one rounding that tips over moves a whole row


@dataclass(frozen=True)
class TokenDifference:
    """A choice of the target that is not the recorded one."""

    position: int  # index of the new token
    found: int
    wanted: int
    regret: float  # logit of the choice made here minus logit of the recorded token; NaN when logits are not numbers
    steps: float  # the same in BF16 steps of the choice's logit


@dataclass(frozen=True)
class SelfTestResult:
    """The outcome of one replay."""

    recorded: SelfTest  # without its drafts, where the drafter was not asked
    exact: bool  # whether bits were promised, so that everything had to be equal
    differences: tuple[TokenDifference, ...]
    drafts_equal: int
    accept_length: float  # drafts made here that the recorded tokens confirm, plus one, mean of the cycles
    seconds: float
    moved: float  # how far the best logits moved against each other: the median row's share of its spread
    moved_most: float  # and that of the row where they moved most; NaN when a logit is not a number
    tower: Moved | None = None  # of a pair with a vision tower
    lines_moved: tuple[float, ...] = ()  # of the scored lines, see ScoredLine.moved

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.recorded.tokens)

    @property
    def drafts(self) -> int:
        """Number of drafts."""
        return self.recorded.drafted

    @property
    def floor(self) -> float:
        """Least accept length that passes."""
        return self.recorded.accept_floor

    @property
    def draft_agreement(self) -> float:
        """Share of drafts that are the recorded ones."""
        return self.drafts_equal / self.drafts if self.drafts else 1.0

    @property
    def identical(self) -> bool:
        """Whether nothing at all differs."""
        rest = (*self.lines, *([self.tower] if self.tower else []))
        return all(one.identical for one in rest) and not self.differences and self.drafts_equal == self.drafts

    @property
    def target_ok(self) -> bool:
        """Whether the target's choices pass."""
        if self.exact or not self.differences:
            return not self.differences
        return self.moved <= self.bound and self.moved_most <= self.bound_most  # False for NaN

    @property
    def bound(self) -> float:
        """How far rounding moves the logits of the median row, at most."""
        return ROUNDING * self.recorded.rounding + self.recorded.resolution

    @property
    def bound_most(self) -> float:
        """How far rounding moves the logits of any row, at most."""
        return ROUNDING_MOST * self.recorded.rounding_most + self.recorded.resolution

    @property
    def worst(self) -> TokenDifference:
        """The difference with the largest regret, or one that is not a number, where tokens differ."""
        return max(self.differences, key=lambda d: math.inf if math.isnan(d.steps) else d.steps)

    @property
    def verdict(self) -> Literal["identical", "rounding", "fault"]:
        """What was seen: the recorded choices and drafts, others that rounding explains, or a fault."""
        if not self.ok:
            return "fault"
        return "identical" if self.identical else "rounding"

    @property
    def drafter_ok(self) -> bool:
        """Whether drafts and accept length pass."""
        return self.draft_agreement >= (1.0 if self.exact else DRAFT_FLOOR) and self.accept_length >= self.floor

    @property
    def ok(self) -> bool:
        """Whether the pair passes."""
        return self.target_ok and self.drafter_ok and self.tower_ok and self.lines_ok

    @property
    def lines(self) -> tuple[Moved, ...]:
        """The scored lines."""
        both = zip(self.recorded.lines, self.lines_moved, strict=False)
        return tuple(line.judge(moved, exact=self.exact) for line, moved in both)

    @property
    def lines_ok(self) -> bool:
        """Whether the log-probabilities of the lines pass."""
        return all(one.ok for one in self.lines)

    @property
    def tower_ok(self) -> bool:
        """Whether the rows of the test picture pass."""
        return self.tower is None or self.tower.ok

    @property
    def summary(self) -> str:
        """The numbers, in one line."""
        count, rounded = len(self.differences), ""
        if count and self.target_ok:
            differ = "1 token differs by" if count == 1 else f"{count} tokens differ by at most"
            rounded = f"; {differ} {self.worst.steps:.2g} BF16 steps, which rounding explains ({self._movement})"
        return (
            f"{self.tokens - count} of {self.tokens} tokens and {self.drafts_equal} of {self.drafts} drafts as at "
            f"build, accept length {self.accept_length:.2f} (at build {self.recorded.accept_length:.2f}, at least "
            f"{self.floor:.2f}){rounded}{'' if self.tower is None else f'; {self.tower.summary}'}"
        )

    @property
    def _movement(self) -> str:
        return (
            f"logits moved by {self.moved:.2%} of their spread, {self.moved_most:.2%} in one row; rounding moves them "
            f"by up to {self.bound:.2%}, {self.bound_most:.2%} in one row"
        )

    @property
    def diagnosis(self) -> str:
        """What is wrong and what usually causes it; empty when the pair passes."""
        if not self.tower_ok and self.tower is not None:
            return (
                f"the vision tower is not the one that was built: {self.tower.summary}; usual causes: damaged weights, "
                "wrong positions or rotary angles, a faulty kernel"
            )
        if self.target_ok and not self.lines_ok:
            wrong = "; ".join(f"line {at}: {one.summary}" for at, one in enumerate(self.lines, 1) if not one.ok)
            return f"the target is not the one that was built: {wrong}; usual causes: damaged weights, wrong KV scales"
        if not self.target_ok:
            return f"{self._target_fault}; usual causes: damaged weights, wrong KV scales or RoPE, a faulty kernel"
        if self.drafter_ok:
            return ""
        what = f"{self.draft_agreement:.0%} of its drafts are those of the build"
        if self.draft_agreement >= DRAFT_FLOOR and self.accept_length >= self.floor:
            causes = "an attention window or mask that is slightly off, wrong KV scales, a damaged vector of weights"
        elif self.accept_length < max(1.1, 0.4 * self.floor) or self.draft_agreement < 0.2:
            causes = "a wrong mask token id, weights that are shuffled, zero or of another drafter, wrong KV scales"
        else:
            causes = "taps off by one or in another order, another RoPE theta or window, shuffled weights, KV scales"
        return f"the drafter is not the one that was built: {what}; output stays right but slow; usual causes: {causes}"

    @property
    def _target_fault(self) -> str:
        count, worst = len(self.differences), self.worst
        return (
            f"the target is not the one that was built: {count} of {self.tokens} tokens differ; new token "
            f"{worst.position} is {worst.found}, wanted {worst.wanted}, {worst.regret:.3g} nats or {worst.steps:.3g} "
            f"BF16 steps behind; {'this backend promises the bits of the recording' if self.exact else self._movement}"
        )

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        first = asdict(self.differences[0]) if self.differences else None
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "exact": self.exact,
            "accept_length": self.accept_length,
            "accept_length_at_build": self.recorded.accept_length,
            "floor": self.floor,
            "tokens": self.tokens,
            "tokens_equal": not self.differences,
            "first_difference": first and {key: finite(value) for key, value in first.items()},
            "drafts": self.drafts,
            "drafts_equal": self.drafts_equal,
            "moved": finite(self.moved),
            "moved_most": finite(self.moved_most),
            "bound": self.bound,
            "bound_most": self.bound_most,
            "tower": None if self.tower is None else self.tower.to_json(),
            "lines": [one.to_json() for one in self.lines],
            "diagnosis": self.diagnosis,
            "seconds": self.seconds,
        }


def run_selftest(
    backend: Backend, selftest: SelfTest, *, exact: bool = False, vision: VisionSpec | None = None
) -> SelfTestResult:
    """Replay the recorded passes and compare, drafts only with a drafter; the backend is empty (reset) afterwards.

    ``exact``: this backend promises the bits of the recording (:func:`promises_bits`). ``vision``: of the target, whose
    tower looks at the test's picture.
    """
    selftest = selftest if backend.shape.drafts else selftest.plain
    began, tokens = time.perf_counter(), selftest.tokens
    differences, moved, equal, lengths = list[TokenDifference](), list[float](), 0, list[int]()
    passes = replayed(backend, selftest.prompt, selftest.recorded, see=lambda rows: rows.argmax())
    try:
        for cycle, one in enumerate(passes):
            if cycle:
                own, ahead = one.own or [], tokens[len(moved) :]
                equal += sum(map(eq, own, one.drafts))
                lengths.append(accepted(own[: len(ahead)], ahead) + 1)
            logits = one.rows.logits()
            for row, found, token in zip(logits, one.rows.argmax(), one.tokens, strict=False):
                position = len(moved)
                moved.append(selftest.best[position].moved(row))
                if found != token:
                    best_here, recorded = float(row[found]), float(row[token])
                    regret, step = best_here - recorded, bf16_step(best_here)
                    differences.append(TokenDifference(position, found, token, regret, regret / step))
        lines_moved = tuple(one.moved(scored(backend, one.tokens)) for one in selftest.lines)
    finally:
        backend.reset()
    tower = None
    if vision is not None and selftest.tower is not None:
        tower = selftest.tower.judge(backend.see(chart(vision.patches)).host(), exact=exact)
    return SelfTestResult(
        recorded=selftest,
        exact=exact,
        differences=tuple(differences),
        drafts_equal=equal,
        accept_length=sum(lengths) / len(lengths),
        seconds=time.perf_counter() - began,
        moved=statistics.median(moved),
        moved_most=max(moved, key=lambda one: math.inf if math.isnan(one) else one),
        tower=tower,
        lines_moved=lines_moved,
    )


def promises_bits(selftest: SelfTest, backend_name: str) -> bool:
    """Whether the backend computes here with the arithmetic of the recording, bit for bit.

    The reference backend does with the same PyTorch and threads on the same kind of processor; no other one does.
    """
    if backend_name != "reference":
        return False
    from edge_dflash.backends.reference.dense import arithmetic  # torch, which this backend has loaded

    return selftest.arithmetic == arithmetic()


def replay(bundle: Bundle, backend: Backend) -> SelfTestResult | None:
    """Run the self-test of an open bundle on its loaded backend, which is empty afterwards, and judge nothing.

    Returns None when the build recorded no self-test, for a reason that the manifest gives: the pair is too large, or
    its context too short. Raises VerificationError when it is missing without a reason, BundleError when selftest.json
    is malformed.
    """
    test, manifest = load_selftest(bundle), bundle.manifest
    if test is None:
        if manifest.no_self_test is None:
            raise VerificationError(
                f"{bundle.path} has no {SELFTEST}, and its manifest does not say why: the file was taken out, or an "
                "older version built the bundle; build or copy it again"
            )
        return None
    exact = promises_bits(test, manifest.backend)
    return run_selftest(backend, test, exact=exact, vision=bundle.pair.target.vision)


def check(bundle: Bundle, backend: Backend, mode: Mode = "refuse") -> SelfTestResult | None:
    """:func:`replay`, and what follows from a failure: VerificationError, or a RuntimeWarning when ``mode`` is "warn".

    A self-test that is gone is a failure, too. Returns None without one and when ``mode`` is "off". Raises BundleError
    when selftest.json is malformed and BackendError for an unknown mode.
    """
    if mode not in MODES:
        raise BackendError(f"self_test is {mode!r}, accepted are {', '.join(MODES)}")
    if mode == "off":
        return None
    failure = ""
    try:
        result = replay(bundle, backend)
        if result is not None and not result.ok:
            why = f"{result.diagnosis} ({result.summary})"
            failure = f"self-test of {bundle.path} failed: {why}; build or copy it again"
    except VerificationError as missing:
        result, failure = None, str(missing)
    if failure and mode == "refuse":
        raise VerificationError(f"{failure}, report it if that does not help, or open it with self_test='warn'")
    if failure:
        warnings.warn(failure, RuntimeWarning, stacklevel=4)  # at the caller of Planner.open
    return result


@dataclass(frozen=True)
class AcceptanceCheck:
    """Accepted drafts next to those of the build; without a drafter or a record nothing is judged."""

    here: Drafting
    at_build: Drafting
    floor: float  # least accept length that passes
    unknown: str = ""  # why nothing is judged

    @property
    def below(self) -> tuple[int, ...]:
        """Positions, from 1 on, that many cycles tried and whose share lies clearly below that of the build."""
        found = []
        both = zip(self.here.positions, self.at_build.positions, strict=False)
        for position, ((tried, stood), (then, before)) in enumerate(both, 1):
            if min(tried, then) >= CYCLES:
                least = FLOOR_SHARE * before / then
                if stood / tried < least - ERRORS * math.sqrt(least * (1.0 - least) / tried):
                    found.append(position)
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether accept length and positions pass, or there is nothing to judge."""
        return bool(self.unknown) or (self.here.accept_length >= self.floor and not self.below)

    @property
    def summary(self) -> str:
        """The numbers, in one line."""
        if self.unknown:
            return f"not judged: {self.unknown}"
        places = f"; too few accepted at {', '.join(map(str, self.below))}" if self.below else ""
        return (
            f"accept length {self.here.accept_length:.2f} on the self-test's prompt (at build "
            f"{self.at_build.accept_length:.2f}, at least {self.floor:.2f}){places}"
        )

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {
            "ok": self.ok,
            "accept_length": self.here.accept_length,
            "accept_length_at_build": self.at_build.accept_length,
            "floor": self.floor,
            "unknown": self.unknown or None,
            "acceptance": list(self.here.acceptance),
            "acceptance_at_build": list(self.at_build.acceptance),
            "positions_below": list(self.below),
        }


def check_acceptance(backend: Backend, recorded: SelfTest | None) -> AcceptanceCheck:
    """Run the prompt that the build recorded; the backend is empty (reset) before and afterwards."""
    if not backend.shape.drafts or recorded is None:
        why = "the build recorded no self-test" if backend.shape.drafts else "the bundle has no drafter"
        return AcceptanceCheck(Drafting(), Drafting(), 0.0, why)
    backend.reset()
    try:
        here = generate(backend, recorded.prompt, Options(max_new_tokens=len(recorded.tokens))).drafting
    finally:
        backend.reset()
    return AcceptanceCheck(here, recorded.drafting, recorded.accept_floor)
