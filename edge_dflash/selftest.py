"""The self-test of a bundle: whether a loaded pair still computes what it computed when it was built.

A bundle carries ``selftest.json``: a prompt, the target's plain greedy tokens, and for each cycle what the pair's own
drafter proposed. Opening a bundle replays these passes along the *recorded* tokens, so that one differing choice does
not carry all later ones away, and compares three things:

- tokens: the target's choices. They must be equal where the recording's arithmetic promises the same bits. Elsewhere a
  choice may differ when the logits put the two tokens within ``MAX_REGRET``, and in one token of ``EXCUSED_SHARE``.
- drafts: equal where bits are promised; elsewhere ``DRAFT_FLOOR`` of them. This sees what an accept length hardly
  shows (taps off by one): the demo pair keeps 93 % of its drafts when activations and KV are rounded in another way,
  and at most 67 % with taps, theta or weights that are wrong.
- accept length: at least 70 % of the one seen at build, and never less than 1.

It cannot see what the recording cannot show: a drafter whose config was wrong at build time already (the build warns
when its accept length is low), a window longer than the prompt, or a fault that changes no choice of this prompt.
Knows the Backend protocol and the file; recording is :mod:`edge_dflash.build.record`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import eq
from typing import Any, Literal

from edge_dflash.backends.base import Backend, Rows
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SelfTest, load_selftest
from edge_dflash.errors import BackendError, VerificationError
from edge_dflash.spec.accept import accepted

DRAFT_FLOOR = 0.8  # share of the drafts, where bits are not promised
MAX_REGRET = 0.5  # in logits, which is in nats: how much worse a recorded token may be than the choice made here
EXCUSED_SHARE = 16  # one token in so many may differ within MAX_REGRET

Mode = Literal["refuse", "warn", "off"]
MODES: tuple[Mode, ...] = ("refuse", "warn", "off")


@dataclass(frozen=True)
class TokenDifference:
    """A choice of the target that is not the recorded one."""

    position: int  # index of the new token
    found: int
    wanted: int
    regret: float  # logit of the choice made here minus logit of the recorded token; NaN when logits are not numbers


@dataclass(frozen=True)
class SelfTestResult:
    """The outcome of one replay."""

    exact: bool  # whether bits were promised, so that everything had to be equal
    tokens: int
    differences: tuple[TokenDifference, ...]
    drafts: int
    drafts_equal: int
    accept_length: float  # drafts made here that the recorded tokens confirm, plus one, mean of the cycles
    accept_length_at_build: float
    floor: float
    seconds: float

    @property
    def tokens_equal(self) -> bool:
        """Whether every choice of the target is the recorded one."""
        return not self.differences

    @property
    def first_difference(self) -> TokenDifference | None:
        """The first differing choice."""
        return self.differences[0] if self.differences else None

    @property
    def draft_agreement(self) -> float:
        """Share of drafts that are the recorded ones."""
        return self.drafts_equal / self.drafts if self.drafts else 1.0

    @property
    def identical(self) -> bool:
        """Whether nothing at all differs."""
        return not self.differences and self.drafts_equal == self.drafts

    @property
    def target_ok(self) -> bool:
        """Whether the target's choices pass."""
        if self.exact:
            return not self.differences
        near = all(difference.regret <= MAX_REGRET for difference in self.differences)  # False for NaN
        return near and len(self.differences) * EXCUSED_SHARE <= self.tokens

    @property
    def drafter_ok(self) -> bool:
        """Whether drafts and accept length pass."""
        wanted = 1.0 if self.exact else DRAFT_FLOOR
        return self.draft_agreement >= wanted and self.accept_length >= self.floor

    @property
    def ok(self) -> bool:
        """Whether the pair passes."""
        return self.target_ok and self.drafter_ok

    @property
    def summary(self) -> str:
        """The numbers, in one line."""
        return (
            f"{self.tokens - len(self.differences)} of {self.tokens} tokens and {self.drafts_equal} of {self.drafts} "
            f"drafts as at build, accept length {self.accept_length:.2f} (at build {self.accept_length_at_build:.2f}, "
            f"at least {self.floor:.2f})"
        )

    @property
    def diagnosis(self) -> str:
        """What is wrong and what usually causes it; empty when the pair passes."""
        if not self.target_ok:
            d = self.differences[0]
            return (
                f"the target is not the one that was built: new token {d.position} is {d.found}, wanted {d.wanted} "
                f"({d.regret:.3g} nats behind); usual causes: damaged weights, wrong KV scales or RoPE, a faulty kernel"
            )
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

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        first = self.first_difference
        return {
            "ok": self.ok,
            "exact": self.exact,
            "accept_length": self.accept_length,
            "accept_length_at_build": self.accept_length_at_build,
            "floor": self.floor,
            "tokens": self.tokens,
            "tokens_equal": self.tokens_equal,
            "first_difference": None
            if first is None
            else {**asdict(first), "regret": first.regret if first.regret < float("inf") else None},
            "drafts": self.drafts,
            "drafts_equal": self.drafts_equal,
            "diagnosis": self.diagnosis,
            "seconds": self.seconds,
        }


