"""Chat templates: messages to the text of a prompt, in which the template's control tokens are told from text.

A template writes the control tokens of its model (``<|im_start|>``) as literals. Those alone are control tokens; the
same spelling in a message, a tool or an argument is text, wherever it stands and whatever the template puts beside it.
Templates come with models and are not trusted: another process runs them within bounds of time and memory
(:mod:`edge_dflash.text.template_process`).
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from edge_dflash.common.processes import command
from edge_dflash.errors import BundleError, RequestError, short

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, passed to the chat template as it is

TEXT_PART = '{"type": "text", "text": "..."}'
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
    remedy = f"this model reads text only, give parts {TEXT_PART}"
    return "".join(text_of(part, f"{where}[{index}]", remedy) for index, part in enumerate(content))


def text_of(part: object, where: str, remedy: str) -> str:
    """The text of a TEXT_PART. Raises RequestError, naming ``where``, for another part."""
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(part, Mapping) or not isinstance(text, str):
        raise RequestError(f"{where} is {short(part)}; {remedy}")
    if unknown := [key for key in part if key not in ("type", "text")]:
        raise RequestError(f"{where}.{unknown[0]!s:.60} is unknown here; known are text, type")
    return text


def for_templates(message: Message, index: int) -> Message:
    """A message as templates want it: ``content`` is there, and arguments of tool calls are objects.

    Raises RequestError for tool calls that are none.
    """
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not calls:
        return message
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"tool_calls of message {index} is of type {type(calls).__name__}; give a list")
    return {**message, "content": message.get("content") or "", "tool_calls": [_with_object(c, index) for c in calls]}


def _with_object(call: object, index: int) -> dict[str, Any]:
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise RequestError(f"a tool call of message {index} has no function with a name; give the call as it came")
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"the id of a tool call of message {index} is {short(call['id'])}; give a text")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"arguments of a tool call of message {index} are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        raise RequestError(f"arguments of a tool call of message {index} are of type {kind}; give an object")
    function = {**inner, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


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
        ends are control tokens as well; arguments of its tool calls, which OpenAI writes as JSON text, become objects.
        Raises RequestError when a message lacks role or content, for tool calls that are none, when the template
        refuses the messages, and when it takes too long or too much memory (BoundError).
        """
        messages = [for_templates(message, index) for index, message in enumerate(messages)]
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
                raise RequestError(f'message {index} is {short(message)}; give {{"role": "user", "content": "..."}}')
            if not _ROLE.fullmatch(message["role"]):
                raise RequestError(
                    f"the role of message {index} is {short(message['role'])}; use letters, digits, _ and -"
                )
        given = {"messages": messages, **variables}
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


def _json(body: object) -> str:
    """A list comes item by item: other threads wait for as long as one call of the encoder takes."""
    try:
        if isinstance(body, list):
            return "[" + ",".join(map(_encoder.encode, body)) + "]"
        return _encoder.encode(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the messages are no plain JSON values ({error}); give texts, numbers and lists") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value is of type {type(value).__name__}")


_encoder = json.JSONEncoder(default=_plain)
