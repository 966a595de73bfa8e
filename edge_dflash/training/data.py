"""Prompts to train a drafter on: one JSON object a line, as ``record`` writes them or anybody else.

Keys of a line: ``messages``, or ``prompt`` with an optional ``raw``; what shapes the answer (``schema``, ``regex``,
``grammar``, ``whitespace``, ``tools``, ``tool_choice``, ``thinking``); perhaps the ``answer``. Other keys mean nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_dflash.errors import RequestError
from edge_dflash.text.images import is_image
from edge_dflash.text.template import Message

SHAPING = ("schema", "regex", "grammar", "whitespace", "tools", "tool_choice", "thinking")
HELDOUT, SHARE = 200, 10  # prompts that are held out at most; one of so many
MOST_LINE = 16 << 20  # bytes


@dataclass(frozen=True)
class TrainingTask:
    """A prompt, and what shapes its answer."""

    index: int  # of its line, from 0
    asked: list[Message] | str
    raw: bool = False  # a text that is used as it is
    options: dict[str, Any] = field(default_factory=dict)  # keywords of a request
    answer: str | None = None  # None: the target gives it
    heldout: bool = False


@dataclass(frozen=True)
class TrainingData:
    """The tasks of a file."""

    path: Path
    sha256: str  # of the file
    tasks: tuple[TrainingTask, ...]
    skipped: int  # lines with images, and one that a crash tore at the end

    @property
    def training(self) -> tuple[TrainingTask, ...]:
        """Tasks to train on."""
        return tuple(task for task in self.tasks if not task.heldout)

    @property
    def heldout(self) -> tuple[TrainingTask, ...]:
        """Tasks that no training sees."""
        return tuple(task for task in self.tasks if task.heldout)


def read_data(path: Path, *, heldout: int | None = None, most: int | None = None) -> TrainingData:
    """Read the first ``most`` tasks of a file, and hold out ``heldout`` of its prompts (None: a tenth, at most 200).

    A prompt's hash decides, so one that is there twice is never on both sides, and the order of lines does not matter.
    Raises RequestError, naming the line, for what is no task, and for fewer than two prompts.
    """
    digest, tasks, skipped = hashlib.sha256(), list[TrainingTask](), 0
    for index, line, torn in _lines(path, digest):
        if most is not None and len(tasks) >= most:
            continue  # the hash is of the whole file
        task = _task(path, index, line, torn=torn)
        if task is None:
            skipped += 1
        else:
            tasks.append(task)
    keys = [_key(task) for task in tasks]
    unique = sorted(set(keys))
    if len(unique) < 2:
        raise RequestError(f"{path} has {len(unique)} different prompts; give at least 2: some are held out")
    count = min(HELDOUT, max(1, len(unique) // SHARE)) if heldout is None else heldout
    if not 0 < count < len(unique):
        raise RequestError(f"{count} of {len(unique)} prompts are to be held out; give 1 to {len(unique) - 1}")
    out = set(unique[:count])
    marked = (
        TrainingTask(task.index, task.asked, task.raw, task.options, task.answer, key in out)
        for task, key in zip(tasks, keys, strict=True)
    )
    return TrainingData(path, digest.hexdigest(), tuple(marked), skipped)


def _lines(path: Path, digest: Any) -> Iterator[tuple[int, bytes, bool]]:
    """Lines that are not empty, by their number from 0, and whether they lack their end."""
    try:
        with path.open("rb") as file:
            for index, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b"")):
                if len(line) > MOST_LINE:
                    raise RequestError(
                        f"{path}: line {index + 1} has more than {MOST_LINE >> 20} MB; give shorter ones"
                    )
                digest.update(line)
                if line.strip():
                    yield index, line, not line.endswith(b"\n")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; give a file of one JSON object a line") from None


def _task(path: Path, index: int, line: bytes, *, torn: bool) -> TrainingTask | None:
    """The task of a line; None for one that is left out."""
    where = f"{path}: line {index + 1}"
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        if torn:
            return None
        raise RequestError(f"{where} is not JSON ({error}); correct or remove it") from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise RequestError(f"{where} needs either messages or prompt; correct or remove it")
    asked, raw = body.get("messages", body.get("prompt")), bool(body.get("raw", False))
    if "messages" in body:
        if not isinstance(asked, list) or not asked or not all(isinstance(message, dict) for message in asked):
            raise RequestError(f"{where}: messages is no list of messages; correct or remove it")
        if any(is_image(part) for message in asked for part in _parts(message)):
            return None
    elif not isinstance(asked, str) or not asked:
        raise RequestError(f"{where}: prompt is no text; correct or remove it")
    given = body.get("answer")
    if given is not None and not isinstance(given, str):
        raise RequestError(f"{where}: answer is {type(given).__name__}, wanted text; correct or remove it")
    whole = given if given and not body.get("reasoning") and not body.get("tool_calls") else None
    options = {name: body[name] for name in SHAPING if body.get(name) is not None}
    return TrainingTask(index, asked, raw and isinstance(asked, str), options, whole)


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _key(task: TrainingTask) -> str:
    return hashlib.sha256(json.dumps(task.asked, sort_keys=True, default=str).encode()).hexdigest()