def run_selftest(backend: Backend, selftest: SelfTest, *, exact: bool = False) -> SelfTestResult:
    """Replay the recorded passes and compare; the backend is empty (reset) afterwards.

    ``exact``: this backend promises the bits of the recording (:func:`promises_bits`).
    """
    began = time.perf_counter()
    backend.reset()
    try:
        tokens, at, equal = selftest.tokens, 0, 0
        lengths: list[int] = []
        differences = _differences(backend.prefill(selftest.prompt), tokens[:1], 0)
        for drafts, committed in zip(selftest.drafts, selftest.accept_lengths, strict=True):
            ahead = tokens[at + 1 :]
            own = backend.propose(tokens[at]).argmax()
            equal += sum(map(eq, own, drafts))
            lengths.append(accepted(own[: len(ahead)], ahead) + 1)
            rows = backend.verify([tokens[at], *drafts])
            differences += _differences(rows, ahead[:committed], at + 1)
            backend.commit(committed)
            at += committed
    finally:
        backend.reset()
    return SelfTestResult(
        exact=exact,
        tokens=len(tokens),
        differences=tuple(differences),
        drafts=selftest.drafted,
        drafts_equal=equal,
        accept_length=sum(lengths) / len(lengths),
        accept_length_at_build=selftest.accept_length,
        floor=selftest.accept_floor,
        seconds=time.perf_counter() - began,
    )


def promises_bits(selftest: SelfTest, backend_name: str) -> bool:
    """Whether the backend computes here with the arithmetic of the recording, bit for bit.

    The reference backend does with the same PyTorch and threads on the same kind of processor; no other one does.
    """
    if backend_name != "reference":
        return False
    from edge_dflash.backends.reference.arithmetic import arithmetic  # torch, which this backend has loaded

    return selftest.arithmetic == arithmetic()


def replay(bundle: Bundle, backend: Backend) -> SelfTestResult | None:
    """Run the self-test of an open bundle on its loaded backend, which is empty afterwards, and judge nothing.

    Returns None when the bundle carries no self-test: an older one, or a pair too large for the machine that built it.
    Raises BundleError when selftest.json is malformed.
    """
    test = load_selftest(bundle)
    return None if test is None else run_selftest(backend, test, exact=promises_bits(test, bundle.manifest.backend))


def check(bundle: Bundle, backend: Backend, mode: Mode = "refuse") -> SelfTestResult | None:
    """:func:`replay`, and what follows from a failure: VerificationError, or a RuntimeWarning when ``mode`` is "warn".

    Returns None without a self-test and when ``mode`` is "off". Raises BundleError when selftest.json is malformed and
    BackendError for an unknown mode.
    """
    if mode not in MODES:
        raise BackendError(f"self_test is {mode!r}, accepted are {', '.join(MODES)}")
    result = replay(bundle, backend) if mode != "off" else None
    if result is not None and not result.ok:
        message = f"self-test of {bundle.path} failed: {result.diagnosis} ({result.summary}); build or copy it again"
        if mode == "refuse":
            raise VerificationError(f"{message}, report it if that does not help, or open it with self_test='warn'")
        warnings.warn(message, RuntimeWarning, stacklevel=3)  # at the caller of Planner.open
    return result


def _differences(rows: Rows, wanted: Sequence[int], first: int) -> list[TokenDifference]:
    """Where the first ``len(wanted)`` rows choose another token; logits are read only then."""
    pairs = [(row, found, token) for row, (found, token) in enumerate(zip(rows.argmax(), wanted, strict=False))]
    if all(found == token for _, found, token in pairs):
        return []
    logits = rows.logits()
    return [
        TokenDifference(first + row, found, token, float(logits[row][found]) - float(logits[row][token]))
        for row, found, token in pairs
        if found != token
    ]
