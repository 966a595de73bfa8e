"""Tasks of the demo pair, and the two questions about an answer: is it a valid plan, and does it do the task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edge_dflash.demo.checking import goal_problems, validity_problems
from edge_dflash.demo.world import Goal, Rule, Scene, scene_from_json

MODELS = Path(__file__).with_name("models")  # checkpoints of the pair
HELDOUT = Path(__file__).with_name("heldout.jsonl")
Kind = Literal["plan", "prose"]
Message = dict[str, str]


@dataclass(frozen=True)
class Task:
    """One request and its right answer."""

    seed: int
    kind: Kind
    scene: Scene
    goal: Goal
    rules: tuple[Rule, ...]
    goal_text: str
    messages: tuple[Message, ...]
    thinking: str  # what stands in the thinking span; "" when thinking is off
    answer: str
    refusal: bool  # the goal cannot be reached


def task_from_json(value: dict[str, Any]) -> Task:
    """The task of a line of heldout.jsonl."""
    goal = value["goal"]
    return Task(
        seed=value["seed"],
        kind=value["kind"],
        scene=scene_from_json(value["scene"]),
        goal=Goal(goal["kind"], tuple(goal["things"]), goal["to"]),
        rules=tuple(value["rules"]),
        goal_text=value["goal_text"],
        messages=tuple(value["messages"]),
        thinking=value["thinking"],
        answer=value["answer"],
        refusal=value["refusal"],
    )


def check_plan(task: Task, text: str) -> list[str]:
    """Problems of ``text`` as a plan for the task: not JSON, not of the schema, names that are not in the scene."""
    return validity_problems(task.scene, text)


def check_success(task: Task, text: str) -> list[str]:
    """Why a valid plan does not do the task: a step whose precondition fails, a broken rule, a goal not reached."""
    return goal_problems(task.scene, task.goal, task.rules, task.refusal, text)
