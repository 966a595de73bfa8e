"""``edge-dflash train-drafter``: a drafter for one's own prompts."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from edge_dflash.cli.build import find_recipe, given_drafter
from edge_dflash.cli.output import Columns, Json, emit_json, say, show, stages, tabled
from edge_dflash.cli.usage import MissingOptionError, opt, switch, take_flags
from edge_dflash.common.tables import encode
from edge_dflash.errors import RequestError
from edge_dflash.training.settings import TrainingRun

if TYPE_CHECKING:
    from edge_dflash.training.run import TrainingResult


def train_drafter(
    target: Annotated[Path | None, opt("DIR", "The target: a Hugging Face checkpoint, or a bundle.")] = None,
    data: Annotated[list[Path] | None, opt("FILE", "Prompts, one JSON object a line; again for a mixture.")] = None,
    output: Annotated[Path | None, opt("DIR", "Directory of the trained drafter.")] = None,
    *,
    dry_run: Annotated[
        bool, switch("--dry-run", "Print the memory, disk and hours that it takes at most, and end.")
    ] = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Train a drafter on your own prompts: the target answers them itself, and the drafter learns to foresee it.

    Stages: answers of the quantized target, greedy and drawn; its taps over them; training; evaluation on prompts held
    out. --minutes bounds the training stage alone; what all stages take at most is said before the first answer, and by
    --dry-run with the memory and the disk. A command that was stopped resumes when it is given again; what it keeps
    lies in OUTPUT/work. OUTPUT is then a drafter for `edge-dflash build --drafter`, with a card.json: what it was
    trained on, accept lengths before and after. One that is worse than what it began with is kept in OUTPUT/worse and
    said so (exit code 9; so are answers that differ with and without the drafter).

    Lines of FILE have messages or a prompt, perhaps a schema, regex, grammar or tools, perhaps an answer; a planner or
    service writes them with its option `record`. Needs the extra train; runs on the GPU that torch finds, else a CPU.

    JSON keys: drafter (path), better, accept_length (before, after), measures (of each way: accept_length,
    tokens_per_second, plain_tokens_per_second, compared and equal answers), acceptance (by position), steps,
    best_step (whose weights it has; 0: as it began), heldout (prompts), seconds.
    With --dry-run: parameters, memory (bytes by purpose), device (its bytes), disk, files, answers_hours, taps_hours,
    training_hours, evaluation_hours, hours.
    """
    given = {"target": target, "data": tuple(data or ()), "output": output, **flags}
    _check(given)
    given["drafter"] = given_drafter(given["drafter"])
    given["recipe"] = find_recipe(given["recipe"]) if given["recipe"] is not None else None
    try:
        _train(given, dry=dry_run, json=json)
    except KeyboardInterrupt:
        if not (work := Path(given["output"]) / "work").is_dir():
            raise
        raise RequestError(f"interrupted; what is finished is kept in {work}, resume with the same command") from None


_fields = get_type_hints(TrainingRun, include_extras=True).items()
_flags = [
    (name, kind.__origin__, getattr(TrainingRun, name), opt(**kind.__metadata__[0]))
    for name, kind in _fields
    if get_origin(kind) is Annotated
]
take_flags(train_drafter, 3, _flags)


def _check(given: dict[str, Any]) -> None:
    steps, minutes, rate = given["steps"], given["minutes"], given["rate"]
    if missing := [name for name in ("target", "data", "output") if not given[name]]:
        raise MissingOptionError(missing[0])
    if not isfinite(minutes):
        raise RequestError(f"--minutes is {minutes:g}; give a number of minutes")
    if (steps > 0) == (minutes > 0):
        raise RequestError(f"{steps} steps and {minutes:g} minutes; give one of --steps and --minutes")
    if rate is not None and rate <= 0:
        raise RequestError(f"--rate is {rate:g}; give a rate above 0, or none for 3e-4 (from scratch 1e-3)")


def _train(given: dict[str, Any], *, dry: bool, json: bool) -> None:
    """Train, or tell what it will take, and print what came of it."""
    with stages():  # torch takes seconds to import
        from edge_dflash.training import run
    with stages() as report:
        if dry:
            told = run.dry_run(TrainingRun(**given), report, say)
        else:
            result = run.train_drafter(TrainingRun(**given), report, say)
    if dry:
        emit_json(told.to_json()) if json else print("\n".join(told.lines))
        return
    _report(result, json)
    if not (result.card.better and result.card.lossless):
        raise typer.Exit(9)


def _report(result: TrainingResult, json: bool) -> None:
    """Print what was trained."""
    card = result.card
    if json:
        told = ("better", "accept_length", "measures", "acceptance", "steps", "best_step", "heldout")
        found = encode({name: getattr(card, name) for name in told})
        emit_json({"drafter": str(result.drafter), **found, "seconds": round(result.seconds, 1)})
        return
    columns: Columns = {
        "way": ("0", ""),
        "accept length": (lambda way: way[1]["accept_length"], ".2f"),
        "tokens/s": (lambda way: way[1]["tokens_per_second"], ",.1f"),
        "plain tokens/s": (lambda way: way[1].get("plain_tokens_per_second"), ",.1f"),
        "equal to plain": (lambda way: f"{way[1]['equal']:.0f} of {way[1]['compared']:.0f}", ""),
    }
    show(tabled("Held-out prompts", card.measures.items(), columns))
    begun = "" if card.accept_length.before is None else f" (before: {card.accept_length.before:.2f})"
    print(f"{result.drafter}: accept length {card.accept_length.after:.2f}{begun}, {card.way}; {card.steps} steps")
