"""What every stage of a training needs, and what is told before one begins: prompts left out, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from edge_dflash.board.linux import read_memory
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress
from edge_dflash.errors import RequestError
from edge_dflash.model.specs import PairSpec
from edge_dflash.training.data import TrainingData, read_mixture
from edge_dflash.training.forecast import gigabytes, memory_warning, shard_bytes, training_bytes, training_files
from edge_dflash.training.shards import Sample
from edge_dflash.training.workdir import TrainingDir, TrainingRun

Say = Callable[[str], None]
_FREE = 1 << 30  # bytes of the disk that stay free


@dataclass(frozen=True)
class TrainingStage:
    """What every stage needs."""

    run: TrainingRun
    work: TrainingDir
    progress: Progress
    say: Say
    device: str


def device() -> str:
    """What trains: "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_bytes(where: str) -> int | None:
    """Memory of what trains; None: not known."""
    if where == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    state = read_memory(Path("/"))
    return None if state is None else state.total


def check_memory(stage: TrainingStage, pair: PairSpec, tokens: int, *, least: bool = False) -> None:
    """Warn where the device has less than a step needs, with prompts and answers of so many tokens; else tell it.

    ``least``: they may be longer; nothing is told where that much is there.
    """
    needed = training_bytes(pair, replace(stage.run.batch, tokens=tokens), mixed=stage.device != "cpu")
    has = device_bytes(stage.device)
    if (warning := memory_warning(needed, has)) is not None:
        stage.say(warning)
    elif not least:
        stage.say(f"a step needs about {gigabytes(needed.total)} of memory")


def lanes(stage: TrainingStage) -> int:
    """Answers that are made at once."""
    return 1 if stage.device == "cpu" else 8


def read_prompts(stage: TrainingStage) -> tuple[TrainingData, ...]:
    """The tasks of all files; says which lines are left out."""
    run = stage.run
    data = read_mixture(run.data, heldout=run.heldout, most=run.prompts)
    for each in data:
        if each.skipped:
            stage.say(f"{each.path}: {each.skipped:,} lines with images, or torn at the end, are left out")
    return data


def bundle_bytes(bundle: Bundle) -> int:
    """Bytes of all its files."""
    return sum(file.size for file in bundle.manifest.files.values())


def check_disk(stage: TrainingStage, bundle: Bundle, samples: Sequence[Sample]) -> None:
    """Tell what a training will take. Raises RequestError where that is more than is allowed or free."""
    tokens, work = sum(len(one.ids) for one in samples), stage.work
    size, allowed = shard_bytes(bundle.pair, tokens), stage.run.disk * 1e9
    files = training_files(bundle.pair, bundle_bytes(bundle))
    stage.say(
        f"{len(samples):,} answers, {tokens:,} tokens; their taps take {gigabytes(size)} of the disk, checkpoints and "
        f"bundles {gigabytes(files)}"
    )
    if size > allowed:
        raise RequestError(f"taps take {gigabytes(size)}, --disk allows {gigabytes(int(allowed))}; give more")
    held = sum(file.stat().st_size for folder in (work.taps, work.training, work.after) for file in folder.rglob("*.*"))
    if size + files - held > (free := max(0, shutil.disk_usage(work.root).free - _FREE)):
        raise RequestError(
            f"taps, checkpoints and bundles take {gigabytes(size + files)}, {gigabytes(held)} of it are there, and the "
            f"disk has {gigabytes(free)} free; make room"
        )
