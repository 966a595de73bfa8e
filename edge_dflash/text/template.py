"""Chat templates: messages to the text of a prompt, in which the template's control tokens are told from text.

A template writes the control tokens of its model (``<|im_start|>``) as literals. Those alone are control tokens; the
same spelling in a message, a tool or an argument is text, wherever it stands and whatever the template puts beside it.
Templates come with models and are not trusted: another process runs them within bounds of time and memory
(:mod:`edge_dflash.text.template_process`).

A tokenizer may have several templates: "default", and "tool_use" for requests with tools, as transformers takes them.
Other names are for programs that ask for them, which nothing here does.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_dflash.common.files import SMALL, is_there, read_text
from edge_dflash.common.processes import command
from edge_dflash.errors import BundleError, RequestError, one_line, short

DEFAULT, TOOL_USE = "default", "tool_use"
TEMPLATE_FILE, OLDER_FILE, FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE_FILE,
    OLDER_FILE,  # of processors that are older than chat_template.jinja
)
_NAMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.jinja")
_MOST_NAMED = 64
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = "additional_special_tokens"


def tokenizer_files(directory: Path) -> tuple[Path, ...]:
    """The files that a tokenizer and its templates are read from, as far as they exist."""
    named = (f"{FOLDER}/{name}" for name in _named_files(directory))
    return tuple(path for name in (*TOKENIZER_FILES, *named) if is_there(path := directory / name))


def read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name. Raises BundleError for a file that cannot be read.

    ``chat_template.jinja`` replaces those of ``tokenizer_config.json``, which come before ``chat_template.json``; those
    of ``additional_chat_templates`` are added to them.
    """
    found: dict[str, str] = {}
    if is_there(directory / TEMPLATE_FILE):
        found[DEFAULT] = read(directory / TEMPLATE_FILE, str)
    elif config.get("chat_template"):
        found = _by_name(config["chat_template"])
    elif is_there(directory / OLDER_FILE):
        found = _by_name(read_object(directory / OLDER_FILE).get("chat_template"))
    for name in _named_files(directory):
        found[name.removesuffix(".jinja")] = read(directory / FOLDER / name, str)
    return found


def special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What templates may name: special tokens, a list of further ones, and those of the model's own names."""
    older = directory / "special_tokens_map.json"
    known = {**(read_object(older) if is_there(older) else {}), **{k: v for k, v in config.items() if v}}
    extra = known.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **{n: known[n] for n in _SPECIAL_TOKENS if known.get(n)}}
    tokens: dict[str, Any] = {name: _content(token) for name, token in named.items()}
    listed = known.get(_LISTED) or (extra if isinstance(extra, list) else [])
    if isinstance(listed, list) and listed:
        tokens[_LISTED] = [_content(token) for token in listed]
    return tokens


def read(path: Path, parse: Callable[[str], Any], most: int = SMALL) -> Any:
    """What ``parse`` makes of a file. Raises BundleError."""
    try:
        return parse(read_text(path, most))
    except Exception as error:  # the library of tokenizers raises bare Exception
        why = error.strerror if isinstance(error, OSError) else None  # without the path, which is named beside it
        raise BundleError(f"cannot read {path} ({one_line(why or error)}); build the bundle again") from None


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. Raises BundleError."""
    value = read(path, json.loads)
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds {type(value).__name__}, wanted an object; build the bundle again")
    return value


def _named_files(directory: Path) -> list[str]:
    """Files of additional_chat_templates, in their order."""
    try:
        names = sorted(path.name for path in (directory / FOLDER).iterdir() if _NAMED.fullmatch(path.name))
    except OSError:  # there is no such folder
        return []
    if len(names) > _MOST_NAMED:
        raise BundleError(f"{directory / FOLDER} has {len(names)} templates, at most {_MOST_NAMED} are taken")
    return names


def _by_name(given: object) -> dict[str, str]:
    """Templates as files write them: one, a list of named ones, or an object of them."""
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list):
        given = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
    items = given.items() if isinstance(given, dict) else ()
    return {name: text for name, text in items if isinstance(name, str) and isinstance(text, str)}


def _content(token: object) -> str:
    """A special token is a string or an object with its ``content``."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


