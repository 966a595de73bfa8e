"""Calibration prompts: the JSONL files of ``calib/`` to token ids. No torch, no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_dflash.common.files import LARGE, read_text
from edge_dflash.errors import BuildError

KEYS = ("id", "source", "licence", "messages")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class CalibrationPrompt:
    """One conversation of a calibration set."""

    id: str
    source: str
    licence: str
    messages: tuple[Mapping[str, str], ...]  # {"role": system | user | assistant, "content": text}


def read_prompts(path: Path) -> tuple[CalibrationPrompt, ...]:
    """Read every line of a prompt file. Raises BuildError naming file, line, what was found and what is wanted."""
    try:
        lines = read_text(path, LARGE).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(
            f"{path}: not a readable text file ({getattr(error, 'strerror', error)}); see calib/README.md"
        ) from error
    prompts = tuple(_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not prompts:
        raise BuildError(f"{path} holds no prompt; wanted one JSON object a line, see calib/README.md")
    return prompts


def calibration_ids(
    prompts: Sequence[CalibrationPrompt],
    encode_chat: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
    tokens: int,
) -> tuple[int, ...]:
    """Concatenate the prompts' ids, in file order, up to ``tokens`` ids. ``encode_chat`` applies the chat template."""
    ids: list[int] = []
    for prompt in prompts:
        ids.extend(encode_chat(prompt.messages))
        if len(ids) >= tokens:
            break
    return tuple(ids[:tokens])


def _prompt(line: str, where: str) -> CalibrationPrompt:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not JSON ({error}); see calib/README.md") from error
    if not isinstance(value, dict) or sorted(value) != sorted(KEYS):
        found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
        raise BuildError(f"{where}: found {found or 'no key'}; wanted an object with exactly {', '.join(KEYS)}")
    messages = value["messages"]
    if not all(isinstance(value[key], str) and value[key] for key in KEYS[:3]):
        raise BuildError(f"{where}: id, source and licence are {[value[k] for k in KEYS[:3]]}; wanted text")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BuildError(
            f"{where}: messages are not a list of {{role: {' | '.join(ROLES)}, content: text}}; correct it"
        )
    return CalibrationPrompt(value["id"], value["source"], value["licence"], tuple(messages))


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and sorted(message) == ["content", "role"]
        and message["role"] in ROLES
        and isinstance(message["content"], str)
        and bool(message["content"])
    )
