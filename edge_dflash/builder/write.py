"""Checkpoints to bundle: file by file, resumable, and all or nothing.

What is built is decided by :mod:`edge_dflash.builder.decide`. Nothing that depends on when or where a build ran gets
into the bundle, so a build that was killed and resumed has the bytes of one that was not.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import torch

from edge_dflash.backends import SMALL_MODEL, load
from edge_dflash.backends.cuda.compile import bundled, compile_cubin
from edge_dflash.backends.cuda.kernels.tower import UNIT as TOWER_UNIT
from edge_dflash.backends.cuda.tensorrt.units import STATE_UNITS
from edge_dflash.builder.card import card_warning, check_bundle
from edge_dflash.builder.convert import Choose, by_max, one_thread, weight_tensors
from edge_dflash.builder.decide import BuildConfig, Decisions, decide
from edge_dflash.builder.engines import build_engines
from edge_dflash.builder.finish import BuildResult
from edge_dflash.builder.importance import FILE, Keep, dump_importance, input_of, inputs_file, load_importance
from edge_dflash.builder.journal import WorkDir
from edge_dflash.builder.mixed import MEASURED, Mixing
from edge_dflash.builder.record import fit_warning, no_selftest, record_selftest
from edge_dflash.builder.scales import CALIBRATION, Scales, dump_scales, load_scales, measure_scales
from edge_dflash.builder.swap import decide_swap, is_bundle
from edge_dflash.bundle.manifest import QUALITY, FileEntry, Manifest, dump_manifest
from edge_dflash.bundle.parts import CHUNK, Part, Piece, building_path, tensor_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SELFTEST, dump_selftest, load_selftest
from edge_dflash.common.files import open_regular
from edge_dflash.common.nested import refuse_nul
from edge_dflash.common.progress import Progress, Stage, shown
from edge_dflash.errors import BuildError, CheckpointError
from edge_dflash.quality.bundle import SourceModel, TaskSet, measure
from edge_dflash.quality.report import dump_quality
from edge_dflash.text.files import FOLDER
from edge_dflash.weights.compensate import Compensated, feedback
from edge_dflash.weights.formats import Array
from edge_dflash.weights.layout import words_of
from edge_dflash.weights.quantize import Rounder
from edge_dflash.weights.rounding import Search

__all__ = ["BuildConfig", "BuildResult", "build"]


def build(
    config: BuildConfig, progress: Progress | bool = False, say: Callable[[str], None] = lambda line: None
) -> BuildResult:
    """Build the bundle of ``config``. ``say`` is told what was chosen, before any work.

    ``progress`` is told (stage, done, total); True shows it in a line on stderr.

    Raises CheckpointError, RecipeError, BackendError or BuildError, and RequestError for a path with a NUL; an
    interrupted build keeps its finished files in ``OUTPUT.building`` and the error says how to resume.
    """
    refuse_nul(vars(config))
    if config.quality and is_bundle(config.target):
        raise BuildError("--quality measures against the target's checkpoint, and --target is a bundle; leave it out")
    began = time.monotonic()
    try:
        with shown(progress) as report:
            decided = decide_swap(config) if is_bundle(config.target) else decide(config)
            mix = mixing = None
            if config.quality_target is not None or config.bytes_budget is not None:
                by = cache(lambda: _chooser(decided, _measured(decided, report)[1]))
                mixing = Mixing(decided, by, report)
            with WorkDir(config.output, decided.fingerprint, config.command, force=config.force) as work:
                if mixing is not None:
                    decided, mix = mixing.mixed(work, say)
                for line in decided.lines:
                    say(line)
                manifest = _with_engines(_fill(decided, work, report), decided, work, report)
                manifest = _with_selftest(manifest, decided, work, report)
                if config.quality:
                    manifest = _with_quality(manifest, decided, work, report, say)
                mixes = (name for name in work.finished if name.endswith(MEASURED))
                work.finish(dump_manifest(manifest), FILE, *_kept_inputs(decided), *mixes)
            result = BuildResult(config.output, manifest, began, (*decided.warnings, *work.warnings))
            result.mix = mix
            return result
    except KeyboardInterrupt:
        kept = "finished files are kept" if building_path(config.output).is_dir() else "nothing was made yet"
        raise BuildError(f"interrupted; {kept}, resume with: {config.resume or config.command}") from None
    except OSError as error:
        raise _disk_error(error, config) from None


def _fill(decided: Decisions, work: WorkDir, progress: Progress) -> Manifest:
    """Make every file of the bundle, or find it made, and return the manifest."""
    inputs = _kept_inputs(decided)

    def keep(name: str, x: torch.Tensor) -> None:
        if inputs_file(name) in inputs:
            work.add(inputs_file(name), [x.bfloat16().view(torch.uint16).numpy()])

    measured, importance = cache(lambda: _measured(decided, progress, keep)), dict[str, Array]()
    if not all(work.reuse(name) for name in inputs):
        measured()
    if decided.scales.moments:
        work.add(FILE, (piece for run in (measured,) for piece in dump_importance(run()[1])))
        importance = load_importance(work.staging / FILE)
    files = {CALIBRATION: work.add(CALIBRATION, (dump_scales(run()[0]) for run in (measured,)))}
    scales = load_scales((work.staging / CALIBRATION).read_bytes())
    choose = _chooser(decided, importance, work.staging)
    for source in decided.tokenizer_files:
        name = f"tokenizer/{FOLDER}/{source.name}" if source.parent.name == FOLDER else f"tokenizer/{source.name}"
        files[name] = work.add(name, _content(source))
    stage = Stage(progress, "weights", decided.size)
    # each thread converts other rows, with torch on itself alone: torch's own threads wait for each other
    with one_thread(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for name, part in decided.parts.items():
            if name in decided.linked:
                files[name] = work.link(name, *decided.linked[name])
            else:
                made = _weights(decided, name, part, scales.inputs, choose, pool)
                files[name] = work.add(name, made, stage.advance)
    stage.finish()
    if decided.choice.arch.sm:
        files |= _kernels(decided, work, progress)
    return replace(decided.manifest, kv_scales=scales.kv, files=files)


def _kept_inputs(decided: Decisions) -> tuple[str, ...]:
    """Files with what linears read, which only the build needs."""
    return tuple(map(inputs_file, dict.fromkeys(decided.scales.compensated.values())))


def _measured(
    decided: Decisions, progress: Progress, keep: Keep = lambda name, x: None
) -> tuple[Scales, dict[str, Array]]:
    """Measure what has no scale yet, and importance."""
    if not decided.scales.ids:
        return decided.scales.known, {}
    stage = Stage(progress, "calibration", decided.size)  # in bytes like the weights: the share of layers
    found = measure_scales(decided.scales, decided.pair, decided.store, stage.share, keep)
    stage.finish()
    return found


def _chooser(decided: Decisions, importance: Mapping[str, Array], folder: Path | None = None) -> Choose:
    """How the block scales of each weight are chosen, and its codes where inputs lie in ``folder``."""
    if decided.recipe.rounding == "max":
        return by_max

    @lru_cache(maxsize=1)  # linears with the same input come one after the other
    def along(path: Path) -> torch.Tensor:
        return feedback(
            torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.bfloat16).view(tokens, -1)
        )

    def choose(name: str) -> Rounder:
        h, first = importance.get(input_of(name)), decided.scales.compensated.get(name)
        search = Search(torch.from_numpy(h) if h is not None else None)
        return (
            search
            if folder is None or h is None or first is None
            else Compensated(search, along(folder / inputs_file(first)))
        )

    tokens = len(decided.scales.ids)
    return choose


def _weights(
    decided: Decisions,
    name: str,
    part: Part,
    input_scales: Mapping[str, float],
    choose: Choose,
    pool: ThreadPoolExecutor,
) -> Iterator[Piece]:
    """A weight file. Raises CheckpointError naming the checkpoint."""
    stacked = "native" in decided.choice.backends
    try:
        tensors = weight_tensors(
            *(part, decided.store, decided.manifest.weights, {} if stacked else input_scales, pool),
            words=words_of(decided.choice.arch.sm),
            again=decided.recipe.requantize == "fp8",
            choose=choose,
        )
        yield from tensor_file(tensors)
    except CheckpointError as error:
        of_target = Path(name).name.startswith("target-")
        source = decided.config.target if of_target else decided.config.drafter
        raise CheckpointError(f"{source}: {error}") from None
    finally:
        decided.store.release()


def _kernels(decided: Decisions, work: WorkDir, progress: Progress) -> dict[str, FileEntry]:
    """Compile the kernels for the bundle's arch, or find them compiled."""
    stage = Stage(progress, "kernels", decided.size)  # in bytes like the weights: the share of units
    units = bundled()
    if "native" not in decided.choice.backends:
        units = (*STATE_UNITS, *([TOWER_UNIT] if decided.pair.target.vision else []))

    def compiled(unit: str) -> Iterator[Piece]:
        yield compile_cubin(unit, str(decided.choice.arch.kernels))

    files: dict[str, FileEntry] = {}
    for done, unit in enumerate(units):
        stage.share(done, len(units))
        name = f"kernels/{unit}.cubin"
        there = decided.linked.get(name)
        files[name] = work.link(name, *there) if there else work.add(name, compiled(unit))
    stage.finish()
    return files


