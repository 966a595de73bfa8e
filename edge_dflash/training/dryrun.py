"""What a training takes at most, told before it begins: a few tokens are timed, and steps where --steps counts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import scratch
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.training.forecast import Forecast, forecast, gigabytes
from edge_dflash.training.outlook import outlook
from edge_dflash.training.run import before, borrowed, evaluated, start_weights
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
    read_prompts,
    weights_fit,
)
from edge_dflash.training.taps import write_taps
from edge_dflash.training.trainer import Trainer, TrainingPlan
from edge_dflash.training.workdir import TrainingDir, TrainingRun

TIMED_STEPS = 2
SCRATCH = "dry-"  # and something, of a folder that goes


def dry_run(run: TrainingRun, progress: Progress = unheard, say: Say = lambda line: None) -> Forecast:
    """The forecast of a run; its first bundle is built, and kept for it. Raises what the run raises."""
    say("a dry run builds the first bundle, which the training keeps")
    with TrainingDir(run, dry=True) as work, scratch(work.root, SCRATCH) as folder:
        stage = TrainingStage(run, work, progress, say, device())
        data = read_prompts(stage)
        bundle = before(stage)
        with Planner.open(
            bundle.path, fallback=False, self_test="off", lanes=lanes(stage), progress=progress
        ) as planner:
            ahead = outlook(run, planner, data, len(evaluated(run, data)))
        if ahead is None:
            raise RequestError(
                f"no prompt leaves room for an answer that can be timed in the context of {work.before}; give shorter "
                "prompts, or a larger --max-context"
            )
        check_memory(stage, bundle.pair, ahead.longest, "at most")
        seconds = run.steps * _step(stage, bundle, ahead.longest, folder) if run.steps else 60 * run.minutes
    spent = {"answers": ahead.answers, "taps": ahead.taps, "training": seconds, "evaluation": ahead.evaluation}
    told = forecast(
        bundle.pair,
        replace(run.batch, tokens=ahead.longest),
        tokens=ahead.tokens,
        stages={name: one / 3600 for name, one in spent.items()},
        mixed=stage.device != "cpu",
        bundle=bundle_bytes(bundle),
        device=device_bytes(stage.device),
    )
    if told.disk > run.disk * 1e9:
        say(f"warning: taps take {gigabytes(told.disk)}, --disk is {run.disk:g} GB; {disk_remedy(told.disk)}")
    say(f"the first bundle is kept in {work.before}")
    return told


def _step(stage: TrainingStage, bundle: Bundle, tokens: int, folder: Path) -> float:
    """Seconds of a step, of answers that have ``tokens`` with their prompts; what they say does not matter."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, bundle.pair.target.vocab_size, (stage.run.sequences, tokens))
    samples = [Sample(tuple(row), tokens // 2) for row in ids.tolist()]
    shards, _ = write_taps(bundle, samples, folder / "taps", progress=stage.progress)
    plan = TrainingPlan(steps=TIMED_STEPS, batch=stage.run.batch, checks=1, patience=0, seconds=1e9)
    with weights_fit():
        drafter = start_weights(bundle, stage.work.start).to(stage.device)
        found, lent = Shards(folder / "taps", shards), borrowed(bundle, stage.device)
        trainer = Trainer(drafter, lent, found, plan, folder / "probe", device=stage.device)
    try:
        return trainer.run(stage.progress).step_seconds
    finally:
        trainer.close()
