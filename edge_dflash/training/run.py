"""Train a drafter for one's own prompts: answers, taps, training, evaluation, each stage going on where it stood."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edge_dflash.builder.card import DrafterCard, read_card, write_card
from edge_dflash.builder.swap import is_bundle
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import MANIFEST, SourceFile
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BuildError, RequestError
from edge_dflash.model.registry import match_pair, read_drafter_spec, read_target_spec
from edge_dflash.model.specs import TargetSpec
from edge_dflash.planner import Planner
from edge_dflash.training.answers import TargetAnswer, make_answers, read_answers
from edge_dflash.training.card import card_of, warnings
from edge_dflash.training.data import TrainingData, TrainingTask, read_tasks, spread
from edge_dflash.training.drafter import EMBEDDING, HEAD, BlockDrafter
from edge_dflash.training.evaluate import Measure, evaluate
from edge_dflash.training.losses import Borrowed
from edge_dflash.training.outlook import outlook
from edge_dflash.training.shards import Sample, Shards
from edge_dflash.training.stage import (
    Say,
    TrainingStage,
    check_disk,
    check_memory,
    device,
    lanes,
    left_out,
    read_prompts,
    weights_fit,
)
from edge_dflash.training.start import make_start, read_weights, same_files, save_weights
from edge_dflash.training.taps import write_taps
from edge_dflash.training.trainer import Trainer, TrainingPlan, TrainingState, kept_weights
from edge_dflash.training.workdir import TrainingDir, TrainingRun
from edge_dflash.weights.quantize import dequantize

RATE, SCRATCH_RATE = 3e-4, 1e-3  # peak learning rates
AGAIN = "the same train-drafter command"
WORSE = "worse"  # folder of a drafter that is worse than the one it began as


@dataclass(frozen=True)
class TrainingResult:
    """What a training left."""

    drafter: Path  # its directory
    card: DrafterCard
    seconds: float  # of all stages of this call


def train_drafter(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> TrainingResult:
    """Train a drafter and write it to ``run.output``, or to its folder "worse" where it is worse than its start.

    A call that was killed is gone on with by the same call. Raises CheckpointError, RecipeError and BuildError for the
    models, RequestError for the data or a disk that is too small, BackendError where the target cannot run here.
    """
    began = time.perf_counter()
    with TrainingDir(run) as work:
        if (there := work.done) is not None and (card := read_card(there)) is not None:
            work.clear()  # what a kill behind the end left
            check_same(run, card, there)
            say(f"nothing to do: {there} is the drafter of this training; remove {work.root} to train it again")
            return TrainingResult(there, card, time.perf_counter() - began)
        stage = TrainingStage(run, work, progress, say, device())
        folder, card = _train(stage)
    for line in warnings(card, folder):
        say(line)
    return TrainingResult(folder, card, time.perf_counter() - began)


def _train(stage: TrainingStage) -> tuple[Path, DrafterCard]:
    """All stages; where the drafter lies, and its card."""
    run, work = stage.run, stage.work
    data = read_prompts(stage)
    bundle = before(stage)
    if not all(work.answers(index).exists() for index in range(len(data))):
        work.forget_training()  # of other answers, which were removed
    answers = answer(stage, bundle, data)
    samples = [sample(one) for file in answers for one in file]
    check_memory(stage, bundle.pair, max(len(one.ids) for one in samples))
    check_disk(stage, bundle, samples)
    shards, _ = write_taps(bundle, samples, work.taps, progress=stage.progress, say=stage.say)
    state = learn(stage, bundle, Shards(work.taps, shards))
    after(stage, bundle)
    measures = measure(stage, data)
    card = card_of(run, work.after, bundle, data, answers, state, measures)
    folder = run.output if card.better else run.output / WORSE
    save_weights(folder, bundle.pair, kept_weights(work.training), work.start)
    write_card(folder, card)
    work.end(folder)
    return folder, card


def check_same(run: TrainingRun, card: DrafterCard, there: Path) -> None:
    """Raise RequestError where the data of a training that has ended was changed since."""
    if " ".join(read_tasks(path, most=0).sha256 for path in run.data) != card.data_sha256:
        raise RequestError(
            f"{there} was trained on other prompts than {', '.join(map(str, run.data))} has now; give another "
            f"--output, or remove {run.output / 'work'}"
        )


def target_spec(run: TrainingRun) -> TargetSpec:
    """The target's sizes, of a bundle or a checkpoint. Raises BundleError, CheckpointError."""
    if is_bundle(run.target):
        return Bundle.open(run.target, check_hashes=False).pair.target
    return read_target_spec(run.target)


