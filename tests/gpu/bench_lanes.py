"""Joint cycles of 1, 2, 4 and 8 lanes: ms a pass, tokens a second in all, how far from what memory allows.

    python tests/gpu/bench_lanes.py [--pair qwen3.6-27b:nvfp4 ...] [--lanes 1,2,4,8] [--context N] [--output FILE]

Random weights, accept lengths forced to ACCEPT; every figure with its load, by ``Backend.cycles`` and, with all lanes
busy, by a planner. The floor counts weights once, and keys, values and state of each lane.
"""

import argparse
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.measured import force
from edge_dflash.bench.random_pair import RandomWeights, synthetic_pair
from edge_dflash.bench.subjects import CUBINS, probe_device
from edge_dflash.checks.footprint import Costs, Traffic
from edge_dflash.decode.backend import Asked, Precision
from edge_dflash.decode.sampling import Sampling
from edge_dflash.model import pair_programs
from edge_dflash.planner import Planner

PAIRS = ("qwen3.6-27b:nvfp4", "qwen3-8b:bf16", "qwen3.5-4b:nvfp4")
LANES = (1, 2, 4, 8)
ACCEPT = 5  # tokens of a cycle
WARM, CYCLES, TOKENS = 5, 40, 320
SAMPLED = Sampling(0.8, 20, 0.95, 1)


def load(name, kind, lanes, cubin, context):
    """A backend on random weights, its costs, and how it was loaded."""
    pair = synthetic_pair(name)
    weights, began = RandomWeights(pair, kind, cubin), time.perf_counter()
    room = context + (WARM + CYCLES + 2) * pair.verify_rows + TOKENS + 64
    backend = NativeBackend(pair, weights, Precision(), cubin=cubin, max_context=room, prefill_chunk=512, lanes=lanes)
    seconds = time.perf_counter() - began
    return backend, Costs(pair_programs(pair), weights.formats, "fp8", pair), seconds


def own_bytes(traffic: Traffic) -> int:
    """What each lane reads and writes for itself."""
    return traffic.kv + traffic.state + traffic.tape + traffic.embedding_rows


def floor(costs, lanes, context, bandwidth):
    """Seconds of a joint cycle at the speed of memory."""
    passes = (costs.propose(context), costs.verify(context, ACCEPT))
    return sum(each.total + (lanes - 1) * own_bytes(each) for each in passes) / bandwidth


def timed(backend, lanes, prompt, drafts, sampling):
    """Medians of a joint cycle: seconds by the clock on the wall, of propose and of verify."""
    for lane in range(lanes):
        backend.reset(lane)
        backend.prefill(prompt, lane)
    seconds, anchors = [], [1] * lanes
    for _ in range(WARM + CYCLES):
        asked = [Asked(anchor, sampling, drafts=drafts, lane=lane) for lane, anchor in enumerate(anchors)]
        began = time.perf_counter()
        found = backend.cycles(asked)
        for lane, cycle in enumerate(found):
            backend.commit(len(cycle.tokens), lane)
        seconds.append((time.perf_counter() - began, found[0].propose_seconds, found[0].verify_seconds))
        anchors = [cycle.tokens[-1] for cycle in found]
    return [median(column) for column in zip(*seconds[WARM:], strict=True)]


def served(backend, lanes, prompt):
    """Tokens a second in all of a planner with as many callers as lanes; it closes the backend."""
    made, start = [], threading.Barrier(lanes + 1)

    def call(lane):
        start.wait()
        made.append(len(planner.plan([*prompt[:-1], lane], max_new_tokens=TOKENS).tokens))

    with Planner(backend, None) as planner:
        callers = [threading.Thread(target=call, args=(lane,)) for lane in range(lanes)]
        for caller in callers:
            caller.start()
        start.wait()
        began = time.perf_counter()
        for caller in callers:
            caller.join()
        return sum(made) / (time.perf_counter() - began)


