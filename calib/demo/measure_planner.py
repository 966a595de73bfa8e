"""Figures of the planner on a bundle of the demo pair: plans of a form, masks beside verifies, deadlines kept.

``python -m calib.demo.measure_planner BUNDLE`` prints one JSON object on the last line. Everything is measured on
this machine, as busy as it is: a deadline is missed by the pauses of the process as well as by the planner.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np

from calib.demo.evaluate import BUDGET, heldout_tasks
from edge_dflash.decode.backend import Rows
from edge_dflash.decode.grammar.compiled import Grammar, GrammarConstraint
from edge_dflash.decode.sampling import Packed
from edge_dflash.decode.steering import Ask
from edge_dflash.demo.checking import known_names, plan_schema, schema_problems
from edge_dflash.demo.tasks import Task, check_plan
from edge_dflash.demo.world import Scene
from edge_dflash.planner import Planner
from edge_dflash.result import Plan

P = ParamSpec("P")
R = TypeVar("R")


class Timed:
    """A constraint that adds up the seconds spent in it, waiting for its process and asking the drafter once more."""

    seconds = 0.0

    def __init__(self, inner: GrammarConstraint) -> None:
        """Time ``inner``."""
        self._inner = inner

    def amend(self, free: Sequence[int], ask: Ask) -> list[int]:
        """See Constraint."""
        return self._timed(self._inner.amend, free, ask)

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """See Constraint."""
        return self._timed(self._inner.masks, drafts)

    def advance(self, tokens: Sequence[int]) -> None:
        """See Constraint."""
        self._timed(self._inner.advance, tokens)

    def _timed(self, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        began = time.perf_counter()
        try:
            return function(*arguments, **keywords)
        finally:
            Timed.seconds += time.perf_counter() - began


def scene_schema(scene: Scene) -> dict[str, Any]:
    """JSON Schema of the plans that are valid in ``scene``: the plan schema with the scene's own names.

    An action without any name for one of its arguments is left out.
    """
    names, schema = known_names(scene), plan_schema()
    items = schema["properties"]["steps"]["items"]
    choices, items["oneOf"] = items["oneOf"], []
    for choice in choices:
        arguments = choice["properties"]
        found = {key: names.get((arguments["action"]["const"], key)) for key in arguments}
        if set() not in found.values():
            bound = {key: {"enum": sorted(allowed)} for key, allowed in found.items() if allowed}
            items["oneOf"].append({**choice, "properties": arguments | bound})
    return schema


def measure_form(planner: Planner, tasks: Sequence[Task]) -> dict[str, Any]:
    """The tasks with and without the schema of plans."""
    schema = plan_schema()
    verifies: list[float] = []
    backend = planner.backend
    verify = backend.verify

    def timed_verify(ids: Sequence[int], lane: int) -> Rows:
        began = time.perf_counter()
        rows = verify(ids, lane)
        verifies.append(time.perf_counter() - began)
        return rows

    with patch.object(backend, "verify", timed_verify):
        free = [planner.plan(task.messages, max_new_tokens=BUDGET) for task in tasks]
    original, Timed.seconds = Grammar.constraint, 0.0
    with patch.object(Grammar, "constraint", lambda *arguments: Timed(original(*arguments))):
        bound = [planner.plan(task.messages, max_new_tokens=BUDGET, schema=schema) for task in tasks]
        in_scene = [planner.plan(t.messages, max_new_tokens=BUDGET, schema=scene_schema(t.scene)) for t in tasks]
    plain = [planner.plan(t.messages, max_new_tokens=BUDGET, schema=schema, speculative=False) for t in tasks[:8]]
    cycles = sum(len(plan.accept_lengths) for plan in bound + in_scene)
    mask = Timed.seconds / cycles
    return {
        "tasks": len(tasks),
        "constrained_of_schema": _share(not schema_problems(plan.object, schema) for plan in bound),
        "constrained_valid_in_scene": _share(
            not check_plan(t, p.text or "") for t, p in zip(tasks, bound, strict=True)
        ),
        "scene_schema_valid_in_scene": _share(
            not check_plan(t, p.text or "") for t, p in zip(tasks, in_scene, strict=True)
        ),
        "scene_schema_accept_length": accept_length(in_scene),
        "free_valid_in_scene": _share(not check_plan(t, p.text or "") for t, p in zip(tasks, free, strict=True)),
        "constrained_equal_to_free": _share(a.tokens == b.tokens for a, b in zip(free, bound, strict=True)),
        "plain_equal": _share(a.tokens == b.tokens for a, b in zip(plain, bound, strict=False)),
        "accept_length_free": accept_length(free),
        "accept_length_constrained": accept_length(bound),
        "grammar_ms_per_cycle": 1e3 * mask,
        "verify_ms": 1e3 * statistics.mean(verifies),
        "cycle_ms": 1e3 * sum(plan.timings.decode_seconds for plan in bound + in_scene) / cycles,
        "free_cycle_ms": 1e3 * sum(p.timings.decode_seconds for p in free) / sum(len(p.accept_lengths) for p in free),
    }


def measure_deadlines(planner: Planner, tasks: Sequence[Task], count: int) -> dict[str, Any]:
    """Deadlines spread over 0.2 to 3 times the time that a task takes without one; overshoot in its mean cycles."""
    natural = []
    for task in tasks:
        plan = planner.plan(task.messages, max_new_tokens=BUDGET)
        cycle = plan.timings.decode_seconds / max(len(plan.accept_lengths), 1)
        natural.append((task, plan.timings.total_seconds, cycle, plan.tokens))
    overshoot, reasons, wrong = [], [], 0
    for index, share in enumerate(np.linspace(0.2, 3.0, count)):
        task, seconds, cycle, tokens = natural[index % len(natural)]
        plan = planner.plan(task.messages, max_new_tokens=BUDGET, deadline=float(share) * seconds)
        overshoot.append(max(plan.timings.total_seconds - float(share) * seconds, 0.0) / cycle)
        reasons.append(plan.finish_reason)
        wrong += plan.tokens != tokens[: len(plan.tokens)]
    return {
        "deadlines": count,
        "ended_by_deadline": reasons.count("deadline"),
        "missed": int(sum(cycles > 0 for cycles in overshoot)),
        "overshoot_cycles_p50": float(np.percentile(overshoot, 50)),
        "overshoot_cycles_p99": float(np.percentile(overshoot, 99)),
        "overshoot_cycles_max": float(max(overshoot)),
        "not_a_prefix_of_the_whole": wrong,
        "natural_seconds": statistics.mean(seconds for _, seconds, _, _ in natural),
    }


def accept_length(plans: Sequence[Plan]) -> float:
    """Mean over all verifies."""
    lengths = [length for plan in plans for length in plan.accept_lengths]
    return sum(lengths) / max(len(lengths), 1)


def _share(flags: Iterable[bool]) -> float:
    found = list(flags)
    return float(sum(found)) / max(len(found), 1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", type=int, default=64, help="how many of the held-out tasks")
    parser.add_argument("--deadlines", type=int, default=200)
    given = parser.parse_args()
    tasks = heldout_tasks()[: given.tasks]
    with Planner.open(given.bundle) as planner:
        result = measure_form(planner, tasks) | measure_deadlines(planner, tasks[:8], given.deadlines)
    print(json.dumps({"bundle": str(given.bundle), **result}))


if __name__ == "__main__":
    main()
