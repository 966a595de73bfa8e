"""The self-test of a bundle: whether a loaded pair still computes what it computed when it was built.

A bundle carries ``selftest.json``: a prompt, the target's plain greedy tokens, and for each cycle what the pair's own
drafter proposed. Opening a bundle replays these passes along the *recorded* tokens, so that one differing choice does
not carry all later ones away, and compares three things:

- tokens: the target's choices. They must be equal where the recording's arithmetic promises the same bits. Elsewhere
  rounding may change a choice, and whether it did follows from how far the best logits moved
  (:mod:`edge_dflash.backends.selftest_result`).
- drafts: equal where bits are promised; elsewhere ``DRAFT_FLOOR`` of them. This sees what an accept length hardly
  shows (taps off by one): the demo pair keeps 93 % of its drafts when activations and KV are rounded in another way,
  and at most 67 % with taps, theta or weights that are wrong.
- accept length: at least 70 % of the one seen at build, and never less than 1.

It cannot see what the recording cannot show: a drafter whose config was wrong at build time already (the build warns
when its accept length is low), a window longer than the prompt, or a fault that changes no choice of this prompt.
Uses the Backend protocol and the file alone; recording is :mod:`edge_dflash.builder.record`.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from operator import eq
from typing import Literal

from edge_dflash.backends.selftest_result import SelfTestResult, TokenDifference
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SELFTEST, SelfTest, bf16_step, load_selftest
from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Backend, Rows
from edge_dflash.errors import BackendError, VerificationError

Mode = Literal["refuse", "warn", "off"]
MODES: tuple[Mode, ...] = ("refuse", "warn", "off")


def run_selftest(backend: Backend, selftest: SelfTest, *, exact: bool = False) -> SelfTestResult:
    """Replay the recorded passes and compare; the backend is empty (reset) afterwards.

    ``exact``: this backend promises the bits of the recording (:func:`promises_bits`).
    """
    began, choices = time.perf_counter(), _Choices(selftest)
    backend.reset()
    try:
        tokens, at, equal = selftest.tokens, 0, 0
        lengths: list[int] = []
        choices.compare(backend.prefill(selftest.prompt), 1)
        for drafts, committed in zip(selftest.drafts, selftest.accept_lengths, strict=True):
            ahead = tokens[at + 1 :]
            own = backend.propose(tokens[at]).argmax()
            equal += sum(map(eq, own, drafts))
            lengths.append(accepted(own[: len(ahead)], ahead) + 1)
            rows = backend.verify([tokens[at], *drafts])
            choices.compare(rows, committed)
            backend.commit(committed)
            at += committed
    finally:
        backend.reset()
    return SelfTestResult(
        exact=exact,
        tokens=len(tokens),
        differences=tuple(choices.differences),
        moved=statistics.median(choices.moved),
        moved_most=max(choices.moved, key=lambda one: math.inf if math.isnan(one) else one),
        rounding=selftest.rounding,
        rounding_most=selftest.rounding_most,
        resolution=selftest.resolution,
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

    Returns None when the build recorded no self-test, for a reason that the manifest gives: the pair is too large, or
    its context too short. Raises VerificationError when there is none without a reason, BundleError when selftest.json
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
    return run_selftest(backend, test, exact=promises_bits(test, manifest.backend))


def check(bundle: Bundle, backend: Backend, mode: Mode = "refuse") -> SelfTestResult | None:
    """:func:`replay`, and what follows from a failure: VerificationError, or a RuntimeWarning when ``mode`` is "warn".

    A self-test that is gone is a failure, too. Returns None without one and when ``mode`` is "off". Raises BundleError
    when selftest.json is malformed and BackendError for an unknown mode.
    """
    if mode not in MODES:
        raise BackendError(f"self_test is {mode!r}, accepted are {', '.join(MODES)}")
    if mode == "off":
        return None
    result, failure = None, ""
    try:
        result = replay(bundle, backend)
    except VerificationError as missing:
        failure = str(missing)
    if result is not None and not result.ok:
        failure = f"self-test of {bundle.path} failed: {result.diagnosis} ({result.summary}); build or copy it again"
    if failure and mode == "refuse":
        raise VerificationError(f"{failure}, report it if that does not help, or open it with self_test='warn'")
    if failure:
        warnings.warn(failure, RuntimeWarning, stacklevel=3)  # at the caller of Planner.open
    return result


class _Choices:
    """The target's choices beside the recorded ones."""

    def __init__(self, selftest: SelfTest) -> None:
        self._wanted = iter(selftest.best)
        self.differences: list[TokenDifference] = []
        self.moved: list[float] = []

    def compare(self, rows: Rows, count: int) -> None:
        """Compare the first ``count`` rows, which choose the next tokens."""
        logits = rows.logits()
        for row, found, best in zip(range(count), rows.argmax(), self._wanted, strict=False):
            token, position = best.ids[0], len(self.moved)
            self.moved.append(best.moved(logits[row]))
            if found != token:
                regret = float(logits[row][found]) - float(logits[row][token])
                step = bf16_step(float(logits[row][found]))
                self.differences.append(TokenDifference(position, found, token, regret, regret / step))
