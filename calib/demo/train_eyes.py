"""Train the eyes of the demo: a small vision tower whose rows are the words of a drawn scene to the demo's target.

The target stays as it is: rows learn to be its embeddings of the words. ``python -m calib.demo.train_eyes OUT`` writes
OUT/eyes: tower, configuration, tokenizer, training.json. A CPU is enough.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from calib.demo.eyes import Eyes, EyesConfig, patch_places, patches
from calib.demo.eyes_files import save_eyes
from calib.demo.gazing import look
from calib.demo.pictured import GRID, WORDS, heldout, training_scene, words
from calib.demo.storage import load_target
from calib.demo.training import Progress, device_name, write_record
from edge_dflash.demo.drawing import draw
from edge_dflash.demo.tasks import TARGET
from edge_dflash.demo.world import Scene
from edge_dflash.training.trainer import learning_rate

Log = Callable[[str], None]
_SOFT = 8.0  # of the distances that stand for likelihoods
_VOCABULARY_SCENES = 3000  # scenes whose words are all that there are


@dataclass(frozen=True)
class EyesRun:
    """Everything that decides a training of the tower."""

    seed: int = 0
    steps: int = 1000
    batch: int = 16  # scenes a step, each of them new
    peak_rate: float = 3e-3
    weight_decay: float = 0.01
    check_scenes: int = 64  # held-out
    log_every: int = 25
    save_every: int = 200
    config: EyesConfig = field(default_factory=EyesConfig)


@dataclass(frozen=True)
class Batch:
    """Scenes as patches and words. Patches that are alike, of whichever picture, stand there once."""

    levels: torch.Tensor  # [unique, 3 * P * P] uint8
    places: torch.Tensor  # [B, N] which of them
    words: torch.Tensor  # [B, WORDS] numbers of codes


class Words:
    """The words of scenes as the target embeds them."""

    def __init__(self, tokenizer: Tokenizer, embedding: torch.Tensor) -> None:
        said = {word for index in range(_VOCABULARY_SCENES) for word in words(training_scene(index))}
        self._number = {word: number for number, word in enumerate(sorted(said))}
        ids = [tokenizer.encode(word, add_special_tokens=False).ids for word in sorted(said)]
        assert all(len(one) == 1 for one in ids), "every word of a scene is one token"
        self.codes = embedding[[one[0] for one in ids]]  # [words, H]
        self._half = self.codes.square().sum(-1) / 2

    def batch(self, scenes: Sequence[Scene], c: EyesConfig) -> Batch:
        """Draw scenes."""
        levels = np.stack([patches(draw(scene), c) for scene in scenes])
        flat = levels.reshape(-1, levels.shape[-1])
        _, first, places = np.unique(flat.view(f"V{flat.shape[1]}")[:, 0], return_index=True, return_inverse=True)
        said = [[self._number[word] for word in words(scene)] for scene in scenes]
        where = torch.from_numpy(places.reshape(levels.shape[:2]))
        return Batch(torch.from_numpy(flat[first]), where, torch.tensor(said))

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Log-likelihood of every word, up to a constant, from its distance: rows [..., H] -> [..., words]."""
        return (rows @ self.codes.T - self._half) / _SOFT

    def loss(self, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Cross-entropy of the words, and the squared distance to their embeddings."""
        distance = (rows - self.codes[batch.words]).square().mean()
        return F.cross_entropy(self.scores(rows).flatten(0, 1), batch.words.flatten()) + distance


def rows_of(eyes: Eyes, batch: Batch) -> torch.Tensor:
    """Rows [B, WORDS, H] of a batch."""
    return eyes.after(eyes.patch_embed(batch.levels)[batch.places])


def new_eyes(c: EyesConfig) -> Eyes:
    """A tower with start weights."""
    grid = GRID[0] * c.merge, GRID[1] * c.merge
    eyes = Eyes(c, grid)
    look(eyes, patch_places(grid, c.merge))
    return eyes


def train_eyes(run: EyesRun, output: Path, *, commit: str = "", log: Log = print) -> dict[str, Any]:
    """Train, write OUT/eyes and OUT/eyes/training.json, return the record."""
    began = time.perf_counter()
    torch.manual_seed(run.seed)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    said = Words(tokenizer, load_target(TARGET).model.embed_tokens.weight.detach())
    eyes = new_eyes(run.config)
    known = said.batch([task.scene for task in heldout(run.check_scenes)], run.config)
    groups = [[p for p in eyes.parameters() if (p.ndim > 1) == matrices] for matrices in (True, False)]
    optim = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": run.weight_decay}, {"params": groups[1], "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    progress = Progress("eyes", run.steps, log, run.log_every)
    for step in range(run.steps):
        scenes = [training_scene(index) for index in range(step * run.batch, (step + 1) * run.batch)]
        batch = said.batch(scenes, run.config)
        loss = said.loss(rows_of(eyes, batch), batch)
        for group in optim.param_groups:
            group["lr"] = learning_rate((step + 1) / run.steps, run.peak_rate)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(eyes.parameters(), 1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
        progress.add(step, loss, run.batch * WORDS)
        if (step + 1) % run.save_every == 0:
            save_eyes(eyes, output / "eyes")
            log(f"held-out {check_eyes(eyes, said, known)}")
    save_eyes(eyes, output / "eyes")
    record = {
        "what": "eyes",
        "device": device_name("cpu"),
        "commit": commit,
        "run": asdict(run),
        "parameters": sum(p.numel() for p in eyes.parameters()),
        "seconds": round(time.perf_counter() - began),
        "loss": progress.curve,
        "heldout": check_eyes(eyes, said, known),
    }
    write_record(output / "eyes" / "training.json", record)
    return record


@torch.no_grad()
def check_eyes(eyes: Eyes, said: Words, batch: Batch) -> dict[str, float]:
    """Shares of words, and of whole scenes, whose nearest embedding is the right one."""
    right = said.scores(rows_of(eyes, batch)).argmax(-1) == batch.words
    return {"words": round(right.float().mean().item(), 5), "scenes": round(right.all(1).float().mean().item(), 4)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--commit", default="", help="revision of the sources, for the record")
    for name in ("seed", "steps", "batch", "check_scenes", "log_every", "save_every"):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=getattr(EyesRun(), name))
    for name in ("peak_rate", "weight_decay"):
        parser.add_argument("--" + name.replace("_", "-"), type=float, default=getattr(EyesRun(), name))
    given = vars(parser.parse_args())
    output, commit = given.pop("output"), given.pop("commit")
    train_eyes(EyesRun(**given), output, commit=commit, log=partial(print, flush=True))


if __name__ == "__main__":
    main()
