"""Train a drafter for one's own prompts: answers, taps, training, evaluation, each stage going on where it stood."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edge_dflash.board.linux import read_memory
from edge_dflash.builder.card import DrafterCard, read_card, write_card
from edge_dflash.builder.swap import is_bundle
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import MANIFEST
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.model.registry import read_target_spec
from edge_dflash.model.specs import PairSpec, TargetSpec
from edge_dflash.planner import Planner
from edge_dflash.training.answers import TargetAnswer, make_answers, read_answers
from edge_dflash.training.card import card_of
from edge_dflash.training.data import TrainingData, read_mixture
from edge_dflash.training.drafter import EMBEDDING, HEAD, BlockDrafter
from edge_dflash.training.evaluate import Measure, evaluate
from edge_dflash.training.forecast import memory_warning, shard_bytes, training_bytes
from edge_dflash.training.losses import Borrowed
from edge_dflash.training.shards import Sample, Shards
from edge_dflash.training.start import make_start, read_weights, save_weights
from edge_dflash.training.taps import write_taps
from edge_dflash.training.trainer import Trainer, TrainingPlan, TrainingState, kept_weights
from edge_dflash.training.workdir import TrainingDir, TrainingRun
from edge_dflash.weights.quantize import dequantize

Say = Callable[[str], None]
RATE, SCRATCH_RATE = 3e-4, 1e-3  # peak learning rates
WORSE = "worse"  # folder of a drafter that is worse than the one it began as
_FREE = 1 << 30  # bytes of the disk that stay free


@dataclass(frozen=True)
class TrainingResult:
    """What a training left."""

    drafter: Path  # its directory
    card: DrafterCard
    seconds: float  # of all stages of this call


@dataclass(frozen=True)
class TrainingStage:
    """What every stage needs."""

    run: TrainingRun
    work: TrainingDir
    progress: Progress
    say: Say
    device: str


def train_drafter(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> TrainingResult:
    """Train a drafter and write it to ``run.output``, or to its folder "worse" where it is worse than its start.

    A call that was killed is gone on with by the same call. Raises CheckpointError, RecipeError and BuildError for the
    models, RequestError for the data or a disk that is too small, BackendError where the target cannot run here.
    """
    began = time.perf_counter()
    with TrainingDir(run) as work:
        if (there := work.done) is not None and (card := read_card(there)) is not None:
            say(f"nothing to do: {there} is the drafter of this training; remove {work.root} to train it again")
            return TrainingResult(there, card, time.perf_counter() - began)
        stage = TrainingStage(run, work, progress, say, device())
        data = read_mixture(run.data, heldout=run.heldout, most=run.prompts)
        bundle = before(stage)
        answers = answer(stage, bundle, data)
        samples = [sample(one) for file in answers for one in file]
        check_disk(stage, bundle.pair, samples)
        shards, _ = write_taps(bundle, samples, work.taps, progress=progress)
        state = learn(stage, bundle, Shards(work.taps, shards))
        after(stage, bundle.pair)
        measures = measure(stage, data)
        card = card_of(run, work.after, bundle, data, answers, state, measures)
        folder = run.output if card.better else run.output / WORSE
        save_weights(folder, bundle.pair, kept_weights(work.training), work.start)
        write_card(folder, card)
        work.end(folder)
    if not card.better:
        say(f"warning: the trained drafter is worse than its start on the held-out prompts; it is kept in {folder}")
    return TrainingResult(folder, card, time.perf_counter() - began)


def device() -> str:
    """What trains: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_bytes(where: str) -> int | None:
    """Memory of what trains; None: not known."""
    if where == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    state = read_memory(Path("/"))
    return None if state is None else state.total


def target_spec(run: TrainingRun) -> TargetSpec:
    """The target's sizes, of a bundle or a checkpoint. Raises BundleError, CheckpointError."""
    if is_bundle(run.target):
        return Bundle.open(run.target, check_hashes=False).pair.target
    return read_target_spec(run.target)


def before(stage: TrainingStage) -> Bundle:
    """The bundle of the target and the drafter that the training begins with."""
    run, work, half = stage.run, stage.work, stage.work.root / "start.part"
    if not work.start.is_dir() and not (work.before / MANIFEST).is_file():
        shutil.rmtree(half, ignore_errors=True)  # a kill leaves a start that is whole, or none
        make_start(target_spec(run), run.drafter, half, mask_token_id=run.mask_token, seed=run.seed)
        half.replace(work.start)
    if not (work.before / MANIFEST).is_file():
        _bundle(stage, work.start, work.before)
    return Bundle.open(work.before)