def candidates(backend, prompt):
    """Seconds of a plan, of ``n`` candidates by likelihood, and of as many by a callable: no log-probability."""
    asked = {"max_new_tokens": TOKENS, "temperature": 0.8, "seed": 1}
    with_rank = {"n": backend.shape.lanes, "rank": lambda plan: -plan.seed}
    planner, found = Planner(backend, None), {}
    for label, more in (("one", {}), ("likeliest", {"n": backend.shape.lanes}), ("ranked", with_rank)):
        for _ in range(2):
            began = time.perf_counter()
            planner.plan(prompt, **asked, **more)
            found[label] = time.perf_counter() - began
    planner._engine.close()  # the backend stays
    return found


def bench(name, kind, cubin, counts, context, bandwidth):
    """One pair's rows; the first count of lanes is what the others are compared with."""
    prompt = np.random.default_rng(0).integers(0, synthetic_pair(name).target.vocab_size - 8, context).tolist()
    rows = []
    for lanes in counts:
        backend, costs, seconds = load(name, kind, lanes, cubin, context)
        with_lanes = {"pair": name, "weights": kind, "lanes": lanes, "load_s": seconds, "budget": dict(backend.budget)}
        force(backend, [ACCEPT - 1])
        try:
            ms = {}
            for label, drafts, sampling in (
                ("greedy", None, Sampling()), ("sampled", None, SAMPLED), ("4 rows", 3, Sampling()),
                ("plain", 0, Sampling()),
            ):  # fmt: skip
                ms[label] = [1e3 * value for value in timed(backend, lanes, prompt, drafts, sampling)]
            tokens = lanes * ACCEPT / ms["greedy"][0] * 1e3
            lowest = 1e3 * floor(costs, lanes, context, bandwidth)
            with_lanes |= {"ms": ms, "floor_ms": lowest, "over_floor": ms["greedy"][0] / lowest, "tokens_s": tokens}
            began, copies = time.perf_counter(), 20 if lanes > 1 else 0
            for _ in range(copies):
                backend.copy(0, 1)
            backend.gpu.synchronize()
            with_lanes["copy_ms"] = 1e3 * (time.perf_counter() - began) / max(copies, 1)
            with_lanes["candidates_s"] = candidates(backend, prompt)
            with_lanes["served_tokens_s"] = served(backend, lanes, prompt)
        finally:
            backend.close()
        with_lanes["times_one"] = tokens / (rows[0]["tokens_s"] / rows[0]["lanes"] if rows else tokens / lanes)
        rows.append(with_lanes)
        show(with_lanes)
    return rows


def show(row: Mapping):
    """A few lines for people."""
    ms = ", ".join(f"{label} {whole:.3f} ({p:.3f} + {v:.3f})" for label, (whole, p, v) in row["ms"].items())
    print(
        f"{row['pair']} {row['weights']}, {row['lanes']} lanes: {ms} ms; floor {row['floor_ms']:.3f}, "
        f"x {row['over_floor']:.2f}; {row['tokens_s']:.0f} tokens/s, {row['times_one']:.2f} of one lane's; "
        f"candidates {', '.join(f'{label} {1e3 * s:.0f}' for label, s in row['candidates_s'].items())} ms; "
        f"by a planner {row['served_tokens_s']:.0f}; copy {row['copy_ms']:.2f} ms; loaded in {row['load_s']:.2f} s",
        flush=True,
    )


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--pair", action="append")
    options.add_argument("--lanes", default=",".join(map(str, LANES)))
    options.add_argument("--context", type=int, default=512)
    options.add_argument("--output", type=Path)
    asked = options.parse_args()
    device, cubin = probe_device(CUBINS, lambda text: None)
    print(f"read {device.bandwidth / 1e12:.3f} TB/s", flush=True)
    rows, counts = [], [int(count) for count in asked.lanes.split(",")]
    for pair in asked.pair or PAIRS:
        name, _, kind = pair.partition(":")
        rows += bench(name, kind or "nvfp4", cubin, counts, asked.context, device.bandwidth)
        if asked.output:
            asked.output.write_text(json.dumps({"bandwidth": device.bandwidth, "rows": rows}))


if __name__ == "__main__":
    main()
