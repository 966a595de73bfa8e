"""Prompts to train a drafter on: one JSON object a line, as ``record`` writes them or anybody else.

Keys of a line: ``messages``, or ``prompt`` with an optional ``raw``; what shapes the answer (``schema``, ``regex``,
``grammar``, ``whitespace``, ``tools``, ``tool_choice``, ``thinking``); perhaps the ``answer``, with a ``finish_reason``
other than "stop" where it was cut. An answer with thinking or tool calls is not used: its text is not all of it. Other
keys mean nothing, and are named: one may be misspelt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edge_dflash.common.nested import as_json
from edge_dflash.common.rules import checked
from edge_dflash.decode.options import RULES, Options
from edge_dflash.errors import RequestError
from edge_dflash.text.images import is_image
from edge_dflash.text.prompt import as_messages
from edge_dflash.text.template import Message

SHAPING = ("schema", "regex", "grammar", "whitespace", "tools", "tool_choice", "thinking")
KEYS = ("messages", "prompt", "raw", *SHAPING, "answer", "finish_reason", "stop", "reasoning", "tool_calls")
MEANINGLESS = ("accept_length", "id", "source", "licence", "seed", "temperature", "top_k", "top_p")  # of other files
HELDOUT, SHARE = 200, 10  # prompts that are held out at most; one of so many
MOST_LINE = 16 << 20  # bytes
_FLAGS = {name: as_json(RULES[name]) for name in ("whitespace", "thinking", "raw")}  # said in JSON's words


@dataclass(frozen=True)
class TrainingTask:
    """A prompt, and what shapes its answer."""

    index: int  # of its line, from 0
    asked: list[Message] | str
    raw: bool = False  # a text that is used as it is
    options: dict[str, Any] = field(default_factory=dict)  # keywords of a request
    answer: str | None = None  # None: the target gives it
    whole: bool = True  # the answer ended by itself: the token that ends a turn stands behind it
    heldout: bool = False


@dataclass(frozen=True)
class TrainingData:
    """The tasks of a file."""

    path: Path
    sha256: str  # of the file
    tasks: tuple[TrainingTask, ...]
    skipped: int  # lines with images, and one that a crash tore at the end
    unread: tuple[str, ...] = ()  # keys that nobody expects

    @property
    def training(self) -> tuple[TrainingTask, ...]:
        """Tasks to train on."""
        return tuple(task for task in self.tasks if not task.heldout)

    @property
    def heldout(self) -> tuple[TrainingTask, ...]:
        """Tasks that no training sees."""
        return tuple(task for task in self.tasks if task.heldout)


def read_tasks(path: Path, *, most: int | None = None) -> TrainingData:
    """Read the first ``most`` tasks of a file; none is held out. Raises RequestError naming a line that is none."""
    digest, tasks, skipped = hashlib.sha256(), list[TrainingTask](), 0
    forms: dict[str, Any] = {}  # values that many lines share, held once
    keys = set[str]()
    for index, line, torn in _lines(path, digest):
        if most is not None and len(tasks) >= most:
            continue  # the hash is of the whole file
        task = _task(f"{path}: line {index + 1}", index, line, forms, keys, torn=torn)
        if task is None:
            skipped += 1
        else:
            tasks.append(task)
    unread = sorted(keys.difference(KEYS, MEANINGLESS))
    return TrainingData(path, digest.hexdigest(), tuple(tasks), skipped, tuple(unread))


def read_mixture(
    paths: Sequence[Path], *, heldout: int | None = None, most: int | None = None
) -> tuple[TrainingData, ...]:
    """:func:`read_tasks` of several files with ``heldout`` prompts of each held out (None: a tenth, at most 200).

    A prompt's hash decides, so one that is there twice, in one file or two, is never on both sides, and the order of
    lines does not matter. Raises RequestError also for a file that leaves no prompt for one of them.
    """
    files = [read_tasks(path, most=most) for path in paths]
    keys = [[_key(task) for task in each.tasks] for each in files]
    out = {key for each, own in zip(files, keys, strict=True) for key in _held_out(each.path, own, heldout)}
    mixture = []
    for each, own in zip(files, keys, strict=True):
        if out.issuperset(own):
            raise RequestError(f"all prompts of {each.path} are held out, here or in another file; give more prompts")
        tasks = (replace(task, heldout=key in out) for task, key in zip(each.tasks, own, strict=True))
        mixture.append(replace(each, tasks=tuple(tasks)))
    return tuple(mixture)


def spread(tasks: Sequence[TrainingTask], most: int) -> list[TrainingTask]:
    """At most so many of some tasks, from all over them."""
    count = min(most, len(tasks))
    return [tasks[i * (len(tasks) - 1) // max(1, count - 1)] for i in range(count)]


def _held_out(path: Path, keys: Sequence[str], heldout: int | None) -> list[str]:
    """The prompts of a file that are held out."""
    unique = sorted(set(keys))
    if len(unique) < 2:
        raise RequestError(f"{path} has {len(unique)} different prompts; give at least 2: some are held out")
    count = min(HELDOUT, max(1, len(unique) // SHARE)) if heldout is None else heldout
    if not 0 < count < len(unique):
        raise RequestError(f"{count} of {len(unique)} prompts are to be held out; give 1 to {len(unique) - 1}")
    return unique[:count]


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


def _task(
    where: str, index: int, line: bytes, forms: dict[str, Any], keys: set[str], *, torn: bool
) -> TrainingTask | None:
    """The task of a line, whose keys are added to ``keys``; None for one that is left out."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        if torn:
            return None
        said = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise RequestError(f"{where} is not JSON ({said}); correct or remove it") from None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise RequestError(f"{where} needs either messages or prompt; correct or remove it")
    keys.update(body)
    asked = body.get("messages", body.get("prompt"))
    if "messages" in body:
        if not isinstance(asked, list) or not asked or not all(isinstance(message, dict) for message in asked):
            raise RequestError(f"{where}: messages is no list of messages; correct or remove it")
        if any(is_image(part) for message in asked for part in _parts(message)):
            return None
    elif not isinstance(asked, str):
        raise RequestError(f"{where}: prompt is no text; correct or remove it")
    given = body.get("answer")
    if given is not None and not isinstance(given, str):
        raise RequestError(f"{where}: answer is {type(given).__name__}, wanted text; correct or remove it")
    options = {name: _once(body[name], forms) for name in SHAPING if body.get(name) is not None}
    raw = body.get("raw", False) if isinstance(asked, str) else False
    try:
        as_messages(asked)
        asking = {"raw": raw, **options}
        checked(_FLAGS, {name: asking[name] for name in _FLAGS if name in asking})
        Options.of(asking)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from None
    text_only = not any(body.get(name) for name in ("thinking", "reasoning", "tool_calls"))
    whole = body.get("finish_reason", "stop") == "stop" and not body.get("stop")  # a text of stop is cut off
    return TrainingTask(index, asked, bool(raw), options, given if given and text_only else None, whole)


def _once(value: Any, known: dict[str, Any]) -> Any:
    """The value, or the equal one that an earlier line has."""
    if not isinstance(value, dict | list | str):
        return value
    return known.setdefault(json.dumps(value), value)


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _key(task: TrainingTask) -> str:
    """Hash of a prompt, the same for a text and for the message that it stands for."""
    return hashlib.sha256(json.dumps(as_messages(task.asked), sort_keys=True).encode()).hexdigest()
