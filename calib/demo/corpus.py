"""Robot tasks and their right answers, from a seed: prompts, plans as JSON, some explanations in prose.

Task ``n`` of a split is made from its number alone. Held-out tasks and training tasks come from seed ranges that do not
meet, and a training task with the scene and goal of a held-out one is left out. Knows nothing of tokens.

``python -m calib.demo.corpus plans.jsonl`` writes training tasks as prompts for ``edge-dflash train-drafter``; with
``--answers`` also the right answers, for ``calib.finetune_target``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

from calib.demo.goals import goal_text, listing, random_goal, rules_text
from calib.demo.planning import RULES, Derivation, derive
from calib.demo.scenes import random_scene, scene_json, scene_text
from edge_dflash.demo.checking import Step
from edge_dflash.demo.tasks import Kind, Task
from edge_dflash.demo.world import Goal, Scene, subjects

Split = Literal["train", "heldout"]

PROMPTS = 30_000  # of the shipped drafter's training
HELDOUT_TASKS = 1024  # seeds 0..1023; the first 64 plan tasks are shipped
_TRAIN_BASE = 1_000_000  # seed of training task 0
MAX_STEPS = 24  # longer plans are not made: a prompt and its answer stay below 512 tokens
_SYSTEM = (
    "You are the planner of a service robot. Answer with one JSON plan.",
    "You plan for a mobile robot with two arms.",
    "You are a careful household robot.",
)
_ASK_PLAN = ("", "", "Answer with a JSON plan.", "Give the plan as JSON.")
_ASK_PROSE = ("Explain in words how you would do it.", "Do not give JSON: tell me in plain words what you would do.")


def task_key(task: Task) -> str:
    """Equal for tasks of equal scene and goal."""
    return json.dumps([scene_json(task.scene), task.goal.kind, task.goal.things, task.goal.to])


def task_json(task: Task) -> dict[str, Any]:
    """A JSON object that :func:`~edge_dflash.demo.tasks.task_from_json` reads."""
    return {
        "seed": task.seed,
        "kind": task.kind,
        "messages": list(task.messages),
        "scene": scene_json(task.scene),
        "goal": {"kind": task.goal.kind, "things": list(task.goal.things), "to": task.goal.to},
        "rules": list(task.rules),
        "goal_text": task.goal_text,
        "thinking": task.thinking,
        "answer": task.answer,
        "refusal": task.refusal,
    }


def make_task(seed: int, *, plain: bool = False) -> Task:
    """The task of a seed: about 1 in 10 asks for prose, 1 in 10 has a thinking span; ``plain``: neither."""
    rng = Random(seed)
    while True:
        scene = random_scene(rng)
        goal = random_goal(rng, scene)
        if goal is None:
            continue
        drawn = rng.sample(RULES, rng.choice((0, 0, 1, 1, 2)))
        rules = tuple(rule for rule in RULES if rule in drawn)
        derivation = derive(scene, goal, rules)
        if 1 <= len(derivation.steps) <= MAX_STEPS:
            break
    wording = goal_text(rng, scene, goal)
    kind: Kind = "prose" if rng.random() < 0.1 and not plain else "plan"
    thinks = rng.random() < 0.1 and not plain
    system = rng.choice(_SYSTEM) if rng.random() < 0.25 else ""
    ask = rng.choice(_ASK_PROSE if kind == "prose" else _ASK_PLAN)
    content = f"{scene_text(scene)}\n{rules_text(rules)}\nGoal: {wording}" + (f"\n{ask}" if ask else "")
    messages = ({"role": "system", "content": system},) if system else ()
    return Task(
        seed=seed,
        kind=kind,
        scene=scene,
        goal=goal,
        rules=rules,
        goal_text=wording,
        messages=(*messages, {"role": "user", "content": content}),
        thinking=_thinking(scene, goal, derivation) if thinks else "",
        answer=_prose(derivation) if kind == "prose" else plan_json(wording, derivation),
        refusal=derivation.refused,
    )


@cache
def heldout_keys() -> frozenset[str]:
    """Keys of all held-out tasks."""
    return frozenset(task_key(make_task(seed, plain=plain)) for seed in range(HELDOUT_TASKS) for plain in (True, False))


def tasks(split: Split, start: int, count: int, *, exclude: frozenset[str] = frozenset()) -> Iterator[Task]:
    """Tasks ``start`` .. ``start + count - 1`` of a split, without those whose key is in ``exclude``.

    Held-out tasks all ask for a plan without thinking, as the runtime does by default.
    """
    for index in range(start, start + count):
        task = make_task(index, plain=True) if split == "heldout" else make_task(_TRAIN_BASE + index)
        if task_key(task) not in exclude:
            yield task


def plan_json(goal: str, derivation: Derivation) -> str:
    """The answer: compact JSON of a plan."""
    plan = {"goal": goal, "steps": list(derivation.steps), "notes": " ".join(derivation.notes)}
    return json.dumps(plan, separators=(",", ":"))


def _thinking(scene: Scene, goal: Goal, derivation: Derivation) -> str:
    names = subjects(scene, goal)
    known = {t.name: t.place for t in scene.things}
    lines = [f"I need {listing(names)}." if names else "Nothing to do."]
    lines += [f"{name} is at {known[name]}." if name in known else f"{name}: look." for name in names]
    return " ".join((*lines, *derivation.notes, f"{len(derivation.steps)} steps."))


_PHRASES = {
    "navigate": "I go to {to}",
    "open": "I open {target}",
    "close": "I close {target}",
    "unlock": "I unlock {target} with {with}",
    "pick": "I take {object} with grip {grip}",
    "place": "I put {object} down at {to}",
    "handover": "I give {object} to {to}",
    "inspect": "I inspect {target}",
    "wait": "I wait {seconds} seconds",
    "say": 'I say "{text}"',
}


def _phrase(step: Step) -> str:
    return _PHRASES[step["action"]].format(**step)


def _prose(derivation: Derivation) -> str:
    first, *rest = [_phrase(step) for step in derivation.steps]
    return " ".join((f"First {first}.", *(f"Then {phrase}." for phrase in rest), *derivation.notes))


def write_prompts(output: Path, count: int, *, answers: bool = False) -> int:
    """Write the first ``count`` training tasks as prompts, one JSON object a line; how many were not left out."""
    asked = [
        {
            "messages": list(task.messages),
            **({"thinking": True} if task.thinking else {}),
            **({"answer": task.answer} if answers else {}),
        }
        for task in tasks("train", 0, count, exclude=heldout_keys())
    ]
    output.write_text("".join(json.dumps(one) + "\n" for one in asked), encoding="utf-8")
    return len(asked)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tasks", type=int, default=PROMPTS)
    parser.add_argument("--answers", action="store_true", help="with the right answers")
    given = parser.parse_args()
    prompts = write_prompts(given.output, given.tasks, answers=given.answers)
    print(json.dumps({"output": str(given.output), "prompts": prompts}))


if __name__ == "__main__":
    main()
