"""The demo that sees: its target with a small vision tower, and tasks whose scene is a picture."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_dflash.demo.drawing import Pixels, draw
from edge_dflash.demo.tasks import MODELS, Task
from edge_dflash.weights.safetensors import INDEX, TensorFiles

TARGET, EYES = MODELS / "target", MODELS / "eyes"
PICTURED = Path(__file__).with_name("pictured.jsonl")  # held-out tasks
TOWER_FILE = "tower.safetensors"
_TARGET_FILE = "target.safetensors"


def assemble(directory: Path, eyes: Path = EYES, target: Path = TARGET) -> None:
    """Write a checkpoint of the target that sees: weights of the shipped target, everything else of its eyes.

    Files have the times of the shipped ones: a build that is begun again takes it for the same checkpoint.
    Raises OSError, and CheckpointError for damaged files.
    """
    directory.mkdir(parents=True)
    shutil.copy2(target / "model.safetensors", directory / _TARGET_FILE)
    shutil.copy2(target / "generation_config.json", directory / "generation_config.json")
    for file in eyes.iterdir():
        if file.name != "training.json":
            shutil.copy2(file, directory / file.name)
    parts = (_TARGET_FILE, TOWER_FILE)
    names = {name: part for part in parts for name in TensorFiles.open([directory / part]).names()}
    (directory / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    shutil.copystat(target / "model.safetensors", directory / INDEX)


def picture(task: Task) -> Pixels:
    """The picture of a task's scene."""
    return draw(task.scene)


def messages(task: Task) -> list[dict[str, Any]]:
    """What is asked: the picture, then the task's text."""
    (asked,) = task.messages
    parts = [{"type": "image", "image": picture(task)}, {"type": "text", "text": asked["content"]}]
    return [{"role": "user", "content": parts}]


def with_goal(task: Task, goal: str) -> Task:
    """A task in the same scene with a goal in words of one's own and no house rules."""
    return replace(task, goal_text=goal, messages=({"role": "user", "content": f"Rules: none\nGoal: {goal}"},))
