"""What decides the training of a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

MOST_SEED = 2**31 - 1
RATE, SCRATCH_RATE = 3e-4, 1e-3  # peak learning rates
OF_BUNDLE = ("target", "drafter", "arch", "recipe", "max_context", "mask_token", "seed")  # what the first bundle is of
OF_ANSWERS = ("data", "sampled", "temperature", "new_tokens", "prompts", "heldout", "evaluated", "plain")
OF_STEPS = ("steps", "minutes", "sequences", "anchors", "accumulate", "rate", "patience")  # what no answer depends on


def flag(metavar: str, text: str, **more: Any) -> dict[str, Any]:
    """What the help of the command says of a value; ``more``: bounds, and how its default is shown."""
    return {"metavar": metavar, "text": text, **more}


@dataclass(frozen=True)
class TrainingRun:
    """Everything that decides the training of a drafter; None: what suits the pair or the machine."""

    target: Path  # a checkpoint, or a bundle of it
    data: tuple[Path, ...]  # files of prompts; several: a mixture
    output: Path
    drafter: Annotated[
        Path | None,
        flag("DIR", "Drafter to begin with; a directory with a config.json alone: its sizes; none: published sizes."),
    ] = None
    steps: Annotated[int, flag("N", "Steps of the optimizer; give this or --minutes.", min=0, show_default=False)] = 0
    minutes: Annotated[
        float, flag("M", "Minutes of the training stage alone, instead of --steps.", min=0.0, show_default=False)
    ] = 0.0
    recipe: Annotated[Path | None, flag("NAME|FILE", "Recipe of the bundles that are trained with and evaluated.")] = (
        None
    )
    arch: Annotated[
        str | None, flag("NAME", "What they run on, as build --arch; default: this machine's GPU, or cpu.")
    ] = None
    max_context: Annotated[int | None, flag("N", "Most tokens of a prompt and its answer.")] = None
    mask_token: Annotated[int | None, flag("ID", "Id that stands for a draft, of a drafter from scratch.")] = None
    sampled: Annotated[int, flag("N", "Answers drawn for each prompt, besides the greedy one.", min=0)] = 1
    temperature: float = 0.7
    new_tokens: Annotated[int, flag("N", "Most tokens of an answer.", min=1)] = 512
    prompts: Annotated[int | None, flag("N", "Prompts of each file, at most.", min=2)] = None
    heldout: Annotated[
        int | None, flag("N", "Prompts of each file held out; default: a tenth, 200 at most.", min=1)
    ] = None
    evaluated: Annotated[int, flag("N", "Held-out prompts that are decoded before and after.", min=1)] = 32
    plain: int = 8  # of these, also decoded plainly, and compared
    sequences: Annotated[int, flag("N", "Answers of a pass.", min=1)] = 8
    anchors: Annotated[int, flag("N", "Blocks of each answer of a pass.", min=1)] = 16
    accumulate: Annotated[int, flag("N", "Passes of a step.", min=1)] = 1
    rate: Annotated[float | None, flag("X", "Peak learning rate; default: 3e-4, from scratch 1e-3.")] = None
    patience: Annotated[
        int, flag("N", "Checks without a better accept length that end it, from its half on; 0: none do.", min=0)
    ] = 4
    disk: Annotated[float, flag("GB", "Most that the target's taps may take of the disk.", min=0.0)] = 50.0
    seed: Annotated[int, flag("N", "Of the start, the order and the anchors.", min=0, max=MOST_SEED)] = 0
    rounded: float = 0.5  # part of the steps, at the end: with weights and keys rounded as in a bundle
    checks: int = 10  # of the held-out split
    pause: float = 15.0  # seconds between checkpoints, at least

    @property
    def begins(self) -> bool:
        """Whether the training begins with a drafter that somebody trained."""
        return self.drafter is not None and any(self.drafter.glob("*.safetensors"))

    @property
    def peak(self) -> float:
        """Peak learning rate."""
        return self.rate if self.rate is not None else RATE if self.begins else SCRATCH_RATE

    def to_json(self) -> dict[str, Any]:
        """For run.json: what may not change while what came of it is kept."""
        return {name: _plain(getattr(self, name)) for name in (*OF_BUNDLE, *OF_ANSWERS, *OF_STEPS)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value.resolve()) if isinstance(value, Path) else value
