"""Train the demo drafter on answers and taps of the quantized target (DFlash, arXiv 2602.06036, section on training).

Random anchors in the answer, a masked block at each, all blocks of a sequence in one pass, cross-entropy weighted
toward early rows. NVFP4 and FP8 are emulated in the drafter too.
``python -m calib.demo.train_drafter OUT`` reads OUT/target, writes OUT/drafter: checkpoint, training.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from calib.demo.corpus import HELDOUT_TASKS, tasks
from calib.demo.data import LONGEST, Dataset, batches, pack, training_set
from calib.demo.drafter import Drafter, DrafterConfig
from calib.demo.fakequant import WeightQuantizer
from calib.demo.generate import acceptance, greedy
from calib.demo.model import Target
from calib.demo.storage import load_drafter, load_target, save_model
from calib.demo.tokenizer import Sample, render
from calib.demo.train_target import Log
from calib.demo.training import (
    Progress,
    autocast,
    device_name,
    learning_rate,
    on_device,
    optimizer,
    update,
    write_record,
)

DECAY = 7.0  # row r of a block weighs exp(-(r - 1) / DECAY)


@dataclass(frozen=True)
class DrafterRun:
    """Everything that decides a training of the drafter."""

    seed: int = 1
    start: str = ""  # checkpoint directory to go on from; "": random weights
    first_task: int = 0
    tasks: int = 30_000  # training tasks that the target answers
    generate_batch: int = 4096
    steps: int = 2400
    batch: int = 128  # samples a step
    anchors: int = 16  # blocks a sample
    peak_rate: float = 2e-3
    weight_decay: float = 0.05
    quantized_part: float = 0.5  # of the steps, at the end
    workers: int = 16
    device: str = "cuda"
    check_tasks: int = 64
    longest_answer: int = LONGEST  # ids of an answer to a held-out task
    log_every: int = 200
    save_every: int = 400
    config: DrafterConfig = field(default_factory=DrafterConfig)


def train_drafter(run: DrafterRun, output: Path, *, commit: str = "", log: Log = print) -> dict[str, Any]:
    """Train on OUT/target, write OUT/drafter and OUT/drafter/training.json, return the record."""
    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(output / "target" / "tokenizer.json"))
    target = _frozen(output / "target", run.device, quantized=True)
    dataset = own_answers(run, target, tokenizer, log)
    generated = time.perf_counter() - began
    torch.manual_seed(run.seed)
    config = replace(run.config, vocab_size=target.c.vocab_size)
    drafter = load_drafter(Path(run.start), run.device) if run.start else Drafter(config).to(run.device)
    progress = Progress("drafter", run.steps, log, run.log_every)
    _steps(run, target, drafter, dataset, progress, output / "drafter")
    save_model(drafter, output / "drafter")
    trained = time.perf_counter() - began
    log(f"trained in {trained:.0f} s")
    lengths = check_pair(output, tokenizer, run)
    log(f"held-out accept lengths {lengths}")
    record = {
        "what": "drafter",
        "device": device_name(run.device),
        "commit": commit,
        "run": asdict(run),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "training_ids": len(dataset.ids),
        "seconds": {
            "generated": round(generated),
            "trained": round(trained),
            "all": round(time.perf_counter() - began),
        },
        "loss": progress.curve,
        "heldout_accept_length": lengths,
    }
    write_record(output / "drafter" / "training.json", record)
    return record


def _frozen(directory: Path, device: str, *, quantized: bool) -> Target:
    """The target as it will serve."""
    target = load_target(directory, device).requires_grad_(False)
    if quantized:
        WeightQuantizer(target).apply()
        target.set_fp8(True)
    return target


def own_answers(run: DrafterRun, target: Target, tokenizer: Tokenizer, log: Log) -> Dataset:
    """Training prompts with the target's greedy answers; answers that do not end in time are left out."""
    asked = training_set(tokenizer, run.tasks, start=run.first_task, workers=run.workers)
    order = sorted(range(len(asked)), key=lambda i: int(asked.lengths[i]))
    kept: list[Sample] = []
    same = 0
    for start in range(0, len(order), run.generate_batch):
        samples = [asked.sample(i) for i in order[start : start + run.generate_batch]]
        longest = max(len(s.answer) for s in samples) + 16
        with autocast(run.device):
            answers = greedy(target, [s.prompt for s in samples], longest)
        same += sum(s.answer == answer for s, answer in zip(samples, answers, strict=True))
        kept += [
            Sample(s.prompt, answer)
            for s, answer in zip(samples, answers, strict=True)
            if 1 < len(answer) < longest and len(s.prompt) + len(answer) <= LONGEST
        ]
        log(f"answered {start + len(samples)}/{len(order)}, {same} as in the corpus, {len(kept)} kept")
    return pack(kept)


