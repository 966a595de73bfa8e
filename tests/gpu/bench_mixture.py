"""A target with experts, random weights: a plain token and cycles by their drafts, for rows alike and rows apart.

    python tests/gpu/bench_mixture.py [--pair qwen3.6-35b-a3b] [--weights nvfp4] [--correlation 0 ...] [--output FILE]

One line a number of drafts: a whole cycle, its verify beside the floor of the bytes that its rows chose (counted on the
device), and tokens a second by the published acceptance; then plans with the number chosen by measurement.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from edge_dflash.bench.run import run
from edge_dflash.bench.subjects import CUBINS, probe_device, synthetic_subject
from edge_dflash.bench.workload import Workload


def show(result):
    plain = result.plain
    over = plain.ms / result.plain_floor_ms
    print(f"\n{result.pair} {result.weights}, correlation of rows {result.routing_correlation:g}")
    print(
        f"plain {plain.ms:.3f} ms, {plain.tokens_per_second:.0f} tok/s, {over:.2f} x floor {result.plain_floor_ms:.3f}"
    )
    print("drafts  cycle ms  verify ms  experts       MB  floor ms  x floor  of bandwidth   tok/s")
    for each in result.by_drafts:
        part = each.verify
        print(
            f"{each.drafts:6d} {each.ms:9.3f} {part.ms:10.3f} {each.experts:8.1f} {part.bytes / 1e6:8.0f} "
            f"{part.floor_ms:9.3f} {part.over_floor:8.2f} {1 / part.over_floor:13.0%} {each.tokens_per_second:7.0f}"
        )
    chosen = result.chosen
    gain = chosen.tokens_per_second / plain.tokens_per_second
    print(f"chosen: mostly {chosen.usual} drafts, {chosen.tokens_per_second:.0f} tok/s, {gain:.2f} x plain")
    whole = result.speculative
    print(f"all drafts: {whole.tokens_per_second:.0f} tok/s, accept length {whole.accept_length:.2f}")
    print(f"propose {result.cycle.propose.ms:.3f} ms", {str(p.tokens): round(p.ms, 2) for p in result.prefill})
    for step in result.profile:
        rate = step.bytes / step.ms / 1e9
        print(f"  {step.name:60s} {step.count:4d} {step.ms:8.3f} ms {step.bytes / 1e6:9.1f} MB {rate:6.2f} TB/s")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--pair", default="qwen3.6-35b-a3b")
    options.add_argument("--weights", default="nvfp4")
    options.add_argument("--correlation", type=float, nargs="*", default=[0.0, 1.0])
    options.add_argument("--tokens", type=int, default=256)
    options.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    options.add_argument("--cubins", type=Path, default=CUBINS)
    options.add_argument("--profile", action="store_true")
    options.add_argument("--output", type=Path)
    asked = options.parse_args()
    say = partial(print, flush=True)
    device, cubin = probe_device(asked.cubins, say)
    print(f"read {device.bandwidth / 1e12:.2f} TB/s")
    found = []
    for correlation in asked.correlation:
        work = Workload(512, asked.tokens, tuple(asked.prefill), profile=asked.profile, acceptance="published")
        work = Workload(**vars(work) | {"correlation": correlation})
        with synthetic_subject(asked.pair, asked.weights, work, cubin, say) as subject:
            found.append(run(subject, device, work, lambda text: None))
        show(found[-1])
    if asked.output:
        asked.output.write_text(json.dumps([result.to_json() for result in found]))


if __name__ == "__main__":
    main()
