"""How long a training takes at most, told before its long stages: a few tokens are timed, the rest is arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_dflash.errors import EdgeDflashError
from edge_dflash.planner import Planner
from edge_dflash.training.answers import open_tokenizer, prompt_ids
from edge_dflash.training.data import TrainingData, TrainingTask, spread
from edge_dflash.training.evaluate import ways
from edge_dflash.training.workdir import TrainingRun

PROBE_TOKENS = 24  # that are timed, with the drafter and without
_READ = 32  # prompts of a file whose length is counted
FEWER = "fewer --prompts, --sampled, --evaluated or --new-tokens make it shorter"


@dataclass(frozen=True)
class AnswerPace:
    """Tokens a second of one request."""

    prompt: float
    drafted: float  # with the drafter
    plain: float

    def seconds(self, prompt: float, answer: float, *, plain: bool = False) -> float:
        """Of an answer to a prompt of so many tokens."""
        return prompt / self.prompt + answer / (self.plain if plain else self.drafted)


def pace_of(planner: Planner, task: TrainingTask) -> AnswerPace:
    """Time a few tokens of a task. Raises what :meth:`Planner.plan` raises."""
    rates = []
    for speculative in (True, False):
        plan = planner.plan(task.asked, raw=task.raw, max_new_tokens=PROBE_TOKENS, speculative=speculative)
        rates.append(max(1, len(plan.tokens) - 1) / max(plan.timings.decode_seconds, 1e-6))
    return AnswerPace(plan.prompt_tokens / max(plan.timings.prefill_seconds, 1e-6), *rates)


@dataclass(frozen=True)
class Outlook:
    """Seconds of the stages, at most: every answer is as long as ``--new-tokens`` allows, and none shares a pass."""

    tokens: int  # of all prompts and answers
    longest: int  # of a prompt and its answer
    answers: float
    taps: float
    evaluation: float  # before and after

    def line(self, run: TrainingRun) -> str:
        """For people."""
        training = f"{run.minutes:g} min, which --minutes bounds" if run.minutes else f"{run.steps} steps"
        return (
            f"at most {clock(self.answers + self.taps + 60 * run.minutes + self.evaluation)} in all"
            f"{'' if run.minutes else ' besides the steps'}: answers {clock(self.answers)}, taps {clock(self.taps)}, "
            f"training {training}, evaluation {clock(self.evaluation)}; {FEWER}"
        )


def outlook(run: TrainingRun, planner: Planner, data: Sequence[TrainingData], evaluated: int) -> Outlook | None:
    """The outlook of a run whose pair is loaded; None where a few tokens cannot be timed."""
    tokenizer, usable = open_tokenizer(planner), planner.shape.usable_context
    read = [(task, len(prompt_ids(tokenizer, task))) for each in data for task in spread(each.tasks, _READ)]
    fitting = [(task, length) for task, length in read if length + PROBE_TOKENS < usable]
    if not fitting:
        return None
    try:
        pace = pace_of(planner, fitting[0][0])
    except EdgeDflashError:  # what is wrong with the task is said where it is answered
        return None
    prompt = sum(length for _, length in fitting) / len(fitting)
    tasks = [task for each in data for task in each.tasks]
    asked = sum(1 if task.heldout else 1 + run.sampled for task in tasks if task.heldout or task.answer is None)
    given = sum(task.answer is not None and not task.heldout for task in tasks)
    one, plain = (pace.seconds(prompt, run.new_tokens, plain=plain) for plain in (False, True))
    tokens = round((asked + given) * min(prompt + run.new_tokens, usable))
    return Outlook(
        tokens=tokens,
        longest=min(max(length for _, length in fitting) + run.new_tokens, usable),
        answers=asked * one,
        taps=tokens / pace.prompt,
        evaluation=2 * len(ways(tasks)) * (evaluated * one + min(run.plain, evaluated) * plain),
    )


def clock(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
