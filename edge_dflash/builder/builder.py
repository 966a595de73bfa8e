"""Checkpoints to bundle: weight by weight, resumable, and all or nothing.

Puts together the plan (:mod:`edge_dflash.builder.decide`), the conversion (:mod:`edge_dflash.builder.convert`),
calibration and the working directory. Nothing that depends on when or where a build ran gets into the bundle, so a
build that was killed and resumed has the bytes of one that was not.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_dflash import __version__
from edge_dflash.backends.cuda.compile import bundled, compile_cubin
from edge_dflash.backends.tensorrt.units import STATE_UNITS, bundle_units, engine_units
from edge_dflash.builder.convert import convert
from edge_dflash.builder.decide import BuildConfig, BuildPlan, plan_build
from edge_dflash.builder.journal import WorkDir
from edge_dflash.builder.native import write_native_part
from edge_dflash.builder.record import fit_warning, no_selftest, record_selftest
from edge_dflash.builder.result import BuildProgress, BuildResult, Stage
from edge_dflash.builder.scales import CALIBRATION, BuildScales, dump_scales, load_scales, measure_scales
from edge_dflash.builder.threads import one_thread
from edge_dflash.bundle.manifest import FileEntry, Manifest, dump_manifest
from edge_dflash.bundle.parts import CHUNK, Advance, DurableFile, write_part
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import SELFTEST, dump_selftest, load_selftest
from edge_dflash.bundle.stored import Part
from edge_dflash.common.files import open_regular
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BuildError, CheckpointError

__all__ = ["BuildConfig", "BuildProgress", "BuildResult", "build"]


def build(
    config: BuildConfig, progress: BuildProgress | None = None, say: Callable[[str], None] = lambda line: None
) -> BuildResult:
    """Build the bundle of ``config``. ``say`` is told what was chosen, before any work.

    Raises CheckpointError, RecipeError, BackendError or BuildError; an interrupted build keeps its finished files in
    ``OUTPUT.building`` and the error says how to resume.
    """
    began = time.monotonic()
    report = progress or (lambda stage, done, total: None)
    try:
        plan = plan_build(config)
        for line in plan.lines:
            say(line)
        with WorkDir(config.output, plan.fingerprint, config.command, force=config.force) as work:
            manifest = _with_plans(_fill(plan, work, report), plan, work, report)
            text = dump_manifest(_with_selftest(manifest, plan, work, report))
            size = sum(entry.size for entry in work.finished.values()) + len(text)
            work.finish(text)
            warnings = (*plan.warnings, *work.warnings)
    except KeyboardInterrupt:
        raise BuildError(f"interrupted; finished files are kept, resume with: {config.command}") from None
    except OSError as error:
        raise _disk_error(error, config) from None
    deferred = plan.plans.deferred if plan.plans is not None else ()
    plans = plan.plans.names if plan.plans is not None and not deferred else ()
    return BuildResult(
        config.output,
        size,
        time.monotonic() - began,
        plans,
        deferred,
        warnings,
        backends=plan.choice.backends,
        active=plan.choice.active,
        recipe=plan.recipe.name,
    )


def _fill(plan: BuildPlan, work: WorkDir, report: BuildProgress) -> Manifest:
    """Make every file of the bundle, or find it made, and return the manifest."""
    files: dict[str, FileEntry] = {}
    files[CALIBRATION], scales = _scales(plan, work, report)
    for source in plan.tokenizer_files:
        name = f"tokenizer/{source.name}"
        files[name] = work.reuse(name, _ignore) or work.add(name, partial(_copy, source))
    stage = Stage(report, "weights", plan.size)
    with _workers() as pool:
        for name, part in plan.parts.items():
            write = partial(_write_weights, plan, part, scales.inputs, pool, stage.advance)
            files[name] = work.reuse(name, stage.advance) or work.add(name, write)
    stage.finish()
    if plan.choice.arch.sm:
        files.update(_kernels(plan, work, report))
    drafter = plan.pair.drafter
    return Manifest(
        created_by=f"edge-dflash {__version__}",
        arch=plan.choice.arch.name,
        backend=plan.choice.active,
        standby=plan.choice.backends[1:],
        pair=plan.pair,
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        target_layer_ids=drafter.target_layer_ids,
        precision=Precision(activations="bfloat16", kv="fp8" if plan.recipe.kv == "fp8" else "bfloat16"),
        recipe=plan.recipe.name,
        max_context=plan.max_context,
        prefill_chunk=plan.prefill_chunk,
        kv_scales=scales.kv,
        tokenizer=bool(plan.tokenizer_files),
        tools=plan.tools,
        sources=plan.sources,
        weights=plan.formats,
        files=files,
        plans=plan.plans,
    )


def _kernels(plan: BuildPlan, work: WorkDir, report: BuildProgress) -> dict[str, FileEntry]:
    """Compile the kernels for the bundle's arch, or find them compiled."""
    stage = Stage(report, "kernels", plan.size)  # in bytes like the weights: the share of units
    units = bundled()
    if "native" not in plan.choice.backends:
        units = STATE_UNITS
    files: dict[str, FileEntry] = {}
    for done, unit in enumerate(units):
        stage.share(done, len(units))
        name = f"kernels/{unit}.cubin"
        files[name] = work.reuse(name, _ignore) or work.add(
            name, partial(_compile, unit, str(plan.choice.arch.kernels))
        )
    stage.finish()
    return files


