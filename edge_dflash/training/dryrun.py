"""What a training will take, told before it begins: a few answers, taps and steps are timed, the rest is arithmetic."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.planner import Planner
from edge_dflash.training.answers import make_answers, read_answers
from edge_dflash.training.data import TrainingData, TrainingTask, read_mixture
from edge_dflash.training.evaluate import evaluate_planner
from edge_dflash.training.forecast import BatchSize, Forecast, Speeds, forecast
from edge_dflash.training.run import (
    Say,
    TrainingStage,
    before,
    borrowed,
    device,
    device_bytes,
    lanes,
    sample,
    start_weights,
)
from edge_dflash.training.shards import Sample, Shards
from edge_dflash.training.taps import write_taps
from edge_dflash.training.trainer import PROBED, Trainer, TrainingPlan
from edge_dflash.training.workdir import TrainingDir, TrainingRun

ASKED = 8  # prompts that are answered, at least as many as there are lanes
EVALUATED = 2  # of them, also answered one at a time, in every way


def dry_run(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> Forecast:
    """The forecast of a run; its first bundle is built, and kept for it. Raises what the run raises."""
    with TrainingDir(run, dry=True) as work, TemporaryDirectory(dir=work.root) as scratch:
        stage = TrainingStage(run, work, progress, say, device())
        data = read_mixture(run.data, heldout=run.heldout, most=run.prompts)
        bundle = before(stage)
        answers, made, evaluation = _answers(stage, bundle, data, Path(scratch))
        shards, taps = write_taps(bundle, answers, Path(scratch) / "taps", progress=progress)
        step = _steps(stage, bundle, Shards(Path(scratch) / "taps", shards), Path(scratch) / "probe")
    wanted = sum(len(one.heldout) + sum(1 if t.answer else 1 + run.sampled for t in one.training) for one in data)
    prompt = sum(one.prompt for one in answers) / len(answers)
    length = sum(len(one.ids) - one.prompt for one in answers) / len(answers)
    return forecast(
        bundle.pair,
        BatchSize(run.sequences, max(len(one.ids) for one in answers), run.anchors, run.accumulate),
        steps=run.steps or round(60 * run.minutes / step),
        prompts=wanted,
        prompt_tokens=round(prompt),
        answer_tokens=round(length),
        speeds=Speeds(answer_tokens=made, tap_tokens=taps, step_seconds=step, evaluation_seconds=evaluation),
        answered=all(task.answer is not None for one in data for task in one.training),
        mixed=stage.device != "cpu",
        device=device_bytes(stage.device),
    )


def _answers(
    stage: TrainingStage, bundle: Bundle, data: Sequence[TrainingData], scratch: Path
) -> tuple[list[Sample], float, float]:
    """A few answers, tokens a second that are made, and the seconds that the evaluations will take."""
    few = replace(data[0], tasks=tuple(replace(task, answer=None, heldout=True) for task in data[0].tasks[:ASKED]))
    settings: dict[str, Any] = {"fallback": False, "self_test": "off", "progress": stage.progress}
    with Planner.open(bundle.path, lanes=lanes(stage), **settings) as planner:
        began = time.perf_counter()
        file = scratch / "answers.jsonl"
        made = make_answers(planner, few, file, new_tokens=stage.run.new_tokens, progress=stage.progress)
        seconds = time.perf_counter() - began
        evaluation = _evaluation(stage, planner, few.tasks[:EVALUATED])
    return [sample(one) for one in read_answers(file)], made / seconds, evaluation


def _evaluation(stage: TrainingStage, planner: Planner, tasks: Sequence[TrainingTask]) -> float:
    """Seconds of both evaluations, by the tasks that are answered with drafts alone, and also plainly."""
    run, spent = stage.run, list[float]()
    for plain in (0, len(tasks)):
        began = time.perf_counter()
        evaluate_planner(planner, tasks, new_tokens=run.new_tokens, plain=plain, progress=stage.progress)
        spent.append(time.perf_counter() - began)
    drafted, both = spent
    return 2 * (run.evaluated * drafted + min(run.plain, run.evaluated) * max(0.0, both - drafted)) / len(tasks)


def _steps(stage: TrainingStage, bundle: Bundle, shards: Shards, folder: Path) -> float:
    """Seconds of a step."""
    drafter = start_weights(bundle, stage.work.start).to(stage.device)
    plan = TrainingPlan(steps=PROBED, batch=stage.run.batch, checks=1, patience=0, seconds=1e9)
    shards.repeat(stage.run.sequences)
    trainer = Trainer(drafter, borrowed(bundle, stage.device), shards, plan, folder, device=stage.device)
    seconds = trainer.run(stage.progress).step_seconds
    trainer.close()
    shutil.rmtree(folder, ignore_errors=True)
    return seconds
