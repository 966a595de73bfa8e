"""How many drafts pay: t(K), and tokens a second with the chosen number beside every fixed one, on random weights.

    python tests/gpu/bench_k.py [--pair qwen3.6-27b:nvfp4 ...] [--tokens N] [--output FILE]

Acceptance is forced to a profile: each draft whose forerunners stand is accepted with the same probability. Plans run
through ``Planner.plan``; the chosen number is that of a planner which has just measured its cycles.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from random import Random
from statistics import median

from edge_dflash.backends.cuda.measured import force
from edge_dflash.bench.subjects import CUBINS, probe_device, synthetic_subject
from edge_dflash.bench.workload import Workload
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.drafts import measure
from edge_dflash.decode.sampling import Sampling
from edge_dflash.decode.shape import row_steps
from edge_dflash.planner import Planner

PAIRS = ("qwen3.6-27b:nvfp4", "qwen3.5-4b:nvfp4")
PROFILES = (0.9, 0.7, 0.5)
BLOCK = 64  # cycles of which the acceptance is the profile's, as exactly as it can be
CYCLES = 7  # of a time
LEAST = 0.97  # of the best fixed number's speed


def pattern(share, most, random):
    """Accepted drafts of many cycles, in blocks with the profile's quantiles in another order each."""
    counts = [min(most, int(math.log((i + 0.5) / BLOCK) / math.log(share))) for i in range(BLOCK)]
    return [count for _ in range(16) for count in random.sample(counts, BLOCK)]


def seconds(backend, prompt, drafts, sampling):
    """Median cycle behind a prompt, by the wall clock and by the device's."""
    found = []
    for _ in range(CYCLES):
        start = time.perf_counter()
        cycle = backend.cycle(Asked(1, sampling, drafts=drafts))
        backend.commit(1)
        found.append((time.perf_counter() - start, cycle.propose_seconds + cycle.verify_seconds))
    return [median(column) for column in zip(*found, strict=True)]


def times(backend, prompt):
    """t(K) for every K, greedy and sampled."""
    rows = []
    for sampling in (Sampling(), Sampling(0.8, 20, 0.95, 1)):
        backend.reset()
        backend.prefill(prompt).argmax()
        rows.append([seconds(backend, prompt, k, sampling) for k in range(backend.shape.drafts + 1)])
    return rows


def graphs(backend):
    """Seconds and device bytes of one more set of the cycles' graphs."""
    backend.gpu.synchronize()
    before, start = backend.gpu.free_bytes()[0], time.perf_counter()
    kept = backend.graphs[1].capture.cycles()
    backend.gpu.synchronize()
    taken = time.perf_counter() - start, before - backend.gpu.free_bytes()[0]
    return {"seconds": taken[0], "bytes": taken[1], "graphs": 2 + len(kept.greedy.graphs) + len(kept.sampled.graphs)}


def speed(planner, prompt, tokens):
    """Tokens a second of a plan, and the drafts that its cycles verified."""
    backend = planner.backend
    backend.gpu.fill(backend.loaded.common.buffers.clock)  # the pattern from its beginning
    plan = planner.plan(prompt, max_new_tokens=tokens)
    return plan.tokens_per_second, plan.drafting


def bench(name, kind, cubin, tokens):
    """One pair's figures."""
    work = Workload(context=256, tokens=tokens, prefill=(256,))
    with synthetic_subject(name, kind, work, cubin, lambda text: None) as subject:
        backend, prompt = subject.planner.backend, subject.prompts[0]
        most, load = backend.shape.drafts, subject.load_seconds
        row = {"pair": name, "weights": kind, "load_s": load, "graphs": graphs(backend), "t_ms": {}, "profiles": {}}
        greedy, sampled = times(backend, prompt)
        row["t_ms"] = {k: [1e3 * greedy[k][0], 1e3 * greedy[k][1], 1e3 * sampled[k][0]] for k in range(most + 1)}
        start = time.perf_counter()
        measure(backend)
        row["measure_s"] = time.perf_counter() - start
        room = min(tokens, backend.shape.usable_context - len(prompt))
        for share in PROFILES:
            force(backend, pattern(share, most, Random(1)))
            fixed = {}
            for k in (rows - 1 for rows in row_steps(most + 1)):
                fixed[k] = speed(Planner(backend, None, drafts=k), prompt, room)[0]
            planner = Planner(backend, None)
            planner._engine.pace.begin(backend, None)
            found = [speed(planner, prompt, room) for _ in range(2)]
            best = max(fixed, key=fixed.get)  # again: what ran in between may have changed the clocks
            fixed[best] = (fixed[best] + speed(Planner(backend, None, drafts=best), prompt, room)[0]) / 2
            row["profiles"][share] = {
                "fixed": fixed,
                "chosen": [each[0] for each in found],
                "drafts": [(each[1].usual, round(each[1].mean, 2)) for each in found],
                "of_best": [each[0] / max(fixed.values()) for each in found],
            }
        force(backend, None)
        return row


def show(row):
    """A few lines for people."""
    print(f"{row['pair']} {row['weights']}: loaded in {row['load_s']:.1f} s; graphs {row['graphs']}")
    print("K: t ms greedy (device), sampled; measured in {:.2f} s".format(row["measure_s"]))
    print("  " + "  ".join(f"{k}: {g:.3f} ({d:.3f}) {s:.3f}" for k, (g, d, s) in row["t_ms"].items()))
    for share, found in row["profiles"].items():
        fixed = " ".join(f"{k}:{rate:.0f}" for k, rate in found["fixed"].items())
        chosen = ", ".join(f"{rate:.0f} with {d}" for rate, d in zip(found["chosen"], found["drafts"], strict=True))
        print(f"  {share}: fixed {fixed}; chosen {chosen}; of the best {[round(one, 3) for one in found['of_best']]}")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--pair", action="append")
    options.add_argument("--tokens", type=int, default=384)
    options.add_argument("--output", type=Path)
    asked = options.parse_args()
    device, cubin = probe_device(CUBINS, lambda text: None)
    rows = []
    for pair in asked.pair or PAIRS:
        name, _, kind = pair.partition(":")
        rows.append(bench(name, kind or "nvfp4", cubin, asked.tokens))
        show(rows[-1])
    text = json.dumps({"bandwidth": device.bandwidth, "rows": rows})
    if asked.output:
        asked.output.write_text(text)
    worst = min(found["of_best"][-1] for row in rows for found in row["profiles"].values())
    print(f"read {device.bandwidth / 1e12:.2f} TB/s; the worst chosen number gives {worst:.3f} of the best fixed one")
    return worst < LEAST


if __name__ == "__main__":
    sys.exit(main())
