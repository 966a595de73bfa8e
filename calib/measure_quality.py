"""Roundings of the demo target and of fine-tunes of it, side by side: KLD, bytes, accept length, valid plans.

``python -m calib.measure_quality OUT TARGET...`` builds a bundle for each target and way into OUT, measures it
against the target on 64 held-out tasks with their right answers, plans the same tasks, and prints a line of JSON for
each, and a table at the end. A target whose name begins with "harbour" has the tasks of calib/harbour.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from calib.demo.corpus import tasks as demo_tasks
from calib.demo.evaluate import Answer, heldout_tasks, planner_generate
from calib.harbour import harbour_tasks, order_problems, right_answer
from edge_dflash.bundle.reader import Bundle
from edge_dflash.demo.tasks import MODELS, check_plan
from edge_dflash.planner import Planner
from edge_dflash.quality.bundle import SourceModel
from edge_dflash.quality.compare import figures as of_tokens
from edge_dflash.quality.measure import ALL, Run, Stores
from edge_dflash.quality.report import Figures
from edge_dflash.quality.stream import Passes, Variant
from edge_dflash.quality.texts import make_texts, parse_tasks
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.training.evaluate import accepted

TASKS, CALIBRATION = 64, 40  # prompts that are measured on, and that the own calibration has
WAYS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {  # keys of the recipe, options of the build
    "max / 6": ({"rounding": "max"}, ()),
    "search": ({"rounding": "search"}, ()),
    "search, own prompts": ({"rounding": "search", "calibration": {"file": "own.jsonl"}}, ()),
    "compensated": ({"rounding": "compensated"}, ()),
    "compensated, own prompts": ({"rounding": "compensated", "calibration": {"file": "own.jsonl"}}, ()),
    "mixed, half the KLD": ({"rounding": "search"}, ("--quality-target", "half")),
    "mixed, a fifth": ({"rounding": "search"}, ("--quality-target", "fifth")),
}


@dataclass(frozen=True)
class Asked:
    """A task, its right answer, and what is wrong with an answer."""

    messages: list[dict[str, str]]
    answer: str
    problems: Any  # text -> list of problems

    def line(self) -> str:
        """Of a prompt file: the conversation with its answer."""
        return json.dumps({"messages": [*self.messages, {"role": "assistant", "content": self.answer}]}) + "\n"


def asked(target: Path) -> list[Asked]:
    """Held-out tasks of the world that a target was made for."""
    if target.name.startswith("harbour"):
        return [
            Asked(list(task.messages), right_answer(task), lambda text, task=task: order_problems(task, text))
            for task in harbour_tasks("heldout", TASKS)
        ]
    found = heldout_tasks()[:TASKS]
    return [Asked(list(t.messages), t.answer, lambda text, t=t: check_plan(t, text)) for t in found]


def calibration_lines(target: Path) -> list[str]:
    """Prompts of the training world, as a calibration file has them."""
    if target.name.startswith("harbour"):
        found = [(list(task.messages), right_answer(task)) for task in harbour_tasks("train", CALIBRATION)]
    else:
        found = [(list(task.messages), task.answer) for task in demo_tasks("train", 0, CALIBRATION)]
    return [
        json.dumps({"id": str(i), "source": "calib", "licence": "Apache-2.0"} | json.loads(Asked(*one, None).line()))
        for i, one in enumerate(found)
    ]


def edge_dflash(*words: object) -> dict[str, Any]:
    """The JSON that a command prints."""
    command = [sys.executable, "-m", "edge_dflash", *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def figures(bundle: Path, target: Path, tasks: Sequence[Asked]) -> Figures:
    """Weights and KV cache of a bundle against the target, over all prompts and their right answers."""
    opened = Bundle.open(bundle)
    source, pair = SourceModel.open(target, opened.pair), opened.pair
    prompts = [parse_tasks(task.line(), "tasks")[0] for task in tasks]
    tokenizer = Tokenizer.open(bundle / "tokenizer")
    texts = make_texts(prompts, tokenizer, pair.target.vocab_size, 1 << 20, None)
    passes = Passes.of(pair)
    states = {name for names in passes.units.values() for name in names}
    stores, ids = Stores(source.store, opened, opened.manifest.precision.kv), [text.ids for text in texts]
    everything = {ALL: Variant(passes.weights | states, sum(map(len, ids)))}
    return of_tokens(Run(passes, stores, ids, everything).compared()[ALL])


def measured(
    target: Path, way: str, folder: Path, tasks: Sequence[Asked], plans: int, before: float | None
) -> dict[str, Any]:
    """Build, measure, plan some tasks. ``before``: mean KLD of the search, of which targets of mixes are shares."""
    keys, options = WAYS[way]
    folder.mkdir(parents=True)
    recipe = yaml.safe_load((Path("engines") / "demo-cpu.yaml").read_text()) | keys
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "own.jsonl").write_text("\n".join(calibration_lines(target)) + "\n")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(task.line() for task in tasks))
    shares = {"half": 0.5, "fifth": 0.2}
    words = [str((before or 0.0) * shares[word]) if word in shares else word for word in options]
    words += ["--prompts", str(prompts)] if words else []
    bundle = folder / "bundle"
    pair = ("--target", target, "--drafter", MODELS / "drafter", "--arch", "cpu", "--recipe", folder / "recipe.yaml")
    edge_dflash("build", *pair, "--output", bundle, *words)
    quality = figures(bundle, target, tasks)
    with Planner.open(bundle, fallback=False) as planner:
        generate, answers = planner_generate(planner), list[Answer]()
        answers += (generate(task.messages) for task in tasks[:plans])
    return {
        "target": target.name,
        "way": way,
        "kld": asdict(quality.kld),
        "top1": quality.top1,
        "tokens": quality.tokens,
        "cycle_bytes": edge_dflash("inspect", bundle)["cycle_bytes"],
        "accept_length": accepted([one.accept_lengths for one in answers]).mean,
        "valid": sum(not task.problems(one.text) for task, one in zip(tasks, answers, strict=False)),
        "tasks": len(answers),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("targets", type=Path, nargs="+")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--plans", type=int, default=TASKS, metavar="N", help="tasks that are planned; default: all")
    given = parser.parse_args()
    rows = []
    for target in given.targets:
        tasks, search = asked(target), None
        for index, way in enumerate(given.ways):
            row = measured(target, way, given.output / f"{target.name}-{index}", tasks, given.plans, search)
            search = row["kld"]["mean"] if way == "search" else search
            print(json.dumps(row), flush=True)
            rows.append(row)
    print("\n| target | rounding | KLD mean | p99 | top-1 | MB a cycle | accept length | valid |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        kld = row["kld"]
        print(
            f"| {row['target']} | {row['way']} | {kld['mean']:.5f} | {kld['p99']:.4f} | {row['top1']:.4f} "
            f"| {row['cycle_bytes'] / 1e6:.2f} | {row['accept_length']:.2f} | {row['valid']} of {row['tasks']} |"
        )


if __name__ == "__main__":
    main()