def before(stage: TrainingStage) -> Bundle:
    """The bundle of the target and the drafter that the training begins with."""
    run, work, half = stage.run, stage.work, stage.work.root / "start.part"
    init = run.drafter if run.drafter is not None and run.drafter.is_dir() else None
    if work.start.is_dir() and init is not None and not same_files(init, work.start):
        if work.answers(0).exists():
            raise RequestError(f"{init} has changed since this training began; give another --output, or {work.gone}")
        for folder in (work.start, work.before):  # it was put right since
            shutil.rmtree(folder, ignore_errors=True)
    if not (work.before / MANIFEST).is_file():
        target = target_spec(run)
        if not work.start.is_dir():
            shutil.rmtree(half, ignore_errors=True)  # a kill leaves a start that is whole, or none
            make_start(target, run.drafter, half, mask_token_id=run.mask_token, seed=run.seed)
            half.replace(work.start)
        pair = match_pair(target, read_drafter_spec(work.start, target.num_layers))
        check_memory(stage, pair, 1, "at least")
        _bundle(stage, work.start, work.before)
    return Bundle.open(work.before)


def _bundle(stage: TrainingStage, drafter: Path, output: Path) -> tuple[str, ...]:
    """A bundle of the target with a drafter; the build's warnings."""
    run = stage.run
    if is_bundle(run.target):
        own = BuildConfig(run.target, drafter, output, run.arch or "cpu", None, run.recipe, run.max_context)
        return build(replace(own, resume=AGAIN), stage.progress).warnings
    arch = run.arch or _arch(stage.device)
    native = None if arch == "cpu" else "native"
    config = BuildConfig(run.target, drafter, output, arch, native, run.recipe, run.max_context)
    return build(replace(config, resume=AGAIN), stage.progress).warnings


def _arch(where: str) -> str:
    """What runs the bundles here."""
    if where == "cpu":
        return "cpu"
    from edge_dflash.backends.cuda.support import device_sm  # needs CUDA's bindings

    return f"sm{device_sm()}"


def answer(stage: TrainingStage, bundle: Bundle, data: Sequence[TrainingData]) -> list[tuple[TargetAnswer, ...]]:
    """The target's answers to all prompts, of each file."""
    run, files = stage.run, []
    with Planner.open(
        bundle.path, fallback=False, self_test="off", queue=64, lanes=lanes(stage), progress=stage.progress
    ) as one:
        begun = any(stage.work.answers(index).exists() for index in range(len(data)))
        if not begun and (ahead := outlook(run, one, data, len(evaluated(run, data)))) is not None:
            stage.say(ahead.line(run))
        for index, each in enumerate(data):
            file = stage.work.answers(index)
            make_answers(
                one,
                each,
                file,
                new_tokens=run.new_tokens,
                sampled=run.sampled,
                temperature=run.temperature,
                progress=stage.progress,
            )
            files.append(read_answers(file))
            if missing := len(each.tasks) - len({made.task for made in files[-1]}):
                stage.say(left_out(each, missing, one.shape.usable_context))
    return files


def sample(one: TargetAnswer) -> Sample:
    """An answer as the training reads it."""
    return Sample((*one.prompt, *one.tokens), len(one.prompt), one.heldout)