def _with_engines(manifest: Manifest, decided: Decisions, work: WorkDir, progress: Progress) -> Manifest:
    """Build the engines that can be built here, from the weights that lie in the bundle."""
    if decided.manifest.plans is None or decided.manifest.plans.deferred:
        return manifest
    stage = Stage(progress, "plans", decided.size)  # in bytes like the weights: the share of engines
    files = build_engines(Bundle.staged(work.staging, manifest), work, stage.share)
    stage.finish()
    return replace(manifest, files={**manifest.files, **files})


def _with_selftest(manifest: Manifest, decided: Decisions, work: WorkDir, progress: Progress) -> Manifest:
    """Record the self-test, or find it recorded, and add it to the manifest; warn when it is missing or bad."""
    if (reason := no_selftest(decided.pair, decided.manifest.max_context)) is not None:
        work.warnings += [reason, *_card_warnings(decided)]
        return replace(manifest, no_self_test=reason)

    def recorded() -> Iterator[Piece]:
        stage = Stage(progress, "self-test", decided.size)  # in bytes like the weights: the share of tokens
        yield dump_selftest(record_selftest(Bundle.staged(work.staging, manifest), stage.share))
        stage.finish()

    complete = replace(manifest, files={**manifest.files, SELFTEST: work.add(SELFTEST, recorded())})
    test = load_selftest(Bundle.staged(work.staging, complete))
    if test is not None and (warning := fit_warning(test)) is not None:
        work.warnings.append(warning)
    work.warnings += _card_warnings(decided, Bundle.staged(work.staging, complete))
    return complete


