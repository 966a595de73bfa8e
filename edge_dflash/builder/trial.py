"""Two backends of one bundle at the same work, one after the other: which of them runs it from now on.

The same prompt, then cycles from the same anchors, each of which commits one row whatever was accepted: both see the
same rows at the same positions, so the times differ by the backends alone. The bundle's self-test comes first: a
backend that fails it is not timed. Pairs too large for one are held to each other: a backend whose tokens are
mostly not those of our own kernels is not taken, however fast it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median

import numpy as np

from edge_dflash.backends import load, selftest
from edge_dflash.backends.cuda.support import device_facts
from edge_dflash.bundle.manifest import Manifest, Trial
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Asked
from edge_dflash.errors import BackendError, VerificationError

PROMPT = 512  # tokens, at most
CYCLES = 32  # at most
WARM = 4  # cycles that are not counted
AGREEMENT = 0.5  # share of equal tokens; rounding changes few of them, a wrong engine nearly all

Progress = Callable[[int, int], None]  # (cycles done, in all)


def run_trial(bundle: Bundle, progress: Progress = lambda done, total: None) -> Trial:
    """Load, test and time each backend that is aboard.

    Raises BackendError when none can run here; one that cannot is named in the result.
    """
    manifest = bundle.manifest
    ids, count = _work(manifest)
    cycle_ms: dict[str, float] = {}
    prefill_ms: dict[str, float] = {}
    failed: dict[str, str] = {}
    choices: list[int] = []
    for turn, name in enumerate(manifest.backends):
        report = _shifted(progress, turn * count, len(manifest.backends) * count)
        try:
            cycle_ms[name], prefill_ms[name], found = _time(bundle, name, ids, count, report)
        except (BackendError, VerificationError) as error:
            failed[name] = str(error)
            continue
        choices = choices or found  # those of our own kernels come first
        if (same := mean(a == b for a, b in zip(choices, found, strict=True))) < AGREEMENT:
            failed[name] = (
                f"{same:.0%} of its tokens are those of the other backend, at least {AGREEMENT:.0%} are wanted"
            )
            del cycle_ms[name], prefill_ms[name]
    if not cycle_ms:
        raise BackendError(f"{bundle.path}: no backend runs here: {'; '.join(failed.values())}")
    return Trial(device_facts().name, len(ids) - count, count - WARM, cycle_ms, prefill_ms, failed)


def fastest(trial: Trial) -> str:
    """The backend whose cycle is shortest; the native one of two equals."""
    return min(sorted(trial.cycle_ms), key=trial.cycle_ms.__getitem__)


def _work(manifest: Manifest) -> tuple[list[int], int]:
    """Prompt and behind it one anchor a cycle; the number of cycles."""
    room = manifest.max_context - manifest.pair.rows
    count = min(CYCLES + WARM, room // 2)
    size = min(PROMPT + count, room)
    found: list[int] = np.random.default_rng(0).integers(0, manifest.pair.target.vocab_size, size).tolist()
    return found, count


def _time(
    bundle: Bundle, name: str, ids: list[int], count: int, report: Callable[[int], None]
) -> tuple[float, float, list[int]]:
    """Milliseconds of a cycle and of the prompt, and the target's choice behind the prompt and behind each anchor."""
    prompt, anchors = ids[:-count], ids[-count:]
    backend = load(bundle, name)
    try:
        selftest.check(bundle, backend)
        backend.reset()
        backend.prefill(prompt).argmax()  # the first pass of a shape is slower
        backend.reset()
        began = time.perf_counter()
        choices = backend.prefill(prompt).argmax()
        prefill = time.perf_counter() - began
        cycles = []
        for done, anchor in enumerate(anchors):
            began = time.perf_counter()
            found = backend.cycle(Asked(anchor))
            backend.commit(1)
            cycles.append(time.perf_counter() - began)
            choices.append(found.tokens[0])
            report(done + 1)
        return 1e3 * median(cycles[WARM:] or cycles), 1e3 * prefill, choices
    finally:
        backend.close()


def _shifted(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)
