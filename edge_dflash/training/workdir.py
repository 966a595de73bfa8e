"""Where a training keeps what is done, and what decides it: the same command goes on where a kill stopped it."""

from __future__ import annotations

import fcntl
import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from edge_dflash.builder.card import CARD
from edge_dflash.bundle.manifest import MANIFEST
from edge_dflash.bundle.parts import building_path
from edge_dflash.common.files import is_there
from edge_dflash.common.rules import refuse_nul
from edge_dflash.errors import RequestError
from edge_dflash.training.forecast import BatchSize

RUN, DONE = "run.json", "done.json"
CHECKPOINT = "checkpoint-"  # and the number of the step, of folders in the folder of the training
_OF_BUNDLE = ("target", "drafter", "arch", "recipe", "max_context", "mask_token", "seed")  # what the first bundle is of
_OF_STEPS = ("steps", "minutes", "sequences", "anchors", "accumulate", "rate", "patience")  # what no answer depends on


@dataclass(frozen=True)
class TrainingRun:
    """Everything that decides the training of a drafter; None: what suits the pair or the machine."""

    target: Path  # a checkpoint, or a bundle of it
    data: tuple[Path, ...]  # files of prompts; several: a mixture
    output: Path
    drafter: Path | None = None  # to begin with; a directory with a config.json alone: its sizes
    steps: int = 0
    minutes: float = 0.0  # one of the two; of the training stage
    arch: str | None = None  # of the bundles; None: this machine's GPU, or cpu
    recipe: Path | None = None  # of a checkpoint
    max_context: int | None = None
    mask_token: int | None = None  # of a drafter from scratch
    sampled: int = 1  # answers drawn for each prompt, besides the greedy one
    temperature: float = 0.7
    new_tokens: int = 512  # of an answer
    prompts: int | None = None  # of each file, at most
    heldout: int | None = None  # of each file
    evaluated: int = 32  # held-out tasks that are decoded before and after
    plain: int = 8  # of these, also decoded plainly, and compared
    sequences: int = 8  # of a pass
    anchors: int = 16  # blocks of each
    accumulate: int = 1  # passes of a step
    rate: float | None = None  # peak learning rate; None: 3e-4, from scratch 1e-3
    patience: int = 4
    disk: float = 50.0  # GB of taps, at most
    seed: int = 0

    @property
    def begins(self) -> bool:
        """Whether the training begins with a drafter that somebody trained."""
        return self.drafter is not None and any(self.drafter.glob("*.safetensors"))

    @property
    def batch(self) -> BatchSize:
        """One pass of a step; its tokens are those of the answers."""
        return BatchSize(self.sequences, 1, self.anchors, self.accumulate)

    def to_json(self) -> dict[str, Any]:
        """For run.json: how much disk it may take is no part of what it is."""
        body = {name: _plain(value) for name, value in asdict(self).items()}
        return {name: value for name, value in body.items() if name not in ("output", "disk")}


class TrainingDir:
    """The locked folder ``OUTPUT/work``. Use as a context manager.

    Raises RequestError where another process trains there, or what lies there is of another training.
    """

    def __init__(self, run: TrainingRun, *, dry: bool = False) -> None:
        """``dry``: only the first bundle is made here, and a training of other steps or data may follow."""
        refuse_nul(vars(run))
        self.root = run.output / "work"
        self.start, self.before, self.after = (self.root / name for name in ("start", "before", "after"))
        self.taps, self.training, self.trained = (self.root / name for name in ("taps", "training", "trained"))
        self._of_trained = (self.trained, self.after, building_path(self.after))
        self.evaluation = self.root / "evaluation.json"
        _check_output(run)
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("a")
        try:
            self._take(run, dry=dry)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> TrainingDir:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()

    def answers(self, index: int) -> Path:
        """Answers to the prompts of one file."""
        return self.root / f"answers-{index}.jsonl"

    def read(self, path: Path) -> dict[str, Any]:
        """A JSON object that a stage left; empty without one."""
        with suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    def write(self, path: Path, body: dict[str, Any]) -> None:
        """Leave a JSON object, whole or not at all."""
        half = path.with_suffix(".part")
        half.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        half.replace(path)

    @property
    def done(self) -> Path | None:
        """Where the drafter of a training lies that has ended."""
        found = self.read(self.root / DONE).get("drafter")
        return None if found is None else self.root.parent / str(found)

    def end(self, drafter: Path) -> None:
        """The training has ended, and left a drafter: remove what only one that goes on needs."""
        self.write(self.root / DONE, {"drafter": str(drafter.relative_to(self.root.parent))})
        self.clear()

    @property
    def has_steps(self) -> bool:
        """Whether a step of the training is kept."""
        return any(self.training.glob(f"{CHECKPOINT}*"))

    @property
    def gone(self) -> str:
        """The remedy that always helps."""
        return f"remove {self.root}"

    def forget_training(self) -> None:
        """Remove what comes of the answers, taps apart, which know what they are of."""
        shutil.rmtree(self.training, ignore_errors=True)
        self.forget_trained()
        self.evaluation.unlink(missing_ok=True)

    def forget_trained(self) -> None:
        """Remove what comes of the trained drafter."""
        for folder in self._of_trained:
            shutil.rmtree(folder, ignore_errors=True)
        if found := self.read(self.evaluation):
            self.write(self.evaluation, {name: one for name, one in found.items() if name != "after"})

    def clear(self) -> None:
        """Remove taps, checkpoints, and the last bundle with what it was made of."""
        for folder in (self.taps, self.training, *self._of_trained):
            shutil.rmtree(folder, ignore_errors=True)

    def _take(self, run: TrainingRun, *, dry: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"another process trains in {run.output}; wait for it, or give another --output"
            ) from None
        path, body = self.root / RUN, run.to_json()
        found = self.read(path)
        if not (is_there(self.before / MANIFEST) or self.answers(0).exists() or self.done):
            # nothing is made yet that another training could not make
            if any(found.get(name) != body[name] for name in _OF_BUNDLE):
                shutil.rmtree(self.start, ignore_errors=True)
            found = {}
        names = [name for name in body if name in _OF_BUNDLE or not (dry or found.get("dry"))]
        if self.done is None and not self.has_steps:
            names = [name for name in names if name not in _OF_STEPS]
        if found and (other := [name for name in names if found.get(name) != body[name]]):
            name, gone = next((name for name in other if name not in _OF_STEPS), other[0]), self.gone
            if name in _OF_STEPS:
                gone = (
                    f"remove {self.training if self.done is None else self.root / DONE} to train again with its answers"
                )
            raise RequestError(
                f"{self.root} is of a training with --{name.replace('_', '-')} {_said(found.get(name))}, now it is "
                f"{_said(body[name])}; give the same, another --output, or {gone}"
            )
        if not (found and dry):
            self.write(path, {**body, "dry": dry})


def _check_output(run: TrainingRun) -> None:
    """Raise RequestError where the trained drafter would take the place of another model."""
    output = run.output.resolve()
    if output.exists() and not output.is_dir():
        raise RequestError(f"--output {run.output} is no directory; give a new one")
    if output in [path.resolve() for path in (run.target, run.drafter) if path is not None]:
        raise RequestError(f"--output {run.output} is a model that is read; give another directory")
    ours = is_there(output / CARD) or is_there(output / "work" / RUN)
    if not ours and any(is_there(output / name) for name in ("config.json", MANIFEST)):
        raise RequestError(f"--output {run.output} holds a model that no training made; give another directory")


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value.resolve()) if isinstance(value, Path) else value
