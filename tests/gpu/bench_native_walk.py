"""Times the walk behind a drafter's head in a CUDA graph, with a cold and a warm L2 cache; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_walk.py
"""

import json
import sys
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parents[1] / "support")]
from test_native_walk import device, random_case  # noqa: E402

from edge_dflash.decode.sampling import GREEDY, Sampling  # noqa: E402

CASES = {
    "DFlash2, 7 rows": ("selector", (248_320, 5120, 256, 16, 7)),
    "DFlash2, 15 rows": ("selector", (248_320, 5120, 256, 16, 15)),
    "DSpark vanilla, 8 rows": ("vanilla", (248_320, 5120, 256, 64, 8)),
    "DSpark gated, 8 rows": ("gated", (248_320, 5120, 256, 64, 8)),
    "DSpark rnn, 8 rows": ("rnn", (248_320, 5120, 256, 64, 8)),
}
SAMPLED = Sampling(0.7, 20, 0.95, 1)


def seconds(gpu, enqueue, spill):
    """Time of what ``enqueue`` enqueues, behind a fill of ``spill`` that is not counted."""

    def median_of(*parts):
        graph = gpu.capture(lambda: [part() for part in parts])
        for _ in range(3):
            graph.launch()
        return median(gpu.seconds(graph.launch) for _ in range(15))

    def clear():
        gpu.fill(spill)

    return median_of(clear, enqueue) - median_of(clear)


def main():
    gpu, results = device().gpu, []
    spills = {"cold": gpu.allocate(256 << 20), "warm": gpu.allocate(256)}
    for name, (head, sizes) in CASES.items():
        case = random_case(head, sizes)
        case.prepare()
        row = {"walk": name}
        for sampling in (GREEDY, SAMPLED):
            case.walk(sampling)
            for kind, spill in spills.items():
                part = f"{'greedy' if sampling is GREEDY else 'sampled'} {kind}"
                row[part] = seconds(gpu, lambda c=case: c.walker.walk(
                    c.logits, c.device.control, c.counted, c.tokens, c.sampling), spill) * 1e6  # fmt: skip
        for kind, spill in spills.items():
            row[f"prepare {kind}"] = seconds(gpu, case.prepare, spill) * 1e6
        print("  ".join(f"{k} {v:6.2f}" if k != "walk" else f"{v:24s}" for k, v in row.items()))
        results.append(row)
    print(json.dumps({"device": gpu.name, "us": results}))


if __name__ == "__main__":
    main()
