"""What drafters see of the target, for every id of a dataset: computed once, kept on the device.

A drafter's training passes over each answer many times, and several kinds of drafter over the same answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from calib.demo.data import Dataset
from calib.demo.losses import Batch
from calib.demo.model import Target
from calib.demo.training import autocast, on_device


@dataclass(frozen=True)
class Features:
    """Taps of all sequences end to end [ids, n * H], and the last layer's output [ids, H]."""

    dataset: Dataset
    taps: torch.Tensor
    last: torch.Tensor

    def batch(self, indices: npt.NDArray[np.int64], share: torch.Tensor) -> Batch:
        """Some sequences, each with anchors in its answer where ``share`` [B, A] of 0 .. 1 says, never at its end."""
        device = str(self.taps.device)
        ids, lengths, prompts = on_device(self.dataset, indices, device)
        anchors = prompts[:, None] + (share.to(device) * (lengths - 1 - prompts)[:, None]).long()
        start = torch.from_numpy(self.dataset.offsets[indices]).to(device)
        place = start[:, None] + torch.arange(ids.shape[1], device=device)
        place = torch.minimum(place, (start + lengths - 1)[:, None])  # behind the end nothing is read
        return Batch(ids, lengths, anchors, self.taps[place], self.last[place])


@torch.no_grad()
def features(target: Target, dataset: Dataset, taps: tuple[int, ...], *, device: str, batch: int = 256) -> Features:
    """One pass of the target over the dataset; BF16 on a GPU, float32 on a CPU."""
    c = target.c
    kept: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    whole = torch.empty(len(dataset.ids), (len(taps) + 1) * c.hidden_size, **kept)
    order = np.argsort(dataset.lengths, kind="stable")
    for start in range(0, len(order), batch):
        indices = order[start : start + batch]
        ids, lengths, _ = on_device(dataset, indices, device)
        with autocast(device):
            _, rows = target(ids, (*taps, c.num_hidden_layers - 1))
        assert rows is not None
        inside = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        offsets = torch.from_numpy(dataset.offsets[indices]).to(device)
        place = offsets[:, None] + torch.arange(ids.shape[1], device=device)
        whole[place[inside]] = rows[inside].to(whole.dtype)
    return Features(dataset, whole[:, : -c.hidden_size], whole[:, -c.hidden_size :])
