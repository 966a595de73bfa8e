"""The training loop: steps, checks on the held-out split, checkpoints that a killed run goes on from.

Hugging Face accelerate has the device, mixed precision, accumulation and the state on the disk. On a CPU a run that was
killed and resumed ends with the weights of one that was not, bit for bit: what a step reads follows from its number.

Checks walk the loop's cycles with what is on the disk: the target's greedy answer and its taps are known, so a cycle
is one pass of the drafter: its drafts are accepted as far as they are the answer.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from edge_dflash.backends import SMALL_MODEL
from edge_dflash.builder.convert import one_thread
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.training.drafter import BlockDrafter
from edge_dflash.training.evaluate import accepted
from edge_dflash.training.losses import block_loss, drafts
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.taps import BatchReader, Shards, damaged_file, seal, writing
from edge_dflash.training.workdir import CHECKPOINT, TrainingState

MOST = 64  # answers that are walked


@torch.no_grad()
def walk_answers(
    drafter: BlockDrafter, shards: Shards, indices: Sequence[int], device: str, at_once: int = 16
) -> list[list[int]]:
    """Tokens that each cycle commits, bonus included, of the greedy walk along each of some samples' answers.

    ``at_once``: samples of a pass; no more than a step has, and it needs no more memory.
    """
    walked = list[list[int]]()
    for first in range(0, len(indices), at_once):
        part = list(indices[first : first + at_once])
        batch = shards.batch(part, torch.zeros(len(part), 1)).to(device)
        context, ids = drafter.context(batch.taps), batch.ids
        at, ends = batch.anchors[:, 0], batch.lengths - 1  # of each: where the anchor stands, the last token
        lengths: list[list[int]] = [[] for _ in part]
        while bool((at < ends).any()):
            known = ids.gather(1, at[:, None])
            made = drafts(drafter, drafter.block(context, at[:, None], known), known)[:, 0]
            place = at[:, None] + 1 + torch.arange(made.shape[1], device=ids.device)
            right = (made == ids.gather(1, place.clamp(max=ids.shape[1] - 1))) & (place <= ends[:, None])
            count = right.long().cumprod(1).sum(1) + 1
            count = torch.minimum(count, ends - at)
            for row, number in enumerate(count.tolist()):
                if number > 0:
                    lengths[row].append(number)
            at = at + count
        walked += lengths
    return walked


STAGE = "training"
WARM_UP, LAST_RATE = 0.04, 0.02  # part of the steps; of the peak learning rate, at the end of the cosine
WEIGHT_DECAY = 0.05  # of matrices
PROBED = 8  # steps whose times are kept
LEAST_STEPS = 20  # however few the minutes are
SHARE = 20  # times that a checkpoint takes, at least, lie between two
BEST = "best.safetensors"  # of a checkpoint


def learning_rate(part: float, peak: float) -> float:
    """Linear warm-up, then a cosine; ``part``: how much of the training is done behind this step, 0 to 1."""
    if part < WARM_UP:
        return peak * part / WARM_UP
    return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * (part - WARM_UP) / (1 - WARM_UP))))


class Trainer:
    """Trains a drafter in ``folder``, from its start or from where an earlier run stood."""

    def __init__(
        self,
        drafter: BlockDrafter,
        shards: Shards,
        run: TrainingRun,
        folder: Path,
        *,
        device: str = "cpu",
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._run, self._shards, self._folder, self._device, self._log = run, shards, folder, device, log
        self._state, self._saving = TrainingState(), 0.0  # seconds of the last checkpoint
        self._best: dict[str, torch.Tensor] = {}  # weights of the best check, on the host
        gpu = device != "cpu"
        self._accelerator = Accelerator(
            cpu=not gpu, mixed_precision="bf16" if gpu else "no", gradient_accumulation_steps=run.accumulate
        )
        trained = [p for p in drafter.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim == 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=run.peak, betas=(0.9, 0.95), fused=gpu)
        self._drafter: BlockDrafter
        self._drafter, self._optimizer = self._accelerator.prepare(drafter, optimizer)
        self._accelerator.register_for_checkpointing(self._state)
        self._reader = BatchReader(shards, run, pinned=gpu)
        heldout = shards.heldout if len(shards.heldout) else shards.training
        self._heldout = [int(i) for i in heldout[np.linspace(0, len(heldout) - 1, min(MOST, len(heldout))).astype(int)]]

    def run(self, progress: Progress = unheard) -> TrainingState:
        """Train to the end, which leaves a checkpoint with the best weights: see :func:`kept_weights`.

        Raises RequestError for a loss that is no number, BackendError where the device's memory is too small.
        """
        small = self._device == "cpu" and self._drafter.spec.hidden_size <= SMALL_MODEL
        try:
            with one_thread() if small else nullcontext():
                return self._train(progress)
        except torch.OutOfMemoryError:
            run, longest = self._run, self._shards.lengths.max()
            raise BackendError(
                f"the GPU has no room for {run.sequences} answers of up to {longest} tokens with {run.anchors} blocks "
                "each; give fewer --sequences or --anchors and more --accumulate: answers and taps are kept"
            ) from None

    def _train(self, progress: Progress) -> TrainingState:
        self._folder.mkdir(parents=True, exist_ok=True)
        state, run = self._state, self._run
        if kept := _checkpoints(self._folder):
            self._best = kept_weights(self._folder)
            self._accelerator.load_state(str(kept[-1]))
            self._log(f"the training goes on behind step {state.step}")
        began = time.perf_counter() - state.seconds
        if not kept:
            self._check(counts=False)  # where it begins; an untouched drafter is the best so far
            state.seconds = time.perf_counter() - began
        saved = time.perf_counter()
        while not state.ended:
            since, before = time.perf_counter(), self._part()
            state.sums.append(self._step(before))
            state.step += 1
            now = time.perf_counter()
            state.seconds = now - began
            if len(state.times) < PROBED:
                state.times.append(now - since)
            part = self._part()
            progress(STAGE, state.step if run.steps else round(1000 * part), run.steps or 1000)
            if part >= 1 or int(part * run.checks) > int(before * run.checks):
                state.losses.append((state.step, round(sum(state.sums) / len(state.sums), 5)))
                state.sums.clear()
                self._check(counts=self._drafter.quantized)
                tired = 0 < run.patience <= state.since_best
                state.ended = part >= 1 or tired
                if tired and part < 1:
                    self._log(f"{state.since_best} checks without a better accept length end the training (--patience)")
            if state.ended or time.perf_counter() - saved >= max(run.pause, SHARE * self._saving):
                since = time.perf_counter()
                self._save()
                saved = time.perf_counter()
                self._saving = saved - since
        progress(STAGE, total := run.steps or 1000, total)
        return state

    def _part(self, more: int = 0) -> float:
        """How much of the training is done, 0 to 1, behind so many more steps."""
        state, run = self._state, self._run
        if run.steps:
            return (state.step + more) / run.steps
        return min(1.0, state.seconds / (60 * run.minutes), (state.step + more) / LEAST_STEPS)

    def close(self) -> None:
        """Let go of the device's memory."""
        self._reader.close()
        self._accelerator.free_memory()
        del self._drafter, self._optimizer
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def _step(self, part: float) -> float:
        """One step of the optimizer; the mean loss of its passes."""
        run, state, total = self._run, self._state, 0.0
        self._drafter.quantized = part >= 1 - run.rounded
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._part(1), run.peak)
        for number in range(run.accumulate):
            batch = self._reader.batch(state.step * run.accumulate + number).to(self._device)
            with self._accelerator.accumulate(self._drafter):
                with self._accelerator.autocast():
                    loss = block_loss(self._drafter, batch)
                self._accelerator.backward(loss)
                if self._accelerator.sync_gradients:
                    self._accelerator.clip_grad_norm_(self._drafter.parameters(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
            total += float(loss.detach())
        if not math.isfinite(total):
            raise RequestError(
                f"the loss of step {state.step + 1} is {total}; remove {self._folder} and give a --rate below "
                f"{run.peak:g}: answers and taps are kept"
            )
        return total / run.accumulate

    def _check(self, *, counts: bool) -> None:
        """Accept length on the held-out split, as a bundle holds the weights; the best ones are kept.

        ``counts``: for the patience, where it is no better one.
        """
        state, self._drafter.quantized = self._state, True
        with self._accelerator.autocast():
            walked = walk_answers(self._drafter, self._shards, self._heldout, self._device, self._run.sequences)
        self._drafter.forget_rounded()
        length = accepted(walked).mean
        state.lengths.append((state.step, round(length, 4)))
        state.since_best += counts
        if length > state.best or not state.best:
            state.best, state.best_step, state.since_best = length, state.step, 0
            self._best = {name: tensor.to("cpu", copy=True) for name, tensor in self._drafter.weights().items()}
        loss = f"loss {state.losses[-1][1]:.4f}, " if state.losses else ""
        self._log(f"step {state.step}: {loss}accept length {length:.3f} on held-out answers")

    def _save(self) -> None:
        """A checkpoint, whole or not at all; older ones go."""
        half, whole = self._folder / "checkpoint.part", self._folder / f"{CHECKPOINT}{self._state.step:08}"
        shutil.rmtree(half, ignore_errors=True)
        with writing(whole):
            self._accelerator.save_state(str(half))
            save_file(self._best, str(half / BEST))
            files = {file.name: file for file in half.iterdir()}
            seal(half, files)
            for file in files.values():
                with file.open("rb") as data:
                    os.fsync(data.fileno())
            half.replace(whole)
        for other in _checkpoints(self._folder)[:-1]:
            shutil.rmtree(other)


def _checkpoints(folder: Path) -> list[Path]:
    """Those of a training, the newest last."""
    return sorted(path for path in folder.glob(f"{CHECKPOINT}*") if path.is_dir())


def kept_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The best weights of a training that has ended or not, by canonical name. Raises RequestError for damaged ones."""
    kept = _checkpoints(folder)[-1]
    if (damaged := damaged_file(kept)) is not None:
        raise RequestError(f"{damaged} is damaged; remove {folder} to train again: answers and taps are kept")
    return load_file(str(kept / BEST))
