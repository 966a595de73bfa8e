"""The self-test of a bundle: whether a loaded pair still computes what it computed when it was built.

A bundle carries ``selftest.json``: a prompt, the target's plain greedy tokens, and for each cycle what the pair's own
drafter proposed. Opening a bundle replays these passes along the *recorded* tokens, so that one differing choice does
not carry all later ones away, and compares three things:

- tokens: the target's choices. They must be equal where the recording's arithmetic promises the same bits. Elsewhere
  rounding may change a choice: it did if the best logits of the median row moved at most ``ROUNDING`` times as far as
  rounding moved them at build (BF16 against float32 activations), and those of any row ``ROUNDING_MOST`` times.
- drafts: equal where bits are promised; elsewhere ``DRAFT_FLOOR`` of them. This sees what an accept length hardly
  shows (taps off by one): the demo pair keeps 93 % of its drafts when activations and KV are rounded in another way,
  and at most 67 % with taps, theta or weights that are wrong.
- accept length: at least 70 % of the one seen at build, and never less than 1.
- rows of one picture, where the target has a vision tower: see :mod:`edge_dflash.bundle.selftest`.

It cannot see what the recording cannot show: a drafter whose config was wrong at build time already (the build warns
when its accept length is low), a window longer than the prompt, or a fault that changes no choice of this prompt.
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
from edge_dflash.bundle.selftest import SELFTEST, SelfTest, bf16_step, chart, load_selftest
from edge_dflash.decode.accept import accepted
from edge_dflash.decode.backend import Backend, Rows
from edge_dflash.errors import BackendError, VerificationError
from edge_dflash.model.specs import VisionSpec

Mode = Literal["refuse", "warn", "off"]
MODES: tuple[Mode, ...] = ("refuse", "warn", "off")


def run_selftest(
    backend: Backend, selftest: SelfTest, *, exact: bool = False, vision: VisionSpec | None = None
) -> SelfTestResult:
    """Replay the recorded passes and compare, drafts only with a drafter; the backend is empty (reset) afterwards.

    ``exact``: this backend promises the bits of the recording (:func:`promises_bits`). ``vision``: of the target, whose
    tower looks at the test's picture.
    """
    selftest = selftest if backend.shape.drafts else selftest.plain
    began, wanted = time.perf_counter(), iter(selftest.best)
    differences, moved = list[TokenDifference](), list[float]()

    def compare(rows: Rows, count: int) -> None:
        """The first ``count`` rows, which choose the next tokens, with the recorded choices."""
        logits = rows.logits()
        for row, found, best in zip(logits[:count], rows.argmax(), wanted, strict=False):
            position, token = len(moved), best.ids[0]
            moved.append(best.moved(row))
            if found != token:
                best_here, recorded = float(row[found]), float(row[token])
                regret, step = best_here - recorded, bf16_step(best_here)
                differences.append(TokenDifference(position, found, token, regret, regret / step))

    backend.reset()
    try:
        tokens, at, equal, lengths = selftest.tokens, 0, 0, list[int]()
        compare(backend.prefill(selftest.prompt), 1)
        for drafts, committed in zip(selftest.drafts, selftest.accept_lengths, strict=True):
            ahead = tokens[at + 1 :]
            own = backend.propose(tokens[at]).argmax() if drafts else []
            equal += sum(map(eq, own, drafts))
            lengths.append(accepted(own[: len(ahead)], ahead) + 1)
            compare(backend.verify([tokens[at], *drafts]), committed)
            backend.commit(committed)
            at += committed
    finally:
        backend.reset()
    tower = None
    if vision is not None and selftest.tower is not None:
        tower = selftest.tower.judge(backend.see(chart(vision.patches)).host(), exact=exact)
    return SelfTestResult(
        exact=exact,
        tokens=len(tokens),
        differences=tuple(differences),
        moved=statistics.median(moved),
        moved_most=max(moved, key=lambda one: math.inf if math.isnan(one) else one),
        rounding=selftest.rounding,
        rounding_most=selftest.rounding_most,
        resolution=selftest.resolution,
        drafts=selftest.drafted,
        drafts_equal=equal,
        accept_length=sum(lengths) / len(lengths),
        accept_length_at_build=selftest.accept_length,
        floor=selftest.accept_floor,
        seconds=time.perf_counter() - began,
        tower=tower,
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