def _with_quality(
    manifest: Manifest, decided: Decisions, work: WorkDir, progress: Progress, say: Callable[[str], None]
) -> Manifest:
    """Measure the quality, or find it measured, and add it to the manifest.

    Answers are made, and a backend is measured, where that depends on no device: by the reference of a small pair.
    """

    def measured() -> Iterator[Piece]:
        bundle, given = Bundle.staged(work.staging, manifest), decided.config.prompts
        source = SourceModel.open(decided.config.target, decided.pair)
        small = manifest.no_self_test is None and manifest.backend == "reference"
        with one_thread() if decided.pair.target.hidden_size <= SMALL_MODEL else nullcontext():
            prompts, backend = (
                TaskSet.read(given) if given else TaskSet.held_out(bundle),
                load(bundle) if small else None,
            )
            folder = work.root / "quality"
            found = measure(bundle, source, prompts, folder=folder, backend=backend, progress=progress, say=say)
        yield dump_quality(found)

    return replace(manifest, files={**manifest.files, QUALITY: work.add(QUALITY, measured())})


def _card_warnings(decided: Decisions, bundle: Bundle | None = None) -> list[str]:
    """What the drafter's card says against the bundle; without one that a build can run, against the drafter."""
    if (card := decided.card) is None:
        return []
    warning = card_warning(card, check_bundle(bundle, card) if bundle is not None and card.better else ())
    return [] if warning is None else [warning]


def _content(source: Path) -> Iterator[Piece]:
    """A file as it is."""
    with open_regular(source) as data:
        yield from iter(partial(data.read, CHUNK), b"")


def _disk_error(error: OSError, config: BuildConfig) -> BuildError:
    """One line for what the operating system refused, with the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk of {config.output} is full; free some space"
    else:
        what = f"{error.strerror or error} ({error.filename or config.output}); correct it"
    return BuildError(f"{what} and resume with: {config.resume or config.command}")
