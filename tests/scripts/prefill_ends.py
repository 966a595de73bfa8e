"""Deadlines, cancels and urgent requests inside long prompts: how far each overshoots, in chunks of the prompt.

    python tests/scripts/prefill_ends.py BUNDLE [--count 200] [--tokens 950]

Through ``Planner.plan``. A request that ends inside its prompt may be late by the one chunk that was running. The last
line is one JSON object.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path

from edge_dflash import Planner


def prompt(planner, tokens, chance):
    """Random ids: nothing of it is known from before."""
    return [chance.randrange(planner.shape.vocab_size // 2) for _ in range(tokens)]


def overshoots(planner, count, tokens, whole, chance):
    """Seconds past the deadline or the cancel, for ``count`` requests of each of both kinds by turns."""
    found = {"deadline": [], "cancelled": []}
    for index in range(count):
        kind, after = ("deadline", "cancelled")[index % 2], chance.uniform(0.02, 0.95) * whole
        ids, told = prompt(planner, tokens, chance), []
        began = time.perf_counter()
        stream = planner.stream(ids, deadline=after if kind == "deadline" else None)
        if kind == "cancelled":
            timer = threading.Timer(
                after, lambda stream=stream, told=told: (told.append(time.perf_counter()), stream.cancel())
            )
            timer.start()
        plan = stream.plan
        ended = began + plan.timings.total_seconds
        assert plan.finish_reason == kind, plan
        if plan.tokens:  # its prompt had been computed by then
            continue
        found[kind].append(ended - (told[0] if told else began + after))
    return found


def waits(planner, count, tokens, whole, chance):
    """Seconds that urgent requests waited behind a long prompt that was running."""
    found = []
    for _ in range(count):
        slow = planner.stream(prompt(planner, tokens, chance), max_new_tokens=1)
        time.sleep(chance.uniform(0.1, 0.6) * whole)
        found.append(planner.plan([1, 2, 3], max_new_tokens=1, priority=100).timings.queue_seconds)
        assert len(slow.plan.tokens) == 1
    return found


def summary(seconds, chunk):
    """p50, p99 and most, in chunks; early ends count as 0."""
    ranked = sorted(max(0.0, s) / chunk for s in seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 3) for name, share in at.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--count", type=int, default=200, help="deadlines and cancels together")
    parser.add_argument("--tokens", type=int, default=950)
    options = parser.parse_args()
    chance = random.Random(7)
    with Planner.open(options.bundle, self_test="off", fallback=False) as planner:
        took = [planner.plan(prompt(planner, options.tokens, chance), max_new_tokens=1) for _ in range(3)]
        whole = min(plan.timings.prefill_seconds for plan in took)
        chunk = whole / -(-options.tokens // planner.shape.prefill_chunk)
        found = {"prompt_tokens": options.tokens, "chunk_tokens": planner.shape.prefill_chunk}
        found |= {"prefill_s": round(whole, 3), "chunk_s": round(chunk, 4), "requests": options.count}
        for kind, seconds in overshoots(planner, options.count, options.tokens, whole, chance).items():
            found[f"{kind}_overshoot_chunks"] = summary(seconds, chunk)
        found["urgent_wait_chunks"] = summary(waits(planner, 20, options.tokens, whole, chance), chunk)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
