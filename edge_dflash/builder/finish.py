"""``build --finish``: the engines of a deferred bundle, built on its board; or built anew for another TensorRT.

Where two backends are aboard, both are then timed, and the faster one runs the bundle from then on.

The finished bundle is put together beside the deferred one, from links to its files and the new engines. Then the one
is renamed away and the other takes its name: whoever opens the bundle finds one of them, or for an instant none. A kill
at that instant is put right by the next ``--finish``.

Both do the same work, one after the other: the same prompt, then cycles from the same anchors, each of which commits
one row whatever was accepted: both see the same rows at the same positions, so the times differ by the backends
alone. The bundle's self-test comes first: a backend that fails it is not timed. Pairs too large for one are held to
each other: a backend whose tokens are mostly not those of our own kernels is not taken, however fast it is.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import numpy as np

from edge_dflash.backends import load, selftest
from edge_dflash.backends.cuda.compile import kernels_digest
from edge_dflash.backends.cuda.support import device_facts
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT, TENSORRT_RTX
from edge_dflash.builder.budget import FormatMix
from edge_dflash.builder.engines import build_engines, bundle_engines, check_device, checked_version
from edge_dflash.builder.journal import WorkDir, check_space, recover
from edge_dflash.bundle.manifest import MANIFEST, EngineFiles, Manifest, Trial, dump_manifest
from edge_dflash.bundle.parts import write_file
from edge_dflash.bundle.reader import Bundle, read_manifest
from edge_dflash.common.files import sync_path
from edge_dflash.common.progress import Progress, Stage, unheard
from edge_dflash.decode.backend import Asked
from edge_dflash.errors import BackendError, BuildError, VerificationError
from edge_dflash.quality.report import read_quality

PROMPT = 512  # tokens, at most
CYCLES = 32  # at most
WARM = 4  # cycles that are not counted
AGREEMENT = 0.5  # share of equal tokens; rounding changes few of them, a wrong engine nearly all

Cycles = Callable[[int, int], None]  # (cycles done, in all)


def run_trial(bundle: Bundle, progress: Cycles = lambda done, total: None) -> Trial:
    """Load, test and time each backend that is aboard.

    Raises BackendError when none can run here; one that cannot is named in the result.
    """
    manifest = bundle.manifest
    ids, count = _work(manifest)
    cycle_ms: dict[str, float] = {}
    prefill_ms: dict[str, float] = {}
    failed: dict[str, str] = {}
    choices: list[int] = []
    for index, name in enumerate(manifest.backends):
        report = _shifted(progress, index * count, len(manifest.backends) * count)
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


def _shifted(progress: Cycles, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(before + done, total)


class BuildResult:
    """A finished build: its bundle, and what the manifest says of it."""

    def __init__(
        self, bundle: Path, manifest: Manifest, began: float, warnings: tuple[str, ...] = (), nothing: str = ""
    ) -> None:
        """``began``: by the monotonic clock; ``nothing``: why there was nothing to do."""
        self.bundle = bundle
        self.bytes = manifest.size + (bundle / MANIFEST).stat().st_size  # of all files
        self.seconds = time.monotonic() - began
        engines, deferred = (manifest.plans.names, manifest.plans.deferred) if manifest.plans else ((), ())
        self.plans = () if deferred else engines  # TensorRT engine files that are there
        self.deferred = deferred  # engine files that the device has to build: edge-dflash build --finish
        self.warnings = warnings
        self.backends = manifest.backends  # aboard
        self.active = manifest.backend  # the one that runs it
        self.recipe = manifest.recipe
        self.trial = manifest.trial  # of two backends, by build --finish
        self.quality = read_quality(bundle, manifest)
        self.nothing = nothing
        self.mix: FormatMix | None = None  # of formats, by a budget


def finish_command(path: Path) -> str:
    """The command line that finishes the bundle at ``path``."""
    return shlex.join(["edge-dflash", "build", "--finish", str(path)])


def finish(path: Path, progress: Progress = unheard) -> BuildResult:
    """Build what a bundle lacks here and time its backends; a bundle that lacks nothing is left as it is.

    Raises BundleError, BackendError (another SM, no TensorRT) or BuildError; engines that are there by then are kept in
    ``PATH.building`` and the bundle stays as it was.
    """
    began = time.monotonic()
    recover(path.resolve())
    manifest = read_manifest(path)
    engines = manifest.plans
    if engines is None:
        return BuildResult(
            path, manifest, began, nothing=f"{manifest.backend} runs it, and there are no plans to build"
        )
    flavour = TENSORRT_RTX if engines.flavour == TENSORRT_RTX.module else TENSORRT
    tried = not manifest.standby or (manifest.trial is not None and not manifest.trial.failed)
    if flavour is TENSORRT or not tried:
        what = "its plans are built" if flavour is TENSORRT else "its backends are timed"
        check_device(manifest.arch, str(path), what)
    version = checked_version(flavour)
    if engines.version == version and tried:
        return BuildResult(path, manifest, began, nothing=f"its plans are those of {flavour.product} {version}")
    if (found := manifest.tools.get("kernels")) != (wanted := kernels_digest()):
        raise BuildError(
            f"{path} holds kernels {found} of {manifest.created_by}, this version launches {wanted}; "
            f"build it again with {manifest.options}"
        )
    warnings: tuple[str, ...] = ()
    try:
        if engines.version != version:
            made = replace(engines, version=version, deferred=())
            manifest, warnings = _finish(path.resolve(), replace(manifest, trial=None), made, progress)
        if manifest.standby:
            manifest, more = _try_both(path.resolve(), progress)
            warnings = (*warnings, *more)
    except KeyboardInterrupt:
        raise BuildError(f"interrupted; finished plans are kept, resume with: {finish_command(path)}") from None
    except OSError as error:
        what = f"{error.strerror or error} ({error.filename or path})"
        raise BuildError(f"{what}; correct it and resume with: {finish_command(path)}") from None
    return BuildResult(path, manifest, began, warnings)


def _try_both(path: Path, progress: Progress) -> tuple[Manifest, tuple[str, ...]]:
    """Time the backends, make the faster one active; the manifest that says so, and warnings."""
    bundle = Bundle.open(path, check_hashes=False)
    stage = Stage(progress, "timing", bundle.manifest.size)  # in bytes like the engines: the share of cycles
    trial = run_trial(bundle, stage.share)
    stage.finish()
    active = fastest(trial)
    standby = tuple(name for name in bundle.manifest.backends if name != active)
    manifest = replace(bundle.manifest, backend=active, standby=standby, trial=trial)
    fresh = path.with_name(f"{path.name}.manifest")  # a file more inside would be refused
    write_file(fresh, [dump_manifest(manifest)])
    fresh.replace(path / MANIFEST)
    sync_path(path)
    return manifest, tuple(f"{name} is not used: {why}" for name, why in trial.failed.items())


def _finish(
    path: Path, manifest: Manifest, engines: EngineFiles, progress: Progress
) -> tuple[Manifest, tuple[str, ...]]:
    """Build the engines; the bundle with them takes the place of the one without."""
    stage = Stage(progress, "checking", manifest.size)
    bundle = Bundle.open(path, progress=stage.share)
    stage.finish()
    others = {name: entry for name, entry in manifest.files.items() if name not in engines.names}
    if bundle_engines(manifest.pair, manifest.weights, manifest.prefill_chunk).keys() != set(engines.names):
        raise BuildError(f"{path} names other plans than this version makes; build the bundle again")
    fingerprint = {
        "bundle": hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest(),
        "tensorrt": str(engines.version),
    }
    with WorkDir(path, fingerprint, finish_command(path), force=True) as work:
        weights = sum(entry.size for name, entry in others.items() if name.startswith("weights/"))
        check_space(path, weights, "*.plan")  # about as large
        files = {name: work.link(name, path / name, entry) for name, entry in others.items()}
        stage = Stage(progress, "plans", sum(entry.size for entry in others.values()))
        files |= build_engines(bundle, work, stage.share)
        stage.finish()
        tools = {**manifest.tools, engines.flavour: str(engines.version)}
        complete = replace(manifest, files=files, plans=engines, tools=tools)
        work.finish(dump_manifest(complete))
        return complete, tuple(work.warnings)
