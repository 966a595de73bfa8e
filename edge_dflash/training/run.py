"""Train a drafter for one's own prompts: answers, taps, training, evaluation, each stage going on where it stood."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_dflash.builder.card import DrafterCard, read_card, write_card
from edge_dflash.builder.swap import is_bundle
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import MANIFEST
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import scratch
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BackendError, BuildError, RequestError
from edge_dflash.model.dflash import DRAFT_IDS
from edge_dflash.model.registry import match_pair, read_drafter_spec
from edge_dflash.model.specs import PairSpec
from edge_dflash.planner import Planner
from edge_dflash.training import forecast as costs
from edge_dflash.training.answers import TargetAnswer, make_answers, read_answers
from edge_dflash.training.data import TrainingData, TrainingTask, read_mixture, read_tasks, spread
from edge_dflash.training.drafter import TARGET, BlockDrafter
from edge_dflash.training.evaluate import Measure, card_of, evaluate, shaped, warnings
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.start import make_start, read_weights, same_files, save_weights
from edge_dflash.training.taps import Sample, Shards, shard_bytes, write_taps
from edge_dflash.training.trainer import Trainer, kept_weights
from edge_dflash.training.workdir import TrainingDir, TrainingState, read_object, target_spec, write_object
from edge_dflash.weights.quantize import dequantize

Say = Callable[[str], None]
AGAIN = "the same train-drafter command"
WORSE = "worse"  # folder of a drafter that is worse than the one it began as
SCRATCH = "dry-"  # and something, of a folder that goes
FEW = 20  # held-out prompts
TIMED_STEPS = 2  # of a dry run
_FREE = 1 << 30  # bytes of the disk that stay free


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
            if " ".join(read_tasks(path, most=0).sha256 for path in run.data) != card.data_sha256:  # changed since
                raise RequestError(
                    f"{there} was trained on other prompts than {', '.join(map(str, run.data))} has now; give another "
                    f"--output, or remove {run.output / 'work'}"
                )
            say(f"nothing to do: {there} is the drafter of this training; remove {work.root} to train it again")
            return TrainingResult(there, card, time.perf_counter() - began)
        folder, card = Training(run, work, progress, say).run_stages()
    for line in warnings(card, folder):
        say(line)
    return TrainingResult(folder, card, time.perf_counter() - began)


def dry_run(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> costs.Forecast:
    """What a run takes at most: a few tokens are timed, and steps where --steps counts them.

    Its first bundle is built, and kept for it. Raises what the run raises.
    """
    with TrainingDir(run, dry=True) as work, scratch(work.root, SCRATCH) as folder:
        say("a dry run builds the first bundle, which the training keeps")
        training = Training(run, work, progress, say)
        data = training.prompts()
        bundle = training.before()
        with training.planner(bundle) as planner:
            told = training.forecast(planner, bundle, data)
        if told is None:
            raise RequestError(
                f"no prompt leaves room for an answer that can be timed in the context of {work.before}; give shorter "
                "prompts, or a larger --max-context"
            )
        if run.steps:
            steps = run.steps * training.step_seconds(bundle, told.longest, folder)
            told = replace(told, seconds={stage: told.seconds.get(stage, steps) for stage in costs.STAGES})
        if told.disk > run.disk * 1e9:
            say(f"warning: {_too_large(told.disk, run)}")
        say(f"the first bundle is kept in {work.before}")
        return told


@dataclass(frozen=True)
class Training:
    """The stages of a training, and what all of them need."""

    run: TrainingRun
    work: TrainingDir
    progress: Progress = unheard
    say: Say = lambda line: None
    device: costs.TrainingDevice = field(default_factory=costs.TrainingDevice.found)

    def run_stages(self) -> tuple[Path, DrafterCard]:
        """All of them; where the drafter lies, and its card."""
        run, work = self.run, self.work
        data = self.prompts()
        bundle = self.before()
        if not all(work.answers(index).exists() for index in range(len(data))):
            work.forget_training()  # of other answers, which were removed
        answers = self.answers(bundle, data)
        samples = [Sample((*one.prompt, *one.tokens), len(one.prompt), one.heldout) for file in answers for one in file]
        self.check_memory(bundle.pair, max(len(one.ids) for one in samples))
        self.check_disk(bundle, samples)
        state = self.learn(bundle, write_taps(bundle, samples, work.taps, progress=self.progress, say=self.say))
        self.after(bundle)
        card = card_of(run, work.after, bundle, data, answers, state, self.measure(data))
        folder = run.output if card.better else run.output / WORSE
        save_weights(folder, bundle.pair, kept_weights(work.training), work.start)
        write_card(folder, card)
        work.end(folder)
        return folder, card

    def prompts(self) -> tuple[TrainingData, ...]:
        """The tasks of all files; says how many there are, what is left out, and what may be too few."""
        run, say = self.run, self.say
        data = read_mixture(run.data, heldout=run.heldout, most=run.prompts)
        for each in data:
            say(f"{each.path}: {len(each.training):,} prompts to train on, {len(each.heldout):,} held out")
            if each.skipped:
                say(f"{each.path}: left out with images, or torn at the end: {each.skipped:,}")
            if each.unread:
                say(f"warning: {each.path} has keys that mean nothing here: {', '.join(each.unread)}")
            if any(map(shaped, each.training)) and not any(map(shaped, each.heldout)):
                say(f"warning: no held-out prompt of {each.path} has a form, and others do; give more --heldout")
        if (heldout := sum(len(each.heldout) for each in data)) < FEW:
            say(
                f"warning: {heldout} held-out prompts choose the weights and say little; give more prompts or --heldout"
            )
        return data

    def before(self) -> Bundle:
        """The bundle of the target and the drafter that the training begins with."""
        run, work, half = self.run, self.work, self.work.root / "start.part"
        init = run.drafter if run.drafter is not None and run.drafter.is_dir() else None
        if work.start.is_dir() and init is not None and not same_files(init, work.start):
            if work.answers(0).exists():
                raise RequestError(
                    f"{init} has changed since this training began; give another --output, or {work.gone}"
                )
            for folder in (work.start, work.before):  # it was put right since
                shutil.rmtree(folder, ignore_errors=True)
        if not (work.before / MANIFEST).is_file():
            target = target_spec(run)
            if not work.start.is_dir():
                shutil.rmtree(half, ignore_errors=True)  # a kill leaves a start that is whole, or none
                make_start(target, run.drafter, half, mask_token_id=run.mask_token, seed=run.seed)
                half.replace(work.start)
            self.check_memory(match_pair(target, read_drafter_spec(work.start, target.num_layers)), 1, "at least")
            self._build(work.start, work.before)
        return Bundle.open(work.before)

    def _build(self, drafter: Path, output: Path) -> tuple[str, ...]:
        """A bundle of the target with a drafter; the build's warnings."""
        run, arch, backend = self.run, self.run.arch or "cpu", None
        if not is_bundle(run.target):
            arch = run.arch or _arch(self.device.name)
            backend = None if arch == "cpu" else "native"
        config = BuildConfig(run.target, drafter, output, arch, backend, run.recipe, run.max_context)
        return build(replace(config, resume=AGAIN), self.progress).warnings

    def planner(self, bundle: Bundle) -> Planner:
        """What answers with the first bundle, several prompts at once on a GPU."""
        lanes = 8 if self.device.mixed else 1
        return Planner.open(bundle.path, fallback=False, self_test="off", queue=64, lanes=lanes, progress=self.progress)

    def forecast(self, planner: Planner, bundle: Bundle, data: Sequence[TrainingData]) -> costs.Forecast | None:
        """What all takes at most; None where a few tokens cannot be timed."""
        return costs.forecast(self.run, planner, bundle, data, len(self._evaluated(data)), self.device)

    def answers(self, bundle: Bundle, data: Sequence[TrainingData]) -> list[tuple[TargetAnswer, ...]]:
        """The target's answers to all prompts, of each file."""
        files = [self.work.answers(index) for index in range(len(data))]
        with self.planner(bundle) as planner:
            if not any(file.exists() for file in files) and (told := self.forecast(planner, bundle, data)):
                self.say(f"{told.time}; fewer --prompts, --sampled, --evaluated or --new-tokens make it shorter")
            for each, file in zip(data, files, strict=True):
                make_answers(planner, each, file, self.run, self.progress)
        found = [read_answers(file) for file in files]
        for each, made in zip(data, found, strict=True):
            if missing := len(each.tasks) - len({one.task for one in made}):
                self.say(
                    f"{each.path}: {missing:,} prompts leave no room for an answer in "
                    f"{planner.shape.usable_context:,} tokens: left out"
                )
        return found

    def check_memory(self, pair: PairSpec, tokens: int, bound: str = "about") -> None:
        """Tell what a step needs with prompts and answers of so many tokens; warn where the device has less."""
        needed = costs.training_bytes(pair, self.run, tokens, mixed=self.device.mixed)
        told = f"a step needs {bound} {costs.gigabytes(needed['total'])} of memory"
        self.say(costs.memory_warning(needed, self.device.size) or told)

    def check_disk(self, bundle: Bundle, samples: Sequence[Sample]) -> None:
        """Tell what a training will take. Raises RequestError where that is more than is allowed or free."""
        tokens, work = sum(len(one.ids) for one in samples), self.work
        size, files = shard_bytes(bundle.pair, tokens), costs.training_files(bundle)
        self.say(
            f"{len(samples):,} answers, {tokens:,} tokens; their taps take {costs.gigabytes(size)} of the disk, "
            f"checkpoints and bundles {costs.gigabytes(files)}"
        )
        if size > self.run.disk * 1e9:
            raise RequestError(_too_large(size, self.run))
        kept = (file for folder in (work.taps, work.training, work.after) for file in folder.rglob("*.*"))
        held, free = sum(file.stat().st_size for file in kept), max(0, shutil.disk_usage(work.root).free - _FREE)
        if size + files - held > free:
            raise RequestError(
                f"taps, checkpoints and bundles take {costs.gigabytes(size + files)}, {costs.gigabytes(held)} of it "
                f"are there, and the disk has {costs.gigabytes(free)} free; make room"
            )

    def learn(self, bundle: Bundle, shards: Sequence[Path]) -> TrainingState:
        """Train; the best weights lie in the folder ``training``."""
        torch.manual_seed(self.run.seed)
        if not self.work.has_steps:  # what a training left whose steps were removed
            self.work.forget_trained()
        with self._trainer(bundle, shards, self.run, self.work.training, self.say) as trainer:
            return trainer.run(self.progress)

    def step_seconds(self, bundle: Bundle, tokens: int, folder: Path) -> float:
        """Seconds of a step of answers that have ``tokens`` with their prompts; what they say does not matter."""
        ids = np.random.default_rng(0).integers(0, bundle.pair.target.vocab_size, (self.run.sequences, tokens))
        samples = [Sample(tuple(row), tokens // 2) for row in ids.tolist()]
        shards = write_taps(bundle, samples, folder / "taps", progress=self.progress)
        run = replace(self.run, steps=TIMED_STEPS, minutes=0.0, checks=1, patience=0, pause=1e9)
        with self._trainer(bundle, shards, run, folder / "probe") as trainer:
            return trainer.run(self.progress).step_seconds

    @contextmanager
    def _trainer(
        self, bundle: Bundle, shards: Sequence[Path], run: TrainingRun, folder: Path, log: Say = lambda line: None
    ) -> Iterator[Trainer]:
        """A trainer of the first bundle's drafter; raises BackendError where the device has no room for it."""
        manifest, where = bundle.manifest, self.device.name
        kind = torch.bfloat16 if self.device.mixed else torch.float32
        weights = read_weights(self.work.start, bundle.pair)
        weights |= {name: dequantize(bundle.get(name)) for name in manifest.weights if name == DRAFT_IDS}
        weights |= {name: dequantize(bundle.get(name)).to(kind) for name in TARGET}
        try:
            drafter = BlockDrafter(bundle.pair, weights, manifest.weights, fp8_kv=manifest.precision.kv == "fp8")
            trainer = Trainer(drafter.to(where), Shards(shards), run, folder, device=where, log=log)
        except torch.OutOfMemoryError:
            raise BackendError(
                "the GPU has no room for the drafter and the target's embedding and head; free it, or take a larger one"
            ) from None
        try:
            yield trainer
        finally:
            trainer.close()

    def after(self, bundle: Bundle) -> None:
        """The bundle of the target and the trained drafter. Raises BuildError where the target changed meanwhile."""
        work = self.work
        if not (work.after / MANIFEST).is_file():
            if not work.trained.is_dir():  # a build that was killed goes on with the same files
                half = work.root / "trained.part"
                shutil.rmtree(half, ignore_errors=True)
                save_weights(half, bundle.pair, kept_weights(work.training), work.start)
                half.replace(work.trained)
            for warning in self._build(work.trained, work.after):
                self.say(f"warning: {warning}")
        made, began = (
            [file for file in one.manifest.sources if file.model == "target"]
            for one in (Bundle.open(work.after, check_hashes=False), bundle)
        )
        if made != began:
            raise BuildError(
                f"{self.run.target} is not the target that it was when the training began; give that one, or another "
                f"--output (remove {work.after} in either case)"
            )

    def measure(self, data: Sequence[TrainingData]) -> dict[str, Measure]:
        """Both bundles on held-out tasks, every way; a way that is done is not measured again."""
        run, work = self.run, self.work
        found: dict[str, Any] = read_object(work.evaluation)
        for name, bundle in (("before", work.before), ("after", work.after)):

            def tell(stage: str, done: int, total: int, name: str = name) -> None:
                self.progress(f"{stage}, {name}", done, total)

            if name not in found:
                tasks = self._evaluated(data)
                with Planner.open(bundle, fallback=False, self_test="off") as planner:  # every draft is verified
                    made = evaluate(planner, tasks, new_tokens=run.new_tokens, plain=run.plain, progress=tell)
                found[name] = encode(made)
                write_object(work.evaluation, found)
        return {
            f"{name}, {way}": decode(Measure, body, str(work.evaluation))
            for name in ("before", "after")
            for way, body in found[name].items()
        }

    def _evaluated(self, data: Sequence[TrainingData]) -> list[TrainingTask]:
        """The held-out tasks that are decoded before and after."""
        return [task for each in data for task in spread(each.heldout, max(1, self.run.evaluated // len(data)))]


def _arch(where: str) -> str:
    """What runs the bundles here."""
    if where == "cpu":
        return "cpu"
    from edge_dflash.backends.cuda.support import device_sm  # needs CUDA's bindings

    return f"sm{device_sm()}"


def _too_large(taps: int, run: TrainingRun) -> str:
    """What to tell of taps that ``--disk`` does not allow."""
    allowed = ceil(110 * taps / 1e9) / 100
    return (
        f"taps take {costs.gigabytes(taps)}, --disk is {run.disk:g} GB; give --disk {allowed:g}, or fewer --prompts or "
        "--sampled"
    )