def start_weights(bundle: Bundle, start: Path) -> BlockDrafter:
    """The drafter in training, with the weights of a checkpoint."""
    weights = read_weights(start, bundle.pair)
    frozen = {name: dequantize(bundle.get(name)) for name in bundle.manifest.weights if name == "drafter.d2t"}
    fp8 = bundle.manifest.precision.kv == "fp8"
    return BlockDrafter(bundle.pair, weights | frozen, bundle.manifest.weights, fp8_kv=fp8)


def borrowed(bundle: Bundle, where: str) -> Borrowed:
    """The target's embedding and head: float32 on a CPU, BF16 on a GPU."""
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    return Borrowed(*(dequantize(bundle.get(name)).to(where, kind) for name in (EMBEDDING, HEAD)))


def plan_of(run: TrainingRun) -> TrainingPlan:
    """How a run trains."""
    return TrainingPlan(
        steps=run.steps,
        minutes=run.minutes,
        batch=run.batch,
        rate=run.rate if run.rate is not None else RATE if run.begins else SCRATCH_RATE,
        patience=run.patience,
        seed=run.seed,
    )


def learn(stage: TrainingStage, bundle: Bundle, shards: Shards) -> TrainingState:
    """Train; the best weights lie in the folder ``training``."""
    torch.manual_seed(stage.run.seed)
    if not stage.work.has_steps:  # what a training left whose steps were removed
        stage.work.forget_trained()
    plan = plan_of(stage.run)
    with weights_fit():
        drafter = start_weights(bundle, stage.work.start).to(stage.device)
        lent = borrowed(bundle, stage.device)
        trainer = Trainer(drafter, lent, shards, plan, stage.work.training, device=stage.device, log=stage.say)
    try:
        return trainer.run(stage.progress)
    finally:
        trainer.close()


def after(stage: TrainingStage, bundle: Bundle) -> None:
    """The bundle of the target and the trained drafter. Raises BuildError where the target has changed meanwhile."""
    work = stage.work
    if not (work.after / MANIFEST).is_file():
        if not work.trained.is_dir():  # a build that was killed goes on with the same files
            half = work.root / "trained.part"
            shutil.rmtree(half, ignore_errors=True)
            save_weights(half, bundle.pair, kept_weights(work.training), work.start)
            half.replace(work.trained)
        for warning in _bundle(stage, work.trained, work.after):
            stage.say(f"warning: {warning}")
    made = Bundle.open(work.after, check_hashes=False).manifest.sources
    if _target_files(made) != _target_files(bundle.manifest.sources):
        raise BuildError(
            f"{stage.run.target} is not the target that it was when the training began; give that one, or another "
            f"--output (remove {work.after} in either case)"
        )


def _target_files(sources: Sequence[SourceFile]) -> list[SourceFile]:
    return [one for one in sources if one.model == "target"]


def evaluated(run: TrainingRun, data: Sequence[TrainingData]) -> list[TrainingTask]:
    """The held-out tasks that are decoded before and after."""
    return [task for each in data for task in spread(each.heldout, max(1, run.evaluated // len(data)))]


def measure(stage: TrainingStage, data: Sequence[TrainingData]) -> dict[str, Measure]:
    """Both bundles on held-out tasks, every way; a way that is done is not measured again."""
    run, work = stage.run, stage.work
    found: dict[str, Any] = work.read(work.evaluation)
    tasks = evaluated(run, data)
    for name, bundle in (("before", work.before), ("after", work.after)):
        if name not in found:
            made = evaluate(
                bundle, tasks, new_tokens=run.new_tokens, plain=run.plain, progress=_named(stage.progress, name)
            )
            found[name] = encode(made)
            work.write(work.evaluation, found)
    return {
        f"{name}, {way}": decode(Measure, body, str(work.evaluation))
        for name in ("before", "after")
        for way, body in found[name].items()
    }


def _named(progress: Progress, name: str) -> Progress:
    return lambda stage, done, total: progress(f"{stage}, {name}", done, total)
