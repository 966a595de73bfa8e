"""Times the choice of 16 tokens among 248,320 logits each inside a CUDA graph; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_sample.py. The logits lie in the L2 cache, as behind the head.
"""

import json
from functools import partial
from statistics import median

import numpy as np

from edge_dflash.backends.cuda.kernels.sample import Block
from edge_dflash.backends.cuda.memory import Control
from edge_dflash.decode.sampling import Sampling, pack
from tests.gpu.test_native_sample import choices, logits

PARTS = {
    "all": ("sample_count", "sample_cut", "sample_ties", "sample_choose"),
    "ties": ("sample_ties",),
    "choose": ("sample_choose",),
    "count": ("sample_count",),
}
REPEATS = 20  # choices in a graph
COLUMNS = 248_320
SETTINGS = {
    "greedy": Sampling(),
    "T 1": Sampling(1.0, seed=1),
    "T 0.6, k 20, p 0.95": Sampling(0.6, 20, 0.95, 1),
    "T 1, p 0.95": Sampling(1.0, 0, 0.95, 1),
    "T 1, k 1000": Sampling(1.0, 1000, 1.0, 1),
}


def launch(ours, block, kernels):
    """A choice, of which only some launches are made."""
    kept = ours.sampler._launch
    ours.sampler._launch = lambda name, *arguments: kept(name, *arguments) if name in kernels else None
    try:
        ours.sampler.choose(ours.buffers, ours.matrix, ours.buffers.chosen, block)
    finally:
        del ours.sampler._launch


def seconds(device, enqueue, repeats=REPEATS):
    graph = device.gpu.capture(lambda: [enqueue() for _ in range(repeats)])
    for _ in range(3):
        graph.launch()
    return median(device.gpu.seconds(graph.launch) for _ in range(15)) / repeats


def main():
    ours, results = choices(COLUMNS), []
    device = ours.device
    block = Block(device.word(Control.LENGTH), 1, 0, 16)
    for kind in ("normal", "peaked", "few", "flat"):
        ours.put(logits(kind, 16, COLUMNS))
        for name, sampling in SETTINGS.items():
            ours.chooser.prepare(sampling)
            times = {}
            for part, kernels in PARTS.items():
                times[part] = seconds(device, partial(launch, ours, block, kernels))
            ours.buffers.clear(device.gpu)  # counts that no cut took
            print(f"{kind:7s} {name:20s} " + "  ".join(f"{k} {v * 1e6:6.2f} us" for k, v in times.items()))
            results.append({"logits": kind, "settings": name, **{k: v * 1e6 for k, v in times.items()}})
    ours.put(logits("normal", 16, COLUMNS))
    mask = pack(np.random.default_rng(0).random(COLUMNS) < 0.01)
    for name, sampling in SETTINGS.items():
        for rows in (1, 16):
            ours.chooser.choose(sampling, 0, [mask] * rows, 0)
            took = seconds(device, lambda: ours.sampler.choose(ours.buffers, ours.matrix, ours.buffers.chosen))
            print(f"masked  {name:20s} {rows} rows {took * 1e6:6.2f} us")
            results.append({"logits": "masked", "settings": name, "rows": rows, "us": took * 1e6})
    print(json.dumps({"device": device.gpu.name, "results": results}))


if __name__ == "__main__":
    main()