def _steps(
    run: DrafterRun, target: Target, drafter: Drafter, dataset: Dataset, progress: Progress, directory: Path
) -> None:
    optim = optimizer(drafter, run.device, run.weight_decay)
    quantizer = WeightQuantizer(drafter)
    generator = torch.Generator().manual_seed(run.seed)
    for step, indices in enumerate(batches(dataset, run.batch, run.steps, run.seed)):
        ids, lengths, prompts = on_device(dataset, indices, run.device)
        share = torch.rand(len(indices), run.anchors, generator=generator).to(run.device, non_blocking=True)
        anchors = prompts[:, None] + (share * (lengths - 1 - prompts)[:, None]).long()  # never the last token
        if step >= run.steps * (1 - run.quantized_part):
            drafter.set_fp8(True)
            quantizer.apply()
        with autocast(run.device):
            loss = block_loss(target, drafter, ids, lengths, anchors)
        update(drafter, optim, loss, learning_rate(step, run.steps, run.peak_rate))
        progress.add(step, loss, anchors.numel() * drafter.c.block_size)
        if (step + 1) % run.save_every == 0:
            save_model(drafter, directory)
    drafter.set_fp8(False)
    quantizer.clear()


def block_loss(
    target: Target, drafter: Drafter, ids: torch.Tensor, lengths: torch.Tensor, anchors: torch.Tensor
) -> torch.Tensor:
    """Weighted mean cross-entropy of rows 1..B-1 of the block at each anchor [B, A] of ids [B, T]."""
    with torch.no_grad():
        _, taps = target(ids, drafter.c.target_layer_ids)
    hidden = drafter(taps, anchors, ids.gather(1, anchors), target.model.embed_tokens.weight)
    logits = target.lm_head(hidden[:, :, 1:]).float()  # [B, A, block - 1, V]
    row = torch.arange(1, drafter.c.block_size, device=ids.device)
    place = anchors[..., None] + row
    weight = (place < lengths[:, None, None]) * torch.exp(-(row - 1) / DECAY)
    labels = ids[:, None].expand(-1, anchors.shape[1], -1).gather(2, place.clamp(max=ids.shape[1] - 1))
    each = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def check_pair(output: Path, tokenizer: Tokenizer, run: DrafterRun) -> dict[str, float]:
    """Mean accept length on held-out tasks: target in BF16 or quantized, drafter in BF16 or quantized."""
    asked = tasks("heldout", 0, min(run.check_tasks, HELDOUT_TASKS))
    prompts = [tuple(e.ids) for e in tokenizer.encode_batch([render(t.messages) for t in asked])]
    lengths = {}
    for name, quantized in (("target_bf16", False), ("target_nvfp4", True)):
        target = _frozen(output / "target", run.device, quantized=quantized)
        with autocast(run.device):
            samples = [Sample(p, a) for p, a in zip(prompts, greedy(target, prompts, run.longest_answer), strict=True)]
            drafter = load_drafter(output / "drafter", run.device)
            lengths[f"{name}.drafter_bf16"] = round(acceptance(target, drafter, samples).mean, 3)
            WeightQuantizer(drafter).apply()
            drafter.set_fp8(True)
            lengths[f"{name}.drafter_nvfp4"] = round(acceptance(target, drafter, samples).mean, 3)
    return lengths


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--start", default="", help="checkpoint directory to go on from")
    parser.add_argument("--commit", default="", help="revision of the sources, for the record")
    whole = ("seed", "first_task", "tasks", "generate_batch", "steps", "batch", "anchors", "workers", "check_tasks")
    for name in (*whole, "log_every", "save_every"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(DrafterRun(), name))
    for name in ("peak_rate", "weight_decay", "quantized_part"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(DrafterRun(), name))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = vars(parser.parse_args())
    output, commit = given.pop("output"), given.pop("commit")
    train_drafter(DrafterRun(**given), output, commit=commit, log=partial(print, flush=True))


if __name__ == "__main__":
    main()