Message = Mapping[str, Any]  # {"role": ..., "content": ...}, passed to the chat template as it is

SOURCE_CHARS = 1 << 20  # of a template
TEXT_CHARS = 8 << 20  # of a prompt
CPU_SECONDS = 2.0  # of a processor, for one render, compiling included
WALL_SECONDS = 3 * CPU_SECONDS  # for one answer: on a busy machine processor time takes long to come
MEMORY_BYTES = 512 << 20  # address space of the process that renders
_ROLE = re.compile(r"[A-Za-z0-9_-]+")
# Noncharacters of Unicode, two by two: marks are made of two that the messages do not hold.
_MARKS = tuple(chr(code) + chr(code + 1) for code in range(0xFDD0, 0xFDF0, 2))
_FIRST = 0xF0000  # private use: the second character of a mark says which token it is
_BOUNDS = f"more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB"


def content_text(content: object, where: str) -> str | None:
    """A message's content as one text: a list of ``{"type": "text", "text": ...}`` parts is joined; None stays None.

    Raises RequestError, naming ``where``, for content of another type and for parts that are no text.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where} is {short(content)}; give a text, or a list of parts of type text")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            accepted = '{"type": "text", "text": "..."}'
            raise RequestError(f"{where}[{index}] is {short(part)}; this model reads text only, give parts {accepted}")
        if unknown := [key for key in part if key not in ("type", "text")]:
            raise RequestError(f"{where}[{index}].{unknown[0]!s:.60} is unknown here; known are text, type")
        texts.append(text)
    return "".join(texts)


def with_text(message: Message, index: int) -> Message:
    """The message with its content as one text; what else is wrong with it is found when it is rendered."""
    if not isinstance(message, Mapping) or isinstance(message.get("content"), str | None):
        return message
    return {**message, "content": content_text(message["content"], f"content of message {index}")}


class BoundError(RequestError):
    """A chat template takes more time or memory than it may."""


class ChatTemplate:
    """A Jinja template that turns messages into the prompt text of a model, run in a sandbox.

    The environment is that of transformers, which published templates are written for: blocks trimmed, loop controls, a
    tag ``generation``, ``raise_exception(message)``, ``strftime_now(format)`` and a ``tojson`` that does not escape
    HTML. ``names`` are the variables that it reads.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], where: str) -> None:
        """Raise BundleError when it is no valid Jinja, or too large."""
        if len(source) > SOURCE_CHARS:
            raise BundleError(f"{where}: the chat template has {len(source)} characters, at most {SOURCE_CHARS}")
        self._definition = {"source": source, "variables": dict(variables)}
        self._heads: dict[tuple[tuple[str, ...], str], bytes] = {}
        try:
            answer = _process.ask(self._head((), _MARKS[0]), b"null\n")
        except BoundError:
            raise BundleError(f"{where}: the chat template takes {_BOUNDS} to compile; correct it") from None
        if "names" not in answer:
            raise BundleError(f"{where}: the chat template is not valid Jinja ({answer.get('invalid')})")
        self.names = frozenset(answer["names"])

    def render(self, messages: Sequence[Message], **variables: object) -> str:
        """The text of :meth:`pieces`."""
        return "".join(self.pieces((), messages, **variables))

    def pieces(self, controls: Sequence[str], messages: Sequence[Message], /, **variables: object) -> list[str]:
        """The prompt up to where the model's answer begins: text, control token, text, ..., text.

        ``controls`` are the control tokens' spellings. ``variables`` are extra switches that the template may read
        (``enable_thinking=False``). An assistant's content may hold its thinking span, which templates take apart: its
        ends are control tokens as well. Raises RequestError when a message lacks role or content, when the template
        refuses the messages, and when it takes too long or too much memory (BoundError).
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f'message {index} is {short(message)}; give {{"role": "user", "content": "..."}}')
            if not _ROLE.fullmatch(message["role"]):
                raise RequestError(
                    f"the role of message {index} is {short(message['role'])}; use letters, digits, _ and -"
                )
        given = {"messages": list(messages), **variables}
        body = "{" + ",".join(f"{_json(name)}:{_json(value)}" for name, value in given.items()) + "}"
        marks = next((pair for pair in _MARKS if not any(rf"\u{ord(char):04x}" in body for char in pair)), None)
        if marks is None:
            raise RequestError("the messages hold every noncharacter of U+FDD0 to U+FDEF; remove them")
        answer = _process.ask(self._head(tuple(controls), marks), body.encode() + b"\n")
        if "text" not in answer:
            why = answer.get("refused", answer.get("invalid"))
            raise RequestError(f"the chat template refuses the messages: {why}")
        return _unmarked(answer["text"], controls, marks)

    def _head(self, controls: tuple[str, ...], marks: str) -> bytes:
        """The template as the process takes it."""
        if (head := self._heads.get((controls, marks))) is None:
            head = json.dumps({**self._definition, "tokens": controls, "marks": marks}).encode() + b"\n"
            self._heads[controls, marks] = head
        return head


def mark(index: int, length: int, marks: str) -> str:
    """What stands for control token ``index``: as long as the token, because templates may cut by its length."""
    return (marks[0] + chr(_FIRST + index)).ljust(length, marks[1])


def _unmarked(text: str, controls: Sequence[str], marks: str) -> list[str]:
    """Text, control token, text, ..., text."""
    first, *rest = text.split(marks[0])
    pieces = [first]
    for part in rest:
        name = controls[index] if part and 0 <= (index := ord(part[0]) - _FIRST) < len(controls) else ""
        if not name or not (marks[0] + part).startswith(mark(index, len(name), marks)):
            raise RequestError("the chat template cuts a control token in two; correct chat_template.jinja")
        pieces += (name, part[max(len(name), 2) - 1 :])
    return pieces


class _Process:
    """The one process that runs templates; started when it is needed, and again after a template ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False

    def ask(self, head: bytes, body: bytes) -> dict[str, Any]:
        """Its answer. Raises BoundError when the template ended it, or took all of its memory."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            late = threading.Timer(WALL_SECONDS, process.kill)
            late.daemon = True
            late.start()
            try:
                process.stdin.write(head + body)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # an interrupt: what it answers now belongs to nobody
                self.stop()
                raise
            finally:
                late.cancel()
            if not line.endswith(b"\n"):
                process.wait()
                self.stop()
                if process.returncode > 0 and not self._answered:  # Python or Jinja could not be loaded
                    raise BundleError(f"the process that runs chat templates cannot start ({sys.executable})")
            else:
                self._answered = True
        text = line.decode(errors="surrogatepass") if line.endswith(b"\n") else '{"bound": ""}'
        answer: dict[str, Any] = json.loads(text)
        if "bound" in answer:
            raise BoundError(f"the chat template takes {_BOUNDS} for these messages; give less, or correct it")
        return answer

    def stop(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """In a fork: it is the parent's."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.stop()
        try:
            self._process = subprocess.Popen(
                command("edge_dflash.text.template_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise BundleError(f"the process that runs chat templates cannot start ({error.strerror})") from None
        return self._process


_process = _Process()
atexit.register(_process.stop)
os.register_at_fork(after_in_child=_process.forget)


def _json(value: object) -> str:
    """A list comes item by item: other threads wait for as long as one call of the encoder takes."""
    try:
        if isinstance(value, list):
            return "[" + ",".join(map(_encoder.encode, value)) + "]"
        return _encoder.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the messages are no plain JSON values ({error}); give texts, numbers and lists") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value is of type {type(value).__name__}")


_encoder = json.JSONEncoder(default=_plain)
