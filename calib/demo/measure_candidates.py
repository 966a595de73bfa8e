"""Best of n candidates against one answer on the demo pair: valid plans, tasks done by simulation, cost in time.

``python -m calib.demo.measure_candidates BUNDLE`` chooses a temperature on tasks that are not held out, then answers
the held-out ones, and prints one JSON object on the last line. Seconds are wall-clock, of a machine as busy as it is.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from calib.demo.corpus import heldout_keys, make_task, task_key
from calib.demo.evaluate import BUDGET, heldout_tasks
from edge_dflash.demo.tasks import Task, check_plan, check_success
from edge_dflash.planner import Planner
from edge_dflash.result import Plan

_OTHER = 500_000  # seed of the first task that is not held out
_SWEEP = (0.2, 0.4, 0.6, 0.8)


def other_tasks(count: int) -> tuple[Task, ...]:
    """Tasks like the held-out ones, and none of them."""
    made = (make_task(_OTHER + index, plain=True) for index in range(2 * count))
    return tuple(task for task in made if task_key(task) not in heldout_keys())[:count]


def verdict(task: Task, plan: Plan) -> int:
    """0: no valid plan; 1: valid; 2: it also does the task, by simulation."""
    text = plan.text or ""
    return 0 if check_plan(task, text) else 1 if check_success(task, text) else 2


def measure(planner: Planner, tasks: Sequence[Task], n: int, temperature: float) -> dict[str, Any]:
    """One greedy answer of each task against ``n`` candidates, the best chosen in two ways."""
    verdicts: dict[str, list[int]] = {"one": [], "likeliest": [], "simulated": []}
    seconds = [0.0, 0.0]
    for task in tasks:
        began = time.perf_counter()
        one = planner.plan(task.messages, max_new_tokens=BUDGET)
        middle = time.perf_counter()
        best = planner.plan(task.messages, n=n, temperature=temperature, max_new_tokens=BUDGET)
        seconds[0] += middle - began
        seconds[1] += time.perf_counter() - middle
        verdicts["one"].append(verdict(task, one))
        verdicts["likeliest"].append(verdict(task, best))
        verdicts["simulated"].append(max(verdict(task, plan) for plan in (best, *best.alternatives)))
    shares = {
        name: {"valid": sum(found > 0 for found in all_) / len(tasks), "success": all_.count(2) / len(tasks)}
        for name, all_ in verdicts.items()
    }
    return {"temperature": temperature, "n": n, "tasks": len(tasks), **shares, "seconds": seconds}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--n", type=int, default=4, help="candidates")
    parser.add_argument("--lanes", type=int, default=4, help="sequences in one pass")
    parser.add_argument("--sweep", type=int, default=24, help="tasks on which the temperature is chosen")
    parser.add_argument("--tasks", type=int, default=64, help="how many of the held-out tasks")
    given = parser.parse_args()
    with Planner.open(given.bundle, lanes=given.lanes) as planner:
        sweep = []
        for temperature in _SWEEP:
            sweep.append(measure(planner, other_tasks(given.sweep), given.n, temperature))
            print(json.dumps(sweep[-1]))
        best = max(sweep, key=lambda found: (found["simulated"]["success"], found["likeliest"]["success"]))
        found = measure(planner, heldout_tasks()[: given.tasks], given.n, best["temperature"])
    print(json.dumps({"lanes": given.lanes, **found, "sweep": sweep}))


if __name__ == "__main__":
    main()
