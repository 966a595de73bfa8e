"""Several requests at once, by a planner as callers use it: joint cycles, tokens a second, what company costs one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median, quantiles

from edge_dflash.bench.device import Device
from edge_dflash.bench.measure import lent
from edge_dflash.bench.result import Company, LaneLoad, PassTime
from edge_dflash.bench.workload import Say, Subject, Workload
from edge_dflash.checks.footprint import Costs
from edge_dflash.checks.mixes import Watching
from edge_dflash.planner import Planner

ONE_MORE = 12  # requests of the one that is watched, alone and in company
DEADLINES = 8  # requests with a deadline
SHARE = 0.5  # of the time that a request takes in company: its deadline


def load(subject: Subject, device: Device, work: Workload, lanes: int, say: Say) -> LaneLoad:
    """So many requests of as many tokens, begun together."""
    say(f"timing {lanes} request{'s' if lanes > 1 else ''} at once")
    tokens = work.budget(subject.planner.shape.verify_rows)
    prompts = [subject.prompts[lane % len(subject.prompts)] for lane in range(lanes)]
    watching = Watching()
    with lent(subject.planner.backend, chosen=work.acceptance is not None, observer=watching) as planner:
        planner.plan(prompts[0], max_new_tokens=min(tokens, 16))  # warm
        watching.passes.clear()
        plans = [
            s.plan for s in [planner.stream(p, max_new_tokens=tokens, caller=str(i)) for i, p in enumerate(prompts)]
        ]
    seconds = median(watching.together(lanes) or [0.0])
    each = mean(plan.tokens_per_second for plan in plans)
    made = mean(plan.accept_length for plan in plans)
    rate = made * lanes / seconds if seconds else 0.0
    rows = watching.rows(lanes)
    size = None
    if subject.costs is not None and device.bandwidth is not None:
        size = joint_bytes(subject.costs, work.context + tokens // 2, lanes, round(rows / lanes), round(made))
    return LaneLoad(lanes, rows, PassTime.of(seconds, size, device.bandwidth), made, rate, each)


def joint_bytes(costs: Costs, context: int, lanes: int, rows: int, pending: int) -> int:
    """Bytes of a joint cycle whose lanes verify ``rows`` each: weights once, state a lane."""
    verify = costs.verify(context, pending, rows)
    experts = costs.verify(context, pending, lanes * rows).experts if costs.expert_layers else 0
    passes = [replace(verify, experts=experts)] + [costs.propose(context)] * (rows > 1)
    once = sum(sum(one.weights.values()) + one.experts for one in passes)
    return once + lanes * (sum(one.total for one in passes) - once)


def company(subject: Subject, work: Workload, say: Say) -> Company:
    """One request alone, then while others come and go on the most lanes; then with deadlines."""
    lanes = max(work.lanes)
    say(f"timing one request while others come and go on {lanes} lanes")
    tokens = work.budget(subject.planner.shape.verify_rows)
    prompt = subject.prompts[0]
    with lent(subject.planner.backend, chosen=work.acceptance is not None) as planner:
        alone = [gap for _ in range(ONE_MORE) for gap in _gaps(planner, prompt, tokens)]
        with _others(planner, subject, lanes - 1, tokens):
            beside, took = [], []
            for _ in range(ONE_MORE):
                began = time.perf_counter()
                beside += _gaps(planner, prompt, tokens)
                took.append(time.perf_counter() - began)
            bound = SHARE * median(took)
            over = [_overshoot(planner, prompt, tokens, bound) for _ in range(DEADLINES)]
    return Company(lanes, *_spread(alone), *_spread(beside), len(over), 1e3 * max(over))


def _spread(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    if len(seconds) < 2:
        return 1e3 * sum(seconds), 1e3 * sum(seconds)
    points = quantiles(seconds, n=100, method="inclusive")
    return 1e3 * points[49], 1e3 * points[98]


def _gaps(planner: Planner, prompt: Sequence[int], tokens: int) -> list[float]:
    """Seconds between the increments of a request, behind its first one."""
    ends = []
    with planner.stream(prompt, max_new_tokens=tokens, caller="watched") as stream:
        for _ in stream:
            ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends)]


def _overshoot(planner: Planner, prompt: Sequence[int], tokens: int, bound: float) -> float:
    """Seconds that a request ended behind its deadline; 0 where it kept it."""
    began = time.perf_counter()
    _ = planner.plan(prompt, max_new_tokens=tokens, deadline=bound, caller="watched")
    return max(0.0, time.perf_counter() - began - bound)


@contextmanager
def _others(planner: Planner, subject: Subject, count: int, tokens: int) -> Iterator[None]:
    """So many callers meanwhile, each of whom asks for one plan after the other, of random lengths."""
    over = threading.Event()

    def caller(number: int) -> None:
        pick = random.Random(number)
        while not over.is_set():
            prompt = subject.prompts[pick.randrange(len(subject.prompts))]
            part, most = prompt[: pick.randint(1, len(prompt))], pick.randint(2, max(tokens, 2))
            planner.plan(part, max_new_tokens=most, caller=str(number))

    threads = [threading.Thread(target=caller, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