def _with_plans(manifest: Manifest, plan: BuildPlan, work: WorkDir, report: BuildProgress) -> Manifest:
    """Build the plans that can be built here, from the weights that lie in the bundle."""
    if plan.plans is None or plan.plans.deferred:
        return manifest
    from edge_dflash.builder.plans import build_plans

    stage = Stage(report, "plans", plan.size)  # in bytes like the weights: the share of plans
    units = engine_units(bundle_units(plan.pair, plan.prefill_chunk).units)
    store = Bundle.staged(work.staging, manifest)
    files = build_plans(plan.choice.arch.name, units, store, work, stage.share)
    stage.finish()
    return replace(manifest, files={**manifest.files, **files})


def _with_selftest(manifest: Manifest, plan: BuildPlan, work: WorkDir, report: BuildProgress) -> Manifest:
    """Record the self-test, or find it recorded, and add it to the manifest; warn when there is none or it is bad."""
    if (reason := no_selftest(plan.pair, plan.max_context)) is not None:
        work.warnings.append(reason)
        return replace(manifest, no_self_test=reason)
    entry = work.reuse(SELFTEST, _ignore)
    if entry is None:
        stage = Stage(report, "self-test", plan.size)  # in bytes like the weights: the share of tokens that are done
        test = record_selftest(Bundle.staged(work.staging, manifest), stage.share)
        entry = work.add(SELFTEST, partial(_write, dump_selftest(test)))
        stage.finish()
    complete = replace(manifest, files={**manifest.files, SELFTEST: entry})
    recorded = load_selftest(Bundle.staged(work.staging, complete))
    if recorded is not None and (warning := fit_warning(recorded)) is not None:
        work.warnings.append(warning)
    return complete


def _scales(plan: BuildPlan, work: WorkDir, report: BuildProgress) -> tuple[FileEntry, BuildScales]:
    """Measure the scales, or read those that an earlier run measured."""
    if entry := work.reuse(CALIBRATION, _ignore):
        return entry, load_scales((work.staging / CALIBRATION).read_bytes())
    scales = plan.scales.known
    if plan.scales.ids:
        stage = Stage(report, "calibration", plan.size)  # in bytes like the weights: the share of layers that are done
        scales = measure_scales(plan.scales, plan.pair, plan.store, stage.share)
        stage.finish()
    return work.add(CALIBRATION, partial(_write, dump_scales(scales))), scales


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads that convert different rows, each with torch on itself alone: torch's own threads wait for each other."""
    with one_thread(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        yield pool


def _write_weights(
    plan: BuildPlan,
    part: Part,
    input_scales: Mapping[str, float],
    pool: Executor,
    advance: Advance,
    path: Path,
) -> FileEntry:
    try:
        if "native" in plan.choice.backends:
            return write_native_part(path, part, plan.store, plan.formats, pool, advance)
        return write_part(path, convert(plan.store, part.names, plan.formats, input_scales, pool.map), advance)
    except CheckpointError as error:
        source = plan.config.target if path.name.startswith("target-") else plan.config.drafter
        raise CheckpointError(f"{source}: {error}") from None
    finally:
        plan.store.release()


def _compile(unit: str, arch: str, path: Path) -> FileEntry:
    return _write(compile_cubin(unit, arch), path)


def _write(data: bytes, path: Path) -> FileEntry:
    with DurableFile(path, _ignore) as file:
        file.write(data)
    return file.entry


def _copy(source: Path, path: Path) -> FileEntry:
    with DurableFile(path, _ignore) as file, open_regular(source) as data:
        while chunk := data.read(CHUNK):
            file.write(chunk)
    return file.entry


def _disk_error(error: OSError, config: BuildConfig) -> BuildError:
    """One line for what the operating system refused, with the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk of {config.output} is full; free some space"
    else:
        what = f"{error.strerror or error} ({error.filename or config.output}); correct it"
    return BuildError(f"{what} and resume with: {config.command}")


def _ignore(count: int) -> None:
    """Progress of files too small to show."""
