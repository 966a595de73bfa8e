"""Train demo drafters on answers and taps of the quantized target (DFlash, arXiv 2602.06036, section on training).

Random anchors in the answer, a masked block at each, all blocks of a sequence in one pass, a loss weighted toward
early rows. NVFP4 and FP8 are emulated in the drafter too. ``python -m calib.demo.train_drafter OUT`` reads OUT/target
and OUT/answers.npz (the target's answers; made and written when absent), and writes for each kind of drafter OUT/KIND:
checkpoint, training.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from calib.demo.corpus import HELDOUT_TASKS, tasks
from calib.demo.data import LONGEST, Dataset, batches, load_dataset, pack, save_dataset, training_set
from calib.demo.drafter import KINDS, Drafter, DrafterConfig, Kind, of_kind
from calib.demo.fakequant import WeightQuantizer
from calib.demo.features import Features, features
from calib.demo.generate import acceptance, greedy
from calib.demo.losses import block_loss
from calib.demo.model import Target
from calib.demo.storage import load_drafter, load_target, save_model, target_copies
from calib.demo.tokenizer import Sample, render
from calib.demo.train_target import Log
from calib.demo.training import Progress, autocast, device_name, learning_rate, optimizer, update, write_record


@dataclass(frozen=True)
class DrafterRun:
    """Everything that decides a training of drafters."""

    kinds: tuple[Kind, ...] = ("dflash",)  # one after the other, on the same batches
    seed: int = 1
    start: str = ""  # directory with a checkpoint of each kind to go on from; "": random weights
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
    config: DrafterConfig = field(default_factory=DrafterConfig)  # sizes of the DFlash drafter; others follow them


Checks = dict[str, tuple[Target, list[Sample]]]  # a target and its answers to held-out tasks


@dataclass(frozen=True)
class Material:
    """What all kinds of drafter learn from and are checked with."""

    target: Target
    seen: Features
    checks: Checks


def train_drafters(run: DrafterRun, output: Path, *, commit: str = "", log: Log = print) -> dict[Kind, dict[str, Any]]:
    """Train on OUT/target; write OUT/KIND with its training.json for each kind; return the records."""
    material = gather(run, output, log)
    return {kind: train_kind(kind, run, material, output / kind, commit=commit, log=log) for kind in run.kinds}


def gather(run: DrafterRun, output: Path, log: Log) -> Material:
    """The quantized target, its answers and their taps, its answers to held-out tasks."""
    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(output / "target" / "tokenizer.json"))
    target = _frozen(output / "target", run.device, quantized=True)
    answers = output / "answers.npz"
    if not answers.exists():
        save_dataset(own_answers(run, target, tokenizer, log), answers)
    seen = features(target, load_dataset(answers), run.config.target_layer_ids, device=run.device)
    checks = heldout_answers(output / "target", tokenizer, run)
    log(f"{len(seen.dataset)} answers and their taps in {time.perf_counter() - began:.0f} s")
    return Material(target, seen, checks)


def train_kind(
    kind: Kind, run: DrafterRun, material: Material, directory: Path, *, commit: str, log: Log
) -> dict[str, Any]:
    """Train one kind of drafter, write its directory, return the record."""
    began = time.perf_counter()
    torch.manual_seed(run.seed)
    target, seen = material.target, material.seen
    config = replace(of_kind(kind, run.config), vocab_size=target.c.vocab_size)
    drafter = load_drafter(Path(run.start) / kind, run.device) if run.start else Drafter(config).to(run.device)
    progress = Progress(kind, run.steps, log, run.log_every)
    _steps(run, target, drafter, seen, progress, directory)
    trained = time.perf_counter() - began
    record = {
        "what": kind,
        "device": device_name(run.device),
        "commit": commit,
        "run": asdict(replace(run, kinds=(kind,), config=drafter.c)),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "training_answers": len(seen.dataset),
        "training_ids": len(seen.dataset.ids),
        "seconds": round(trained),
        "loss": progress.curve,
        **check_drafter(directory, material.checks, run),
    }
    write_record(directory / "training.json", record)
    log(f"{kind}: {trained:.0f} s, held-out accept lengths {record['heldout_accept_length']}")
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
    run: DrafterRun, target: Target, drafter: Drafter, seen: Features, progress: Progress, directory: Path
) -> None:
    optim = optimizer(drafter, run.device, run.weight_decay)
    quantizer = WeightQuantizer(drafter)
    generator = torch.Generator().manual_seed(run.seed)
    copies = target_copies(target, drafter.c)
    for step, indices in enumerate(batches(seen.dataset, run.batch, run.steps, run.seed)):
        batch = seen.batch(indices, torch.rand(len(indices), run.anchors, generator=generator))
        if step >= run.steps * (1 - run.quantized_part):
            drafter.set_fp8(True)
            quantizer.apply()
        with autocast(run.device):
            loss = block_loss(target, drafter, batch)
        update(drafter, optim, loss, learning_rate(step, run.steps, run.peak_rate))
        progress.add(step, loss, batch.anchors.numel() * drafter.c.block_size)
        if (step + 1) % run.save_every == 0 or step + 1 == run.steps:
            save_model(drafter, directory, copies)
    drafter.set_fp8(False)
    quantizer.clear()


def heldout_answers(directory: Path, tokenizer: Tokenizer, run: DrafterRun) -> Checks:
    """The target with BF16 and with quantized weights, each with its greedy answers to held-out tasks; float32."""
    asked = tasks("heldout", 0, min(run.check_tasks, HELDOUT_TASKS))
    prompts = [tuple(e.ids) for e in tokenizer.encode_batch([render(t.messages) for t in asked])]
    checks = {}
    for name, quantized in (("target_bf16", False), ("target_nvfp4", True)):
        target = _frozen(directory, run.device, quantized=quantized)
        answers = greedy(target, prompts, run.longest_answer)
        checks[name] = (target, [Sample(p, a) for p, a in zip(prompts, answers, strict=True)])
    return checks


def check_drafter(directory: Path, checks: Checks, run: DrafterRun) -> dict[str, Any]:
    """Accept length and acceptance by position on held-out tasks, drafter in BF16 and quantized."""
    lengths, positions = {}, {}
    for name, (target, samples) in checks.items():
        drafter = load_drafter(directory, run.device)
        for form in ("bf16", "nvfp4"):
            if form == "nvfp4":
                WeightQuantizer(drafter).apply()
                drafter.set_fp8(True)
            found = acceptance(target, drafter, samples)
            lengths[f"{name}.drafter_{form}"] = round(found.mean, 3)
            positions[f"{name}.drafter_{form}"] = [round(share, 3) for share in found.by_position]
    return {"heldout_accept_length": lengths, "heldout_acceptance": positions}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--kind", choices=KINDS, action="append", help="again for more kinds (default: dflash)")
    parser.add_argument("--start", default="", help="directory with a checkpoint of each kind to go on from")
    parser.add_argument("--commit", default="", help="revision of the sources, for the record")
    whole = ("seed", "first_task", "tasks", "generate_batch", "steps", "batch", "anchors", "workers", "check_tasks")
    for name in (*whole, "log_every", "save_every"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(DrafterRun(), name))
    for name in ("peak_rate", "weight_decay", "quantized_part"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(DrafterRun(), name))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = vars(parser.parse_args())
    output, commit = given.pop("output"), given.pop("commit")
    kinds = tuple(dict.fromkeys(given.pop("kind") or ("dflash",)))
    train_drafters(DrafterRun(kinds=kinds, **given), output, commit=commit, log=partial(print, flush=True))


if __name__ == "__main__":
    main()
