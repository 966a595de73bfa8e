"""Accept length of a bundle on a file of tasks, greedy and sampled, with the tasks' schemas and without.

``python -m calib.measure_acceptance BUNDLE FILE`` prints one JSON line. FILE has a JSON object a line, as training data
of a drafter has: ``messages`` or ``prompt``, perhaps a ``schema``; a line that a crash tore is left out. With
``--plain N`` the first N answers of each way are decoded again without the drafter and compared, token by token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from calib.demo.accepting import accepted
from edge_dflash.decode.options import PlanOptions
from edge_dflash.planner import Planner

WAYS = {"greedy": 0.0, "sampled": 0.7}  # temperature


def read_tasks(path: Path, most: int) -> list[dict[str, Any]]:
    """The first ``most`` tasks of a file."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            with suppress(ValueError):
                found.append(json.loads(line))
            if len(found) == most:
                break
    return found


def measure(
    planner: Planner, tasks: Sequence[dict[str, Any]], *, new_tokens: int, plain: int = 0, schema: bool = False
) -> dict[str, Any]:
    """Figures of both ways; ``schema``: answers are of the tasks' schemas, where they have one."""
    figures: dict[str, Any] = {}
    for way, temperature in WAYS.items():
        lengths, tokens, seconds, same = [], 0, 0.0, 0
        for index, task in enumerate(tasks):
            options = PlanOptions(max_new_tokens=new_tokens, temperature=temperature, seed=index)
            if schema and "schema" in task:
                options["schema"] = task["schema"]
            asked = task.get("messages", task.get("prompt"))
            plan = planner.plan(asked, **options)
            lengths.append(plan.accept_lengths)
            tokens, seconds = tokens + len(plan.tokens), seconds + plan.timings.decode_seconds
            if index < plain:
                same += planner.plan(asked, speculative=False, **options).tokens == plan.tokens
        found = accepted(lengths)
        figures[way] = {
            "accept_length": round(found.mean, 4),
            "acceptance": [round(share, 4) for share in found.by_position],
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
            **({"equal_to_plain": same, "compared": min(plain, len(tasks))} if plain else {}),
        }
    return figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--tasks", type=int, default=200, help="at most (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=192, help="of an answer, at most (default: %(default)s)")
    parser.add_argument("--plain", type=int, default=0, help="answers that are compared with plain decoding")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU, for the reference backend; 0: torch's own")
    given = parser.parse_args()
    if given.threads:
        import torch

        torch.set_num_threads(given.threads)
    tasks = read_tasks(given.file, given.tasks)
    with Planner.open(given.bundle, fallback=False, self_test="off") as planner:  # accept lengths of all drafts
        ways = {"free": False} | ({"schema": True} if any("schema" in task for task in tasks) else {})
        found = {
            name: measure(planner, tasks, new_tokens=given.new_tokens, plain=given.plain, schema=schema)
            for name, schema in ways.items()
        }
    print(json.dumps({"bundle": given.bundle.name, "file": given.file.name, "tasks": len(tasks), **found}))


if __name__ == "__main__":
    main()
