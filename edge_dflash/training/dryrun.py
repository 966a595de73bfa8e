"""What a training will take, told before it begins: a few answers, taps and steps are timed, the rest is arithmetic."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.common.scratch import scratch
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.training.answers import make_answers, open_tokenizer, prompt_ids, read_answers
from edge_dflash.training.data import TrainingData, TrainingTask, spread
from edge_dflash.training.evaluate import evaluate_planner, ways
from edge_dflash.training.forecast import Forecast, Speeds, forecast, gigabytes
from edge_dflash.training.outlook import PROBE_TOKENS, clock, outlook
from edge_dflash.training.run import before, borrowed, evaluated, sample, start_weights
from edge_dflash.training.shards import Sample, Shards
from edge_dflash.training.stage import (
    Say,
    TrainingStage,
    bundle_bytes,
    check_memory,
    device,
    device_bytes,
    disk_remedy,
    lanes,
    left_out,
    read_prompts,
    weights_fit,
)
from edge_dflash.training.taps import write_taps
from edge_dflash.training.trainer import LEAST_STEPS, PROBED, Trainer, TrainingPlan
from edge_dflash.training.workdir import TrainingDir, TrainingRun

ASKED = 8  # prompts that are answered at most, of all files together
ANSWER_SECONDS = 20.0  # that their answers may take, by a few tokens
EVALUATED_TOKENS = 48  # of one answer in every way, with the drafter and without
FIRST_STEPS, STEP_SECONDS = 2, 20.0  # steps that are timed; PROBED more, where they take no longer than that
SCRATCH = "dry-"  # and something, of a folder that goes


@dataclass(frozen=True)
class _Length:
    """Tokens of a task."""

    task: TrainingTask
    prompt: int
    given: int | None  # of an answer that is not asked for


@dataclass(frozen=True)
class _Answers:
    """A few answers, and what all of them will be by these."""

    samples: list[Sample]
    rate: float  # tokens a second that are made
    evaluation: float  # seconds
    tokens: int  # of all prompts and answers
    made: int  # of them, by the target
    longest: int  # tokens of a prompt and its answer


def dry_run(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> Forecast:
    """The forecast of a run; its first bundle is built, and kept for it. Raises what the run raises."""
    say("a dry run builds the first bundle, which the training keeps, and then measures for about a minute")
    with TrainingDir(run, dry=True) as work, scratch(work.root, SCRATCH) as folder:
        stage = TrainingStage(run, work, progress, say, device())
        data = read_prompts(stage)
        bundle = before(stage)
        answers = _answers(stage, bundle, data, folder)
        shards, taps = write_taps(bundle, answers.samples, folder / "taps", progress=progress)
        step = _steps(stage, bundle, Shards(folder / "taps", shards), folder / "probe")
    told = forecast(
        bundle.pair,
        replace(run.batch, tokens=answers.longest),
        steps=run.steps or max(LEAST_STEPS, round(60 * run.minutes / step)),
        tokens=answers.tokens,
        made=answers.made,
        speeds=Speeds(answers.rate, taps, step, answers.evaluation),
        mixed=stage.device != "cpu",
        bundle=bundle_bytes(bundle),
        device=device_bytes(stage.device),
    )
    if told.disk > run.disk * 1e9:
        say(f"warning: taps take {gigabytes(told.disk)}, --disk is {run.disk:g} GB; {disk_remedy(told.disk)}")
    say(f"the first bundle is kept in {work.before}")
    return told


def _answers(stage: TrainingStage, bundle: Bundle, data: Sequence[TrainingData], scratch: Path) -> _Answers:
    """Answers to prompts of all files, behind what the memory may have to hold."""
    samples, seconds, made = list[Sample](), 0.0, 0
    tokens = answered = longest = 0
    with Planner.open(
        bundle.path, fallback=False, self_test="off", lanes=lanes(stage), progress=stage.progress
    ) as planner:
        tokenizer, usable = open_tokenizer(planner), planner.shape.usable_context
        lengths = [[_length(tokenizer, task, usable) for task in each.tasks] for each in data]
        bound = max(one.prompt + (one.given or stage.run.new_tokens) for own in lengths for one in own)
        check_memory(stage, bundle.pair, min(bound, usable), "at most")
        asked, measured = list[TrainingTask](), _measured(stage, planner, data)
        for number, (each, all_lengths) in enumerate(zip(data, lengths, strict=True)):
            fitting = [one for one in all_lengths if one.prompt < usable]
            if missing := len(all_lengths) - len(fitting):
                stage.say(left_out(each, missing, usable))
            tasks = spread([one.task for one in fitting], -(-measured.asked // len(data)))
            few = [replace(task, answer=None, heldout=True) for task in tasks]
            began, file = time.perf_counter(), scratch / f"answers-{number}.jsonl"
            made += make_answers(planner, replace(each, tasks=tuple(few)), file, new_tokens=measured.new_tokens)
            seconds += time.perf_counter() - began
            found = [sample(one) for one in read_answers(file)]
            own = [_whole(len(one.ids) - one.prompt, measured.new_tokens, stage.run) for one in found]
            told = _all_tokens(stage.run, fitting, own)
            tokens, answered, longest = tokens + told[0], answered + told[1], max(longest, told[2])
            samples, asked = samples + found, asked + few
        lengths_made = [_whole(len(one.ids) - one.prompt, measured.new_tokens, stage.run) for one in samples]
        mean = sum(lengths_made) / len(lengths_made)
        evaluation = _evaluation(stage, planner, asked[0], len(evaluated(stage.run, data)), mean)
    return _Answers(samples, made / seconds, evaluation, tokens, answered, min(longest, usable))


@dataclass(frozen=True)
class _Measured:
    """How much is measured, so that it takes its time and no longer."""

    asked: int  # prompts that are answered
    new_tokens: int  # of an answer, at most


def _measured(stage: TrainingStage, planner: Planner, data: Sequence[TrainingData]) -> _Measured:
    """By a few tokens; says what the dry run itself takes, and what the training takes at most."""
    run, count = stage.run, len(evaluated(stage.run, data))
    ahead = outlook(run, planner, data, count)
    if ahead is None:
        return _Measured(ASKED, run.new_tokens)
    each = ahead.pace.seconds(ahead.prompt, run.new_tokens)
    asked = max(len(data), min(ASKED, int(ANSWER_SECONDS / each)))
    left = ANSWER_SECONDS / asked - ahead.prompt / ahead.pace.prompt
    new_tokens = max(PROBE_TOKENS, min(run.new_tokens, int(left * ahead.pace.drafted)))
    short = min(run.new_tokens, EVALUATED_TOKENS)
    spent = asked * ahead.pace.seconds(ahead.prompt, new_tokens)
    for plain in (False, True):
        spent += len(ways(data[0].tasks)) * ahead.pace.seconds(ahead.prompt, short, plain=plain)
    stage.say(f"the dry run takes about {clock(spent + STEP_SECONDS)} from here")
    stage.say(ahead.line(run))
    return _Measured(asked, new_tokens)


def _whole(made: int, most: int, run: TrainingRun) -> int:
    """Tokens of an answer; one that was cut because a dry run measures little may have all."""
    return run.new_tokens if made >= most else made


def _length(tokenizer: Tokenizer, task: TrainingTask, usable: int) -> _Length:
    prompt, given = len(prompt_ids(tokenizer, task)), None
    if task.answer is not None and not task.heldout:
        given = min(len(tokenizer.encode_text(task.answer)), max(0, usable - prompt))
    return _Length(task, prompt, given)


def _all_tokens(run: TrainingRun, lengths: Sequence[_Length], answers: Sequence[int]) -> tuple[int, int, int]:
    """Tokens of prompts and answers, those of them that are made, and the longest, by a few ``answers``."""
    mean, most = round(sum(answers) / len(answers)), max(answers)
    tokens = made = longest = 0
    for one in lengths:
        count = 1 if one.task.heldout or one.given is not None else 1 + run.sampled
        tokens += count * (one.prompt + (mean if one.given is None else one.given))
        made += count * mean if one.given is None else 0
        longest = max(longest, one.prompt + (most if one.given is None else one.given))
    return tokens, made, longest


def _evaluation(stage: TrainingStage, planner: Planner, task: TrainingTask, count: int, mean: float) -> float:
    """Seconds of both evaluations: ``count`` tasks, answers of ``mean`` tokens; by a short answer in every way."""
    run, length = stage.run, min(stage.run.new_tokens, EVALUATED_TOKENS)
    began = time.perf_counter()
    found = evaluate_planner(planner, [task], new_tokens=length, plain=1, progress=stage.progress)
    spent, seconds = time.perf_counter() - began, 0.0
    for one in found.values():
        drafted, plain = one.tokens_per_second, one.plain_tokens_per_second
        if drafted and plain:
            seconds += count * mean / drafted + min(run.plain, count) * mean / plain
    return 2 * (seconds or spent * count)


def _steps(stage: TrainingStage, bundle: Bundle, shards: Shards, folder: Path) -> float:
    """Seconds of a step."""
    shards.repeat(stage.run.sequences)
    taken = _timed(stage, bundle, shards, folder, FIRST_STEPS)
    return _timed(stage, bundle, shards, folder, PROBED) if PROBED * taken <= STEP_SECONDS else taken


def _timed(stage: TrainingStage, bundle: Bundle, shards: Shards, folder: Path, steps: int) -> float:
    plan = TrainingPlan(steps=steps, batch=stage.run.batch, checks=1, patience=0, seconds=1e9)
    with weights_fit():
        drafter = start_weights(bundle, stage.work.start).to(stage.device)
        trainer = Trainer(drafter, borrowed(bundle, stage.device), shards, plan, folder, device=stage.device)
    try:
        return trainer.run(stage.progress).step_seconds
    finally:
        trainer.close()
        shutil.rmtree(folder, ignore_errors=True)