def _bundle(stage: TrainingStage, drafter: Path, output: Path) -> None:
    """A bundle of the target with a drafter. The warning that it fits badly is what the training is for."""
    run = stage.run
    if is_bundle(run.target):
        own = BuildConfig(run.target, drafter, output, run.arch or "cpu", None, run.recipe, run.max_context)
        build(own, stage.progress)
        return
    arch = run.arch or _arch(stage.device)
    native = None if arch == "cpu" else "native"
    config = BuildConfig(run.target, drafter, output, arch, native, run.recipe, run.max_context)
    build(config, stage.progress)


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
    return files


def lanes(stage: TrainingStage) -> int:
    """Answers that are made at once."""
    return 1 if stage.device == "cpu" else 8


def sample(one: TargetAnswer) -> Sample:
    """An answer as the training reads it."""
    return Sample((*one.prompt, *one.tokens), len(one.prompt), one.heldout)


def check_disk(stage: TrainingStage, pair: PairSpec, samples: Sequence[Sample]) -> None:
    """Tell what the taps will take. Raises RequestError where that is more than is allowed or free."""
    tokens = sum(len(one.ids) for one in samples)
    size, allowed = shard_bytes(pair, tokens), stage.run.disk * 1e9
    stage.say(f"{len(samples):,} answers, {tokens:,} tokens; their taps take {size / 1e9:.2f} GB of the disk")
    free = shutil.disk_usage(stage.work.root).free - _FREE
    held = sum(file.stat().st_size for file in stage.work.taps.glob("*.safetensors")) if stage.work.taps.is_dir() else 0
    if size > allowed:
        raise RequestError(f"taps take {size / 1e9:.1f} GB, --disk allows {allowed / 1e9:.1f}; give more")
    if size - held > free:
        raise RequestError(f"taps take {size / 1e9:.1f} GB, the disk has {max(0, free) / 1e9:.1f} free; make room")


def start_weights(bundle: Bundle, start: Path) -> BlockDrafter:
    """The drafter in training, with the weights of a checkpoint."""
    weights = read_weights(start, bundle.pair)
    frozen = {name: dequantize(bundle.get(name)) for name in bundle.manifest.weights if name == "drafter.d2t"}
    return BlockDrafter(bundle.pair, weights | frozen, bundle.manifest.weights)


def borrowed(bundle: Bundle, where: str) -> Borrowed:
    """The target's embedding and head: float32 on a CPU, BF16 on a GPU."""
    kind = torch.float32 if where == "cpu" else torch.bfloat16
    return Borrowed(*(dequantize(bundle.get(name)).to(where, kind) for name in (EMBEDDING, HEAD)))


def plan_of(run: TrainingRun) -> TrainingPlan:
    """How a run trains."""
    scratch = run.drafter is None or not any(run.drafter.glob("*.safetensors"))
    return TrainingPlan(
        steps=run.steps,
        minutes=run.minutes,
        batch=run.batch,
        rate=run.rate or (SCRATCH_RATE if scratch else RATE),
        patience=run.patience,
        seed=run.seed,
    )


def learn(stage: TrainingStage, bundle: Bundle, shards: Shards) -> TrainingState:
    """Train; the best weights lie in the folder ``training``."""
    torch.manual_seed(stage.run.seed)
    drafter = start_weights(bundle, stage.work.start).to(stage.device)
    lent, plan = borrowed(bundle, stage.device), plan_of(stage.run)
    size = replace(plan.batch, tokens=int(shards.lengths.max()))
    needed = training_bytes(bundle.pair, size, mixed=stage.device != "cpu")
    if (warning := memory_warning(needed, device_bytes(stage.device))) is not None:
        stage.say(warning)
    trainer = Trainer(drafter, lent, shards, plan, stage.work.training, device=stage.device, log=stage.say)
    try:
        return trainer.run(stage.progress)
    except torch.OutOfMemoryError:
        raise BackendError(
            f"the GPU has no room for {plan.batch.sequences} answers of {size.tokens} tokens with {plan.batch.anchors} "
            "blocks each; give fewer --sequences or --anchors and more --accumulate: the answers are not asked again"
        ) from None
    finally:
        trainer.close()


def after(stage: TrainingStage, pair: PairSpec) -> None:
    """The bundle of the target and the trained drafter."""
    work = stage.work
    if not (work.after / MANIFEST).is_file():
        trained = work.root / "trained"
        shutil.rmtree(trained, ignore_errors=True)
        save_weights(trained, pair, kept_weights(work.training), work.start)
        _bundle(stage, trained, work.after)


def measure(stage: TrainingStage, data: Sequence[TrainingData]) -> dict[str, Measure]:
    """Both bundles on held-out tasks, every way; a way that is done is not measured again."""
    run, work = stage.run, stage.work
    found: dict[str, Any] = work.read(work.evaluation)
    tasks = [task for each in data for task in each.heldout[: max(1, run.evaluated // len(data))]]
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
