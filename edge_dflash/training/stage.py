"""What every stage of a training needs, and what is told before one begins: prompts left out, memory, disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

from edge_dflash.board.linux import read_memory
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.model.specs import PairSpec
from edge_dflash.training.data import TrainingData, read_mixture
from edge_dflash.training.evaluate import shaped
from edge_dflash.training.forecast import gigabytes, memory_warning, shard_bytes, training_bytes, training_files
from edge_dflash.training.shards import Sample
from edge_dflash.training.workdir import TrainingDir, TrainingRun

Say = Callable[[str], None]
FEW = 20  # held-out prompts
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


def check_memory(stage: TrainingStage, pair: PairSpec, tokens: int, bound: str = "about") -> None:
    """Tell what a step needs with prompts and answers of so many tokens; warn where the device has less."""
    needed = training_bytes(pair, replace(stage.run.batch, tokens=tokens), mixed=stage.device != "cpu")
    has = device_bytes(stage.device)
    stage.say(memory_warning(needed, has) or f"a step needs {bound} {gigabytes(needed.total)} of memory")


def lanes(stage: TrainingStage) -> int:
    """Answers that are made at once."""
    return 1 if stage.device == "cpu" else 8


def read_prompts(stage: TrainingStage) -> tuple[TrainingData, ...]:
    """The tasks of all files; says how many there are, what is left out, and what may be too few."""
    run, say = stage.run, stage.say
    data = read_mixture(run.data, heldout=run.heldout, most=run.prompts)
    for each in data:
        say(f"{each.path}: {len(each.training):,} prompts to train on, {len(each.heldout):,} held out")
        if each.skipped:
            say(f"{each.path}: left out with images, or torn at the end: {each.skipped:,}")
        if each.unread:
            say(f"warning: {each.path} has keys that mean nothing here: {', '.join(each.unread)}")
        if any(map(shaped, each.training)) and not any(map(shaped, each.heldout)):
            say(f"warning: no held-out prompt of {each.path} has a form, and others do; give more --heldout")
    if (heldout := sum(len(each.heldout) for each in data)) < FEW:
        say(f"warning: {heldout} held-out prompts choose the weights and say little; give more prompts or --heldout")
    return data


def left_out(data: TrainingData, count: int, room: int) -> str:
    """What to tell of prompts that do not fit."""
    return f"{data.path}: {count:,} prompts leave no room for an answer in {room:,} tokens: left out"


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
        raise RequestError(f"taps take {gigabytes(size)}, --disk is {stage.run.disk:g} GB; {disk_remedy(size)}")
    held = sum(file.stat().st_size for folder in (work.taps, work.training, work.after) for file in folder.rglob("*.*"))
    if size + files - held > (free := max(0, shutil.disk_usage(work.root).free - _FREE)):
        raise RequestError(
            f"taps, checkpoints and bundles take {gigabytes(size + files)}, {gigabytes(held)} of it are there, and the "
            f"disk has {gigabytes(free)} free; make room"
        )


def disk_remedy(taps: int) -> str:
    """What to give where taps may not take so many bytes."""
    return f"give --disk {ceil(110 * taps / 1e9) / 100:g}, or fewer --prompts or --sampled"


@contextmanager
def weights_fit() -> Iterator[None]:
    """Raise BackendError where the device has no room for what is loaded inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise BackendError(
            "the GPU has no room for the drafter and the target's embedding and head; free it, or take a larger one"
        ) from None
