"""How far a training is, and where it keeps what is done: the same command goes on after a kill."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from edge_dflash.builder.card import CARD
from edge_dflash.builder.swap import is_bundle
from edge_dflash.bundle.manifest import MANIFEST
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.files import is_there, write_whole
from edge_dflash.common.nested import refuse_nul
from edge_dflash.errors import RequestError
from edge_dflash.model.registry import read_drafter_spec, read_target_spec
from edge_dflash.model.specs import TargetSpec
from edge_dflash.training.data import read_tasks
from edge_dflash.training.settings import OF_ANSWERS, OF_BUNDLE, OF_STEPS, TrainingRun

RUN, DONE = "run.json", "done.json"
CHECKPOINT = "checkpoint-"  # and the number of the step, of folders in the folder of the training


@dataclass
class TrainingState:
    """How far the steps of a training are."""

    step: int = 0
    seconds: float = 0.0  # of training, checks and checkpoints included
    times: list[float] = field(default_factory=list)  # seconds of each of the first steps
    since_best: int = 0  # checks
    best: float = 0.0  # accept length
    best_step: int = 0
    ended: bool = False
    sums: list[float] = field(default_factory=list)  # losses since the last check
    losses: list[tuple[int, float]] = field(default_factory=list)  # step, mean since the one before
    lengths: list[tuple[int, float]] = field(default_factory=list)  # step, accept length on the held-out split

    @property
    def step_seconds(self) -> float:
        """Mean of a step; of each half of the times, which may differ in the rounding, the later half counts."""
        half = len(self.times) // 2
        kept = [self.times[i] for i in range(2 * half) if i % half >= half // 2] if half else self.times
        return sum(kept) / max(1, len(kept))

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Of a checkpoint."""
        vars(self).update(found)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object that a stage left; empty without one."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def write_object(path: Path, body: Mapping[str, Any]) -> None:
    """Leave a JSON object, whole or not at all."""
    write_whole(path, json.dumps(body, indent=1).encode() + b"\n")


class TrainingDir:
    """The locked folder ``OUTPUT/work``. Use as a context manager.

    Raises RequestError where another process trains there, or what lies there is of another training.
    """

    def __init__(self, run: TrainingRun, *, dry: bool = False) -> None:
        """``dry``: only the first bundle is made here, and a training of other steps or data may follow."""
        refuse_nul(vars(run))
        self.root = run.output / "work"
        self.gone = f"remove {self.root}"  # the remedy that always helps
        self.start, self.before, self.after = (self.root / name for name in ("start", "before", "after"))
        self.taps, self.training, self.trained = (self.root / name for name in ("taps", "training", "trained"))
        self._of_trained = (self.trained, self.after, building_path(self.after))
        self.evaluation = self.root / "evaluation.json"
        _check_output(run)
        if not self.root.exists():
            _check_inputs(run)
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.root / "lock").open("a")
        try:
            self._take(run, dry=dry)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> TrainingDir:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    def answers(self, index: int) -> Path:
        """Answers to the prompts of one file."""
        return self.root / f"answers-{index}.jsonl"

    @property
    def done(self) -> Path | None:
        """Where the drafter of a training lies that has ended."""
        found = read_object(self.root / DONE).get("drafter")
        return None if found is None else self.root.parent / str(found)

    def end(self, drafter: Path) -> None:
        """The training has ended, and left a drafter: remove what only one that goes on needs."""
        write_object(self.root / DONE, {"drafter": str(drafter.relative_to(self.root.parent))})
        self.clear()

    @property
    def has_steps(self) -> bool:
        """Whether a step of the training is kept."""
        return any(self.training.glob(f"{CHECKPOINT}*"))

    def forget_training(self) -> None:
        """Remove what comes of the answers, taps apart, which know what they are of."""
        shutil.rmtree(self.training, ignore_errors=True)
        self.forget_trained()
        self.evaluation.unlink(missing_ok=True)

    def forget_trained(self) -> None:
        """Remove what comes of the trained drafter."""
        for folder in self._of_trained:
            shutil.rmtree(folder, ignore_errors=True)
        if found := read_object(self.evaluation):
            write_object(self.evaluation, {name: one for name, one in found.items() if name != "after"})

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
        body, found = run.to_json(), read_object(self.root / RUN)
        if not (is_there(self.before / MANIFEST) or self.answers(0).exists() or self.done):
            # nothing is made yet that another training could not make
            if any(found.get(name) != body[name] for name in OF_BUNDLE):
                shutil.rmtree(self.start, ignore_errors=True)
            found = {}
        fixed: tuple[str, ...] = OF_BUNDLE
        if not (dry or found.get("dry")):
            fixed += OF_ANSWERS + (OF_STEPS if self.done or self.has_steps else ())
        if other := [name for name in fixed if found and found.get(name) != body[name]]:
            gone, name = self.gone, other[0]
            if name in OF_STEPS:
                gone = f"remove {self.root / DONE if self.done else self.training} to train again with its answers"
            raise RequestError(
                f"{self.root} is of a training with --{name.replace('_', '-')} {_said(found.get(name))}, now it is "
                f"{_said(body[name])}; give the same, another --output, or {gone}"
            )
        if not (found and dry):
            write_object(self.root / RUN, {**body, "dry": dry})


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


def _check_inputs(run: TrainingRun) -> None:
    """Raise what the stages would of models and files that are not there, before a new training leaves a trace."""
    target = target_spec(run)
    if run.drafter is not None:
        read_drafter_spec(run.drafter, target.num_layers)
    for path in run.data:
        read_tasks(path, most=0)


def target_spec(run: TrainingRun) -> TargetSpec:
    """The target's sizes, of a bundle or a checkpoint. Raises BundleError, CheckpointError."""
    if is_bundle(run.target):
        return Bundle.open(run.target, check_hashes=False).pair.target
    return read_target_spec(run.target)


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
