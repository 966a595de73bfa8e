"""Accept length of a bundle on a file of tasks, greedy and sampled, with the tasks' schemas and without.

``python -m calib.measure_acceptance BUNDLE FILE`` prints one JSON line. FILE is as training data of a drafter
(:mod:`edge_dflash.training.data`). With ``--plain N`` the first N answers of each way are decoded again without the
drafter and compared, token by token.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from edge_dflash.planner import Planner
from edge_dflash.training.data import read_tasks
from edge_dflash.training.evaluate import evaluate


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
    tasks = read_tasks(given.file, most=given.tasks).tasks
    with Planner.open(given.bundle, fallback=False, self_test="off") as planner:
        found = evaluate(planner, tasks, new_tokens=given.new_tokens, plain=given.plain)
    body = {"bundle": given.bundle.name, "file": given.file.name, "tasks": len(tasks)}
    print(json.dumps(body | {way: asdict(one) for way, one in found.items()}))


if __name__ == "__main__":
    main()
