"""Train the demo target further on tasks of another kind, as an owner fine-tunes a target; its drafter then fits less.

``python -m calib.harbour TASKS --answers`` makes the tasks; ``python -m calib.finetune_target TASKS/train.jsonl OUT
--minutes 5`` writes OUT: checkpoint, tokenizer, training.json. Weights in NVFP4 and keys and values in FP8 are emulated
from the half on, so that the checkpoint is good as a bundle runs it; not with ``--wide``, as most checkpoints are made.
Lines without an ``answer`` are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from calib.demo.data import LONGEST, Dataset, batches, pack
from calib.demo.fakequant import WeightQuantizer
from calib.demo.model import Target
from calib.demo.storage import load_target, save_model
from calib.demo.tokenizer import END_OF_TURN, Sample, render
from calib.demo.train_target import language_loss
from calib.demo.training import autocast, device_name, on_device, optimizer, update, write_record
from edge_dflash.demo.tasks import MODELS
from edge_dflash.text.files import TOKENIZER_FILES
from edge_dflash.training.data import read_tasks
from edge_dflash.training.trainer import learning_rate


@dataclass(frozen=True)
class TuningRun:
    """Everything that decides a fine-tuning."""

    start: str = str(MODELS / "target")  # checkpoint directory
    minutes: float = 5.0
    steps: int = 0  # 0: as many as the minutes give
    batch: int = 16  # samples a step
    peak_rate: float = 5e-4
    weight_decay: float = 0.1
    prompt_weight: float = 0.05  # of a prompt token in the loss; an answer token has 1
    seed: int = 0
    device: str = "cpu"
    wide: bool = False  # never emulate what a bundle rounds


def read_samples(file: Path, tokenizer: Tokenizer, most: int = 1 << 20) -> Dataset:
    """Prompts and answers of a file as ids. Raises ValueError when none has an answer that fits."""
    found = []
    for task in read_tasks(file, most=most).tasks:
        if task.answer is not None and not isinstance(task.asked, str):
            prompt = tokenizer.encode(render(task.asked), add_special_tokens=False).ids
            answer = tokenizer.encode(task.answer + END_OF_TURN, add_special_tokens=False).ids
            if len(prompt) + len(answer) <= LONGEST:
                found.append(Sample(tuple(prompt), tuple(answer)))
    if not found:
        raise ValueError(f"{file} has no task with an answer of at most {LONGEST} ids; give calib.harbour --answers")
    return pack(found)


def finetune(run: TuningRun, file: Path, output: Path, log: Callable[[str], None] = print) -> dict[str, Any]:
    """Train, write OUT and OUT/training.json, return the record."""
    start = Path(run.start)
    tokenizer = Tokenizer.from_file(str(start / "tokenizer.json"))
    dataset = read_samples(file, tokenizer)
    torch.manual_seed(run.seed)
    model = load_target(start, run.device)
    began = time.perf_counter()
    losses = _steps(run, model, dataset, log)
    output.mkdir(parents=True, exist_ok=True)
    save_model(model, output)
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        if (start / name).exists():
            shutil.copyfile(start / name, output / name)
    record = {
        "what": "target, trained further",
        "device": device_name(run.device),
        "run": {**asdict(run), "start": start.name},
        "samples": len(dataset),
        "steps": len(losses),
        "seconds": round(time.perf_counter() - began),
        "loss": {"first": round(losses[0], 4), "last": round(sum(losses[-8:]) / len(losses[-8:]), 4)},
    }
    write_record(output / "training.json", record)
    return record


def _steps(run: TuningRun, model: Target, dataset: Dataset, log: Callable[[str], None]) -> list[float]:
    """Train until the steps or the minutes are over; the loss of each step."""
    optim, quantizer, losses = optimizer(model, run.device, run.weight_decay), WeightQuantizer(model), list[float]()
    until, told, began = 60 * run.minutes, 0.0, time.perf_counter()
    for step, indices in enumerate(batches(dataset, run.batch, run.steps or 1 << 30, run.seed)):
        share = step / run.steps if run.steps else (time.perf_counter() - began) / until
        if share >= 1:
            break
        if share >= 0.5 and not run.wide:
            model.set_fp8(True)
            quantizer.apply()
        ids, lengths, prompts = on_device(dataset, indices, run.device)
        with autocast(run.device):
            loss = language_loss(model, ids, lengths, prompts, run.prompt_weight)
        update(model, optim, loss, learning_rate(share, run.peak_rate))
        losses.append(float(loss.detach()))
        if share >= told:
            told += 0.1
            log(f"{100 * share:.0f} % step {step + 1} loss {losses[-1]:.4f}")
    model.set_fp8(False)
    quantizer.clear()
    return losses


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", type=Path, help="JSONL file of messages and answers")
    parser.add_argument("output", type=Path)
    parser.add_argument("--start", default=TuningRun().start, help="checkpoint directory to go on from")
    for name in ("steps", "batch", "seed"):
        parser.add_argument("--" + name, type=int, default=getattr(TuningRun(), name))
    for name in ("minutes", "peak_rate", "weight_decay", "prompt_weight"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(TuningRun(), name))
    parser.add_argument("--device", default="cpu", choices=("cuda", "cpu"))
    parser.add_argument("--wide", action="store_true", help="never emulate what a bundle rounds")
    given = vars(parser.parse_args())
    file, output = given.pop("tasks"), given.pop("output")
    print(json.dumps(finetune(TuningRun(**given), file, output)))


if __name__ == "__main__":
    main()
