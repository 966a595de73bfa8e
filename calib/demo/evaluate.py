"""Quality of a bundle of the demo pair on held-out tasks: valid plans, tasks done, accept length, speed.

``python -m calib.demo.evaluate BUNDLE`` prints a line for each task and one JSON object on the last line; with
``--pictures`` the tasks are those of a bundle that sees, each beside a picture of its scene. Any function from messages
to an answer can be judged in the same way. Knows the runtime only as a Planner.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calib.demo.pictured import heldout
from edge_dflash.demo.tasks import HELDOUT, Task, check_plan, check_success, messages, task_from_json
from edge_dflash.planner import Planner
from edge_dflash.training.evaluate import accepted

BUDGET = 448  # new tokens; the longest right answer to a held-out task has 294


@dataclass(frozen=True)
class Answer:
    """What a model said to a task."""

    text: str
    accept_lengths: tuple[int, ...] = ()  # tokens committed by each verify; empty when unknown


@dataclass(frozen=True)
class Quality:
    """The figures over all tasks."""

    tasks: int
    valid: float  # fraction of plans of the schema whose names are in the scene
    success: float  # fraction that also does the task, by simulation
    equal: float  # fraction that equals the corpus's answer
    accept_length: float  # mean over all verifies, bonus token included; 0 when unknown
    acceptance: tuple[float, ...]  # share of drafts accepted at each position of a block
    seconds: float


Asked = Sequence[Mapping[str, Any]]  # messages
Generate = Callable[[Asked], Answer]


def heldout_tasks(path: Path = HELDOUT) -> tuple[Task, ...]:
    """The shipped held-out tasks."""
    return tuple(task_from_json(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def _as_text(task: Task) -> Asked:
    return task.messages


def evaluate(
    generate: Generate,
    tasks: Iterable[Task],
    log: Callable[[str], None] = print,
    ask: Callable[[Task], Asked] = _as_text,
) -> Quality:
    """Answer every task and judge the answers; ``log`` gets a line for each task, ``ask`` makes its messages."""
    began = time.perf_counter()
    count = valid = success = equal = 0
    committed = []
    for task in tasks:
        answer = generate(ask(task))
        problems = check_plan(task, answer.text)
        unmet = [] if problems else check_success(task, answer.text)
        count += 1
        valid += not problems
        success += not problems and not unmet
        equal += answer.text == task.answer
        committed.append(answer.accept_lengths)
        verdict = "invalid: " + problems[0] if problems else "misses: " + unmet[0] if unmet else "done"
        log(f"{task.seed:4} {task.goal_text} -> {verdict}")
    found = accepted(committed)
    return Quality(
        tasks=count,
        valid=valid / max(count, 1),
        success=success / max(count, 1),
        equal=equal / max(count, 1),
        accept_length=found.mean,
        acceptance=found.by_position,
        seconds=time.perf_counter() - began,
    )


def planner_generate(planner: Planner, *, speculative: bool = True) -> Generate:
    """The answers of an open bundle."""

    def generate(asked: Asked) -> Answer:
        plan = planner.plan(list(asked), max_new_tokens=BUDGET, speculative=speculative)
        return Answer(plan.text or "", plan.accept_lengths)

    return generate


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tasks", type=int, default=64, help="how many of the held-out tasks")
    parser.add_argument("--pictures", action="store_true", help="tasks beside pictures, as many as wanted")
    parser.add_argument("--plain", action="store_true", help="decode without the drafter")
    given = parser.parse_args()
    with Planner.open(given.bundle, fallback=False) as planner:  # accept lengths of all drafts
        generate = planner_generate(planner, speculative=not given.plain)
        if given.pictures:
            quality = evaluate(generate, heldout(given.tasks), ask=messages)
        else:
            quality = evaluate(generate, heldout_tasks()[: given.tasks])
    print(json.dumps({"bundle": str(given.bundle), "speculative": not given.plain, **asdict(quality)}))


if __name__ == "__main__":
    main()
