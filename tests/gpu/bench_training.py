"""Training of a published drafter's sizes on random weights and taps: memory and seconds a step beside the forecast.

    python tests/gpu/bench_training.py [--pair qwen3-4b] [--steps 60] [--output FILE]

Memory is what torch had allocated at its peak; the forecast of time is that of the first steps, as a dry run takes it.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from edge_dflash.model.registry import read_pair
from edge_dflash.training.drafter import TARGET, BlockDrafter
from edge_dflash.training.forecast import drafter_parameters, training_bytes
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.start import random_weights
from edge_dflash.training.taps import Sample, Shards, write_shard
from edge_dflash.training.trainer import PROBED, Trainer

CONFIGS = Path(__file__).parents[1] / "configs"
TOKENS, SAMPLES = 1024, 12
BATCHES = ((4, 16, 1), (1, 32, 2))  # sequences, anchors, passes of a step


def shards(pair, folder):
    """Samples of TOKENS tokens and random taps."""
    rng, columns = np.random.default_rng(0), len(pair.drafter.target_layer_ids) * pair.target.hidden_size
    samples = [
        Sample(tuple(rng.integers(0, pair.target.vocab_size, TOKENS).tolist()), TOKENS // 2, i >= SAMPLES - 2)
        for i in range(SAMPLES)
    ]
    taps = [
        (rng.standard_normal((TOKENS, columns), np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in samples
    ]
    write_shard(folder / "taps.safetensors", samples, {"taps": taps})
    return Shards([folder / "taps.safetensors"])


def bench(pair, batch, steps, device):
    """One training."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = shards(pair, folder)
        size = pair.target.vocab_size, pair.target.hidden_size
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        lent = {name: torch.randn(size, dtype=kind) for name in TARGET}
        drafter = BlockDrafter(pair, random_weights(pair) | lent).to(device)
        sizes = dict(zip(("sequences", "anchors", "accumulate"), batch, strict=True))
        run = TrainingRun(
            *(folder, (), folder), **sizes, steps=steps, rate=1e-3, checks=1, patience=0, pause=1e9, rounded=1.0
        )
        trainer = Trainer(drafter, data, run, folder / "run", device=device)
        trainer._check = trainer._save = lambda **_: None  # the steps alone
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = []

        def tell(stage, done, total):
            if done == PROBED:
                began.append(time.perf_counter())

        state = trainer.run(tell)
        rest = (time.perf_counter() - began[0]) / (steps - PROBED)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        reserved = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    told = training_bytes(pair, run, TOKENS, mixed=device == "cuda")
    needed = told["total"] - told["spare"]
    return {
        "batch": [run.sequences, TOKENS, run.anchors, run.accumulate],
        "parameters": drafter_parameters(pair),
        "told_bytes": needed,
        "told_with_spare": told["total"],
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "told_over_peak": needed / peak if peak else None,
        "told_step_s": state.step_seconds,
        "step_s": rest,
        "told_over_step": state.step_seconds / rest,
        "rows_s": run.sequences * run.accumulate * run.anchors * pair.drafter.block_size / rest,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", default="qwen3-4b", help="a folder of tests/configs")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    pair = read_pair(CONFIGS / given.pair / "target", CONFIGS / given.pair / "drafter")
    found = {"pair": given.pair, "device": torch.cuda.get_device_name(0) if given.device == "cuda" else "cpu"}
    found["torch"], found["rows"] = torch.__version__, []
    for batch in BATCHES:  # each in a process of its own: what is left of one is no part of another's peak
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found["rows"].append(pool.submit(bench, pair, batch, given.steps, given.device).result())
        print(json.dumps(found["rows"][-1]), flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
