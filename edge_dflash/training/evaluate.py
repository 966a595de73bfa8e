"""How well a bundle's drafter does on tasks, by its planner: accept lengths, acceptance by position, speed.

Greedy and drawn, free and, where tasks have one, of their schema (or other form).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.common.progress import Progress, unheard
from edge_dflash.decode.options import PlanOptions
from edge_dflash.planner import Planner
from edge_dflash.training.answers import open_tokenizer, prompt_ids
from edge_dflash.training.data import TrainingTask

STAGE = "evaluation"
FORMS = ("schema", "regex", "grammar")
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


@dataclass(frozen=True)
class Measure:
    """One way to answer the tasks."""

    accept_length: float  # tokens of a verify, bonus included, mean over all
    acceptance: tuple[float, ...]  # share of drafts accepted, by position
    tokens: int
    tokens_per_second: float  # of decoding
    plain_tokens_per_second: float | None  # None: nothing was decoded plainly
    compared: int  # answers that were decoded plainly too
    equal: int  # of them, those with the same tokens


@dataclass(frozen=True)
class AcceptedDrafts:
    """What speculative decoding of some answers committed."""

    tokens: int  # after the first of each answer, which the prompt's pass gives
    cycles: int
    by_position: tuple[float, ...]  # of the cycles that could accept draft j and one token more, the share that did

    @property
    def mean(self) -> float:
        """Tokens for each verify, bonus token included."""
        return self.tokens / max(self.cycles, 1)


def accepted(answers: Iterable[Sequence[int]]) -> AcceptedDrafts:
    """The figures of answers, each given as the tokens committed by each verify, bonus token included."""
    made = [(length, sum(answer[i:])) for answer in answers for i, length in enumerate(answer)]  # and tokens left
    longest = max((length for length, _ in made), default=0)
    could = [[length for length, left in made if left > j + 1] for j in range(longest - 1)]
    shares = tuple(sum(length > j + 1 for length in lengths) / len(lengths) for j, lengths in enumerate(could))
    return AcceptedDrafts(sum(length for length, _ in made), len(made), shares)


def shaped(task: TrainingTask) -> bool:
    """Whether the answer has a form."""
    return any(form in task.options for form in FORMS)


def ways(tasks: Sequence[TrainingTask]) -> tuple[str, ...]:
    """Names of the ways in which these tasks are answered."""
    return (*TEMPERATURES, *(f"{way}, schema" for way in TEMPERATURES if any(map(shaped, tasks))))


def evaluate(
    bundle: Path, tasks: Sequence[TrainingTask], *, new_tokens: int, plain: int = 0, progress: Progress = unheard
) -> dict[str, Measure]:
    """Answer the tasks in each of the :func:`ways`; the first ``plain`` also without the drafter, and compare.

    Answers end where the context does; tasks that leave no room are left out. Raises what :meth:`Planner.open` and
    :meth:`Planner.plan` raise.
    """
    with Planner.open(bundle, fallback=False, self_test="off") as planner:  # all drafts of each cycle are verified
        return evaluate_planner(planner, tasks, new_tokens=new_tokens, plain=plain, progress=progress)


def evaluate_planner(
    planner: Planner, tasks: Sequence[TrainingTask], *, new_tokens: int, plain: int = 0, progress: Progress = unheard
) -> dict[str, Measure]:
    """:func:`evaluate` of a planner that is open. Raises RequestError for one without a tokenizer."""
    tokenizer, usable = open_tokenizer(planner), planner.shape.usable_context
    rooms = [(task, min(new_tokens, usable - len(prompt_ids(tokenizer, task)))) for task in tasks]
    asked = [(task, room) for task, room in rooms if room > 0]
    names, done = ways(tasks), 0
    total = len(names) * (len(asked) + min(plain, len(asked)))

    def step() -> None:
        nonlocal done
        done += 1
        progress(STAGE, done, total)

    return {name: _measure(planner, asked, name, plain, step) for name in names}


def _measure(
    planner: Planner, tasks: Sequence[tuple[TrainingTask, int]], name: str, plain: int, step: Callable[[], None]
) -> Measure:
    """One way of tasks, each with the new tokens that it may have. ``step`` is called after each answer."""
    way, _, form = name.partition(", ")
    lengths, spent, speeds = list[tuple[int, ...]](), {True: 0.0, False: 0.0}, {True: 0, False: 0}
    equal = tokens = 0
    for index, (task, room) in enumerate(tasks):
        options = _options(task, room, TEMPERATURES[way], index, with_schema=bool(form))
        plan = planner.plan(task.asked, **options)
        lengths.append(plan.accept_lengths)
        tokens += len(plan.tokens)
        spent[True] += plan.timings.decode_seconds
        speeds[True] += max(0, len(plan.tokens) - 1)
        step()
        if index < plain:
            alone: PlanOptions = {**options, "speculative": False}
            other = planner.plan(task.asked, **alone)
            equal += other.tokens == plan.tokens
            spent[False] += other.timings.decode_seconds
            speeds[False] += max(0, len(other.tokens) - 1)
            step()
    figures = accepted(lengths)
    rates = {kind: round(speeds[kind] / seconds, 2) if seconds else 0.0 for kind, seconds in spent.items()}
    return Measure(
        accept_length=round(figures.mean, 4),
        acceptance=tuple(round(share, 4) for share in figures.by_position),
        tokens=tokens,
        tokens_per_second=rates[True],
        plain_tokens_per_second=rates[False] if plain else None,
        compared=min(plain, len(tasks)),
        equal=equal,
    )


def _options(task: TrainingTask, new_tokens: int, temperature: float, seed: int, *, with_schema: bool) -> PlanOptions:
    shaping: Mapping[str, object] = {
        name: value for name, value in task.options.items() if with_schema or name not in FORMS
    }
    made = {**shaping, "raw": task.raw, "max_new_tokens": new_tokens, "temperature": temperature, "seed": seed}
    return made  # type: ignore[return-value]
