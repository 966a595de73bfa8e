"""Sets of prompts: JSONL files, and what is taken when none is given."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from edge_dflash.errors import ContextError, RequestError
from edge_dflash.planner import Planner, Task
from edge_dflash.resources import directory

KEYS = ("ids", "messages", "text")
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 12  # for a bundle without tokenizer


def read_prompts(path: Path) -> list[Task]:
    """Tasks of a JSONL file; each line has one of ``KEYS``, other keys are ignored.

    Raises RequestError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a JSONL file of prompts") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text (byte {error.start}); convert it") from None
    tasks = [_task(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise RequestError(f"{path} holds no prompts; give one JSON object a line")
    return tasks


def default_prompts(planner: Planner, max_new_tokens: int) -> list[Task]:
    """The calibration prompts that fit; pseudo-random ids, always the same, for a bundle without tokenizer."""
    if planner.tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, planner.shape.vocab_size, RANDOM_TOKENS).tolist() for _ in range(RANDOM_PROMPTS)]
    room = planner.shape.usable_context - max_new_tokens
    tasks = read_prompts(directory("calib") / "robot_planning.jsonl")
    fitting = [task for task in tasks if len(planner.encode(task)) <= room]
    if not fitting:
        raise ContextError(
            f"no calibration prompt and {max_new_tokens} new tokens fit the usable context of "
            f"{planner.shape.usable_context} tokens; give shorter ones with --prompts"
        )
    return fitting


def _task(line: str, where: str) -> Task:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{where} is not JSON; give one object a line") from None
    given = [key for key in KEYS if isinstance(value, dict) and key in value]
    if len(given) != 1:
        raise RequestError(f"{where} needs exactly one of the keys {', '.join(KEYS)}")
    task: Task = value[given[0]]
    if not isinstance(task, str if given[0] == "text" else list):
        raise RequestError(
            f"{where}: {given[0]} is of the wrong type; give a string as text, a list as messages or ids"
        )
    return task
