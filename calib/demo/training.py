"""What the trainings share: optimizer, batches on the device, progress lines, the record of a run."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from calib.demo.data import Dataset
from calib.demo.delta import CHUNK
from calib.demo.tokenizer import END_OF_TEXT_ID


def device_name(device: str) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(0) if device == "cuda" else f"CPU {platform.machine()}"


def optimizer(model: nn.Module, device: str, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors and the embedding do not."""
    decays = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return torch.optim.AdamW(
        [{"params": decays, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )


def update(model: nn.Module, optim: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> None:
    """One step of the optimizer with clipped gradients."""
    for group in optim.param_groups:
        group["lr"] = rate
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)


def autocast(device: str) -> torch.autocast:
    """BF16 linears on the GPU, float32 on the CPU."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def on_device(
    dataset: Dataset, indices: npt.NDArray[np.int64], device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids [B, T] filled up on the right, lengths [B] and prompt lengths [B]."""
    lengths = dataset.lengths[indices]
    longest = -(-int(lengths.max()) // CHUNK) * CHUNK
    ids = np.full((len(indices), longest), END_OF_TEXT_ID, dtype=np.int64)
    for row, (start, length) in enumerate(zip(dataset.offsets[indices], lengths, strict=True)):
        ids[row, :length] = dataset.ids[start : start + length]
    arrays = (ids, lengths, dataset.prompts[indices])
    on = [torch.from_numpy(x).to(device, non_blocking=True) for x in arrays]
    return on[0], on[1], on[2]


class Progress:
    """Loss lines on the terminal and in the record, without waiting for the device at every step."""

    def __init__(self, what: str, steps: int, log: Callable[[str], None], every: int) -> None:
        self.what, self.steps, self.every, self._log = what, steps, every, log
        self.curve: list[list[float]] = []  # [step, mean loss since the line before]
        self._sum: torch.Tensor | float = 0.0
        self._count = self._tokens = 0
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, tokens: int) -> None:
        """Take the loss of a step (0-based) over some tokens."""
        self._sum = self._sum + loss.detach()
        self._count, self._tokens = self._count + 1, self._tokens + tokens
        if (step + 1) % self.every == 0 or step + 1 == self.steps:
            mean = float(self._sum) / self._count
            seconds = time.perf_counter() - self._since
            rate, each = self._tokens / seconds / 1e3, seconds / self._count * 1e3
            self.curve.append([step + 1, round(mean, 5)])
            self._log(f"{self.what} {step + 1}/{self.steps} loss {mean:.4f} {rate:.0f}k tok/s {each:.0f} ms/step")
            self._sum, self._count, self._tokens = 0.0, 0, 0
            self._since = time.perf_counter()


def write_record(path: Path, record: dict[str, Any]) -> None:
    """The record of a run, with the date and the torch version, as JSON."""
    stamped = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "torch": torch.__version__, **record}
    path.write_text(json.dumps(stamped, indent=1) + "\n", encoding="utf-8")
