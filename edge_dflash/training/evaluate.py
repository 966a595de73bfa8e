"""How well a bundle's drafter does on tasks, by its planner: accept lengths, acceptance by position, speed; its card.

Greedy and drawn, free and, where tasks have one, of their schema (or other form). The card says whether a trained
drafter is better than what the training began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from edge_dflash.backends import load
from edge_dflash.builder.card import CARD, CardLengths, CardTarget, DrafterCard, check_prompts, headline
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.common.tables import encode
from edge_dflash.decode.options import PlanOptions
from edge_dflash.planner import Planner
from edge_dflash.result import Plan
from edge_dflash.training.answers import TargetAnswer, open_prompter, prompt_ids
from edge_dflash.training.data import TrainingData, TrainingTask
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.workdir import TrainingState
from edge_dflash.version import __version__

STAGE = "evaluation"
LEARNT = 1.2  # accept length below which a drafter hardly drafts
FELL = 0.9  # of the accept length before, of one way of asking
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

    @property
    def numbers(self) -> dict[str, float]:
        """For a card, which has the acceptance apart."""
        return {name: float(value) for name, value in encode(self).items() if isinstance(value, int | float)}


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
    planner: Planner, tasks: Sequence[TrainingTask], *, new_tokens: int, plain: int = 0, progress: Progress = unheard
) -> dict[str, Measure]:
    """Answer the tasks in each of the :func:`ways`; the first ``plain`` also without the drafter, and compare.

    Answers end where the context does; tasks that leave no room are left out. Raises what :meth:`Planner.plan` raises,
    and RequestError for a planner without a tokenizer.
    """
    prompter, usable = open_prompter(planner), planner.shape.usable_context
    rooms = [(task, min(new_tokens, usable - len(prompt_ids(prompter, task)))) for task in tasks]
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
    plans, plains = list[Plan](), list[Plan]()
    for index, (task, room) in enumerate(tasks):
        options = _options(task, room, TEMPERATURES[way], index, with_schema=bool(form))
        plans.append(planner.plan(task.asked, **options))
        step()
        if index < plain:
            alone: PlanOptions = {**options, "speculative": False}
            plains.append(planner.plan(task.asked, **alone))
            step()
    figures = accepted(plan.accept_lengths for plan in plans)
    return Measure(
        accept_length=round(figures.mean, 4),
        acceptance=tuple(round(share, 4) for share in figures.by_position),
        tokens=sum(len(plan.tokens) for plan in plans),
        tokens_per_second=_rate(plans),
        plain_tokens_per_second=_rate(plains) if plain else None,
        compared=len(plains),
        equal=sum(one.tokens == other.tokens for one, other in zip(plans, plains, strict=False)),
    )


def _rate(plans: Sequence[Plan]) -> float:
    """Tokens a second of decoding, behind the first of each, which the prompt's pass gives."""
    seconds = sum(plan.timings.decode_seconds for plan in plans)
    return round(sum(max(0, len(plan.tokens) - 1) for plan in plans) / seconds, 2) if seconds else 0.0


def _options(task: TrainingTask, new_tokens: int, temperature: float, seed: int, *, with_schema: bool) -> PlanOptions:
    shaping: Mapping[str, object] = {
        name: value for name, value in task.options.items() if with_schema or name not in FORMS
    }
    made = {**shaping, "raw": task.raw, "max_new_tokens": new_tokens, "temperature": temperature, "seed": seed}
    return made  # type: ignore[return-value]


def card_of(
    run: TrainingRun,
    trained: Path,
    bundle: Bundle,
    data: Sequence[TrainingData],
    answers: Sequence[Sequence[TargetAnswer]],
    state: TrainingState,
    measures: Mapping[str, Measure],
) -> DrafterCard:
    """What is written beside the drafter, of bundles with it as it began (``bundle``) and ``trained``."""
    target, begins = bundle.pair.target, run.begins
    old, new = (measures[f"{name}, {headline(measures)}"].accept_length for name in ("before", "after"))
    prompts = sorted((one.prompt for file in answers for one in file if one.heldout), key=len)
    with closing(load(Bundle.open(trained, check_hashes=False))) as backend:
        checks = check_prompts(backend, prompts, target.eos_token_ids)
    return DrafterCard(
        data_sha256=" ".join(each.sha256 for each in data),
        prompts=sum(len(each.training) for each in data),
        heldout=sum(len(each.heldout) for each in data),
        steps=state.step,
        best_step=state.best_step,
        seconds=round(state.seconds, 1),
        accept_length=CardLengths(round(old, 4) if begins else None, round(new, 4)),
        target=CardTarget(run.target.resolve().name, target.architecture, fingerprint(bundle.manifest)),
        kind=bundle.pair.drafter.kind if bundle.pair.drafter else "",
        created_by=f"edge-dflash {__version__}",
        better=new >= old or not begins,
        measures={name: one.numbers for name, one in measures.items()},
        acceptance={name: tuple(one.acceptance) for name, one in measures.items()},
        checks=checks,
    )


def warnings(card: DrafterCard, folder: Path) -> Iterator[str]:
    """What to tell of a drafter that lies in ``folder``."""
    if not card.better:
        yield f"warning: the trained drafter is worse than its start on the held-out prompts; it is kept in {folder}"
    elif card.best_step == 0:
        yield (
            "warning: no step was better than the start on held-out answers, so the drafter is as it began; give more "
            "prompts, or another --rate"
        )
    elif card.accept_length.after < LEARNT:
        yield f"warning: accept length {card.accept_length.after:.2f}: the drafter has learnt little; train it longer"
    for name, one in card.measures.items():
        when, _, way = name.partition(", ")
        old, new = card.measures.get(f"before, {way}", one)["accept_length"], one["accept_length"]
        if when == "after" and card.better and card.accept_length.before is not None and new < FELL * old:
            yield f"warning: {way}: accept length fell from {old:.2f} to {new:.2f}; give prompts as they will be asked"
    if not card.lossless:
        yield "warning: answers with and without the drafter differ, which is a defect: report it, with this card"
    if card.checked_length < LEARNT:
        yield (
            f"note: {CARD} has {len(card.checks)} free answers, of accept length {card.checked_length:.2f}: too little "
            "for a build to see a fault by; `edge-dflash verify` measures on your own prompts"
        )
