"""Train the demo target: a small Qwen3.5 hybrid on robot tasks, its last part with NVFP4 weights and FP8 KV emulated.

``python -m calib.demo.train_target OUT`` writes OUT/target: checkpoint, tokenizer, training.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from calib.demo.corpus import HELDOUT_TASKS, tasks
from calib.demo.data import LONGEST, Dataset, batches, training_set
from calib.demo.fakequant import WeightQuantizer
from calib.demo.generate import greedy
from calib.demo.model import Target, TargetConfig
from calib.demo.storage import load_target, save_model
from calib.demo.tokenizer import render, save_tokenizer, train_tokenizer
from calib.demo.training import Progress, autocast, device_name, on_device, optimizer, update, write_record
from edge_dflash.demo.tasks import check_plan, check_success
from edge_dflash.training.trainer import learning_rate

Log = Callable[[str], None]


@dataclass(frozen=True)
class TargetRun:
    """Everything that decides a training of the target."""

    seed: int = 0
    start: str = ""  # checkpoint directory to go on from; "": random weights
    first_task: int = 0
    tasks: int = 400_000
    steps: int = 6000
    batch: int = 96  # samples a step
    peak_rate: float = 2.5e-3
    weight_decay: float = 0.1
    prompt_weight: float = 0.05  # of a prompt token in the loss; an answer token has 1
    quantized_part: float = 0.35  # of the steps, at the end
    workers: int = 16
    device: str = "cuda"
    check_tasks: int = 512  # held-out tasks answered at the end
    tokenizer_tasks: int = 4000
    longest_answer: int = LONGEST  # ids of an answer to a held-out task
    log_every: int = 250
    save_every: int = 1000
    config: TargetConfig = field(default_factory=TargetConfig)


def train_target(run: TargetRun, output: Path, *, commit: str = "", log: Log = print) -> dict[str, Any]:
    """Train, write OUT/target and OUT/target/training.json, return the record."""
    began = time.perf_counter()
    directory = output / "target"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(run.tokenizer_tasks)
    save_tokenizer(tokenizer, directory, run.config.max_position_embeddings)
    dataset = training_set(tokenizer, run.tasks, start=run.first_task, workers=run.workers)
    log(f"{len(dataset)} samples, {len(dataset.ids)} ids, {time.perf_counter() - began:.0f} s")
    torch.manual_seed(run.seed)
    config = replace(run.config, vocab_size=tokenizer.get_vocab_size())
    model = load_target(Path(run.start), run.device) if run.start else Target(config).to(run.device)
    progress = Progress("target", run.steps, log, run.log_every)
    _steps(run, model, dataset, progress, directory)
    save_model(model, directory)
    trained = time.perf_counter() - began
    log(f"trained in {trained:.0f} s")
    quality = {
        name: check_target(directory, tokenizer, run, quantized=quantized)
        for name, quantized in (("bf16", False), ("nvfp4_fp8kv", True))
    }
    log(f"held-out {quality}")
    record = {
        "what": "target",
        "device": device_name(run.device),
        "commit": commit,
        "run": asdict(run),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_ids": len(dataset.ids),
        "seconds": {"trained": round(trained), "all": round(time.perf_counter() - began)},
        "loss": progress.curve,
        "heldout": quality,
    }
    write_record(output / "target" / "training.json", record)
    return record


def _steps(run: TargetRun, model: Target, dataset: Dataset, progress: Progress, directory: Path) -> None:
    optim = optimizer(model, run.device, run.weight_decay)
    quantizer = WeightQuantizer(model)
    for step, indices in enumerate(batches(dataset, run.batch, run.steps, run.seed)):
        ids, lengths, prompts = on_device(dataset, indices, run.device)
        if step >= run.steps * (1 - run.quantized_part):
            model.set_fp8(True)
            quantizer.apply()
        with autocast(run.device):
            loss = language_loss(model, ids, lengths, prompts, run.prompt_weight)
        update(model, optim, loss, learning_rate((step + 1) / run.steps, run.peak_rate))
        progress.add(step, loss, ids.numel())
        if (step + 1) % run.save_every == 0:
            save_model(model, directory)
    model.set_fp8(False)
    quantizer.clear()


def language_loss(
    model: Target, ids: torch.Tensor, lengths: torch.Tensor, prompts: torch.Tensor, prompt_weight: float
) -> torch.Tensor:
    """Cross-entropy of the next token, mean over tokens by weight: 1 in the answer, prompt_weight before, 0 after."""
    logits = model(ids)
    place = torch.arange(1, ids.shape[1], device=ids.device)[None, :]
    weight = torch.where(place < prompts[:, None], prompt_weight, 1.0) * (place < lengths[:, None])
    each = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def check_target(directory: Path, tokenizer: Tokenizer, run: TargetRun, *, quantized: bool) -> dict[str, float]:
    """Answers of the saved checkpoint to held-out tasks: fractions valid, doing the task, equal to the corpus."""
    target = load_target(directory, run.device)
    if quantized:
        with torch.no_grad():
            WeightQuantizer(target).apply()
        target.set_fp8(True)
    asked = list(tasks("heldout", 0, min(run.check_tasks, HELDOUT_TASKS)))
    prompts = [tuple(e.ids) for e in tokenizer.encode_batch([render(t.messages) for t in asked])]
    with autocast(run.device):
        answers = greedy(target, prompts, run.longest_answer)
    texts = [tokenizer.decode(list(answer)) for answer in answers]
    valid = [not check_plan(task, text) for task, text in zip(asked, texts, strict=True)]
    done = [ok and not check_success(task, text) for ok, task, text in zip(valid, asked, texts, strict=True)]
    same = [task.answer == text for task, text in zip(asked, texts, strict=True)]
    return {name: round(sum(x) / len(asked), 4) for name, x in (("valid", valid), ("success", done), ("equal", same))}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--start", default="", help="checkpoint directory to go on from")
    parser.add_argument("--commit", default="", help="revision of the sources, for the record")
    for name in ("seed", "first_task", "tasks", "steps", "batch", "workers", "check_tasks", "log_every", "save_every"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(TargetRun(), name))
    for name in ("peak_rate", "weight_decay", "prompt_weight", "quantized_part"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(TargetRun(), name))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = vars(parser.parse_args())
    output, commit = given.pop("output"), given.pop("commit")
    train_target(TargetRun(**given), output, commit=commit, log=partial(print, flush=True))


if __name__ == "__main__":
    main()
