"""The prompt of a task: token ids through the chat template, after the conversation if there is one.

The chat template is known by what it writes, never by its name.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol, TypeAlias

from edge_dflash.common.rules import refuse_surrogates
from edge_dflash.errors import RequestError
from edge_dflash.pictures.pictured import Picture, Placed
from edge_dflash.text.chat import Answer, Markers
from edge_dflash.text.images import ImageReader, encode_shown, marked, name_of, read_images, sources_of, with_parts
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.text.tool_calls import Tool

Task: TypeAlias = str | Sequence[Message] | Sequence[int]

_PROBE = "\ue000"  # private use: no message begins with it
_MARK = "\ue000\ue001\ue002"  # stands for an answer when the text behind it is looked for
_KNOWN_PREFIXES = 16
_NO_TEXT = "give token ids instead of text"


class Spoken(Protocol):
    """What of a request's options shapes its prompt."""

    @property
    def tools(self) -> Sequence[Tool] | None:
        """That the template describes."""

    @property
    def thinking(self) -> bool:
        """Whether the template asks for thinking."""

    @property
    def raw(self) -> bool:
        """Whether a text is used as it is, without template."""


def token_ids(task: Sequence[Any]) -> tuple[int, ...]:
    """Token ids must be integers; the loop checks their number and range."""
    for token in task:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{token!r} is no token id; give text, a list of messages or a list of integer ids")
    return tuple(int(token) for token in task)


def as_messages(task: Task) -> list[Message] | None:
    """The task as messages, each content one text or a list of texts and images; None when it is token ids.

    Raises RequestError when it is of another kind, or empty.
    """
    if isinstance(task, str):
        if not task.strip():
            raise RequestError("the task is empty; say what is to be done")
        return [{"role": "user", "content": task}]
    try:
        first: Any = None if isinstance(task, bytes | bytearray | Mapping) else task[0] if len(task) else 0
    except (TypeError, IndexError, KeyError):  # no sequence
        first = None
    if first is None:
        raise RequestError(f"the task is of type {type(task).__name__}; give text, a list of messages or token ids")
    if isinstance(first, Mapping):
        refuse_surrogates(task, "messages")
        return [with_parts(message, index) for index, message in enumerate(task)]  # type: ignore[arg-type]  # no ids
    return None


@dataclass(frozen=True)
class Conversation:
    """A conversation before its next turn. The messages are never changed: a turn that ends makes another list."""

    messages: Sequence[Message] = ()  # of the tokens, the last answer at the end; or what comes before the first turn
    tokens: tuple[int, ...] = ()
    pictures: tuple[Placed, ...] = ()  # of the tokens
    tools: str = ""  # with which the tokens were made, as JSON
    thinking: bool = False  # the last answer was cut inside a thinking span


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, its length up to the first user's words if it begins with something to share, its pictures."""

    ids: tuple[int, ...]
    shared: int = 0
    pictures: tuple[Placed, ...] = ()  # in their order, on the placeholders of their rows
    said: Sequence[Message] | str | None = None  # what it was made of; None: token ids
    turn: Sequence[Message] = ()  # what it adds to its conversation


class Prompter:
    """Makes prompts of tasks; remembers what it found out about system prompts. May be used from any thread."""

    def __init__(
        self, tokenizer: Tokenizer | None, stop_token_ids: Sequence[int] = (), images: ImageReader | None = None
    ) -> None:
        """``images``: how those of a task are read; None: the target does not see."""
        self.images = images
        self._tokenizer, self._stop_token_ids = tokenizer, stop_token_ids
        self._probed: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def prompt(
        self, task: Task, options: Spoken, known: Conversation | None = None, check: Callable[[], None] = lambda: None
    ) -> Prompt:
        """The prompt of a task, after the conversation if one is ``known``: that as it was generated if that can be.

        ``check`` is asked while images are read. Raises RequestError for a task of another kind, an empty one, and one
        that cannot be turned into ids.
        """
        before, messages = known or Conversation(), as_messages(task)
        ids = token_ids(task) if messages is None else self._without_template(task, options)
        resumes = bool(before.tokens) and before.tools == tools_of(options)
        if messages is None:
            assert ids is not None
            spelled = "" if known is None or self._tokenizer is None else self._tokenizer.decode(ids)
            messages = [{"role": "user", "content": spelled}]
        elif known is not None:
            messages = [dict(message) if isinstance(message, Mapping) else message for message in messages]
        if ids is not None and (resumes or not before.messages):
            if self.images is not None and (token := self.images.vision.image_token_id) in ids:
                raise RequestError(
                    f"token {token} of the prompt stands for a row of an image; give messages with images"
                )
            if resumes:
                return Prompt((*before.tokens, *ids), pictures=before.pictures, turn=messages)
            return Prompt(ids, said=task if isinstance(task, str) else None, turn=messages)
        pictures = {name_of(placed.picture): placed.picture for placed in before.pictures}
        if _shows(messages):
            messages, read = read_images(self.images, messages, pictures, check)
            pictures |= read
        if resumes and (prompt := self._next_turn(before, messages, pictures, options)) is not None:
            return prompt
        said = [*before.messages, *messages]
        pieces, mark = self._rendered(said, options)
        ids, shown = self._encoded(pieces, mark, said, pictures)
        return Prompt(ids, self._shared(said, ids, options), shown, said, messages)

    def _without_template(self, task: Task, options: Spoken) -> tuple[int, ...] | None:
        """Ids of a text that no chat template takes; None for a task that one does."""
        tokenizer = need_tokenizer(self._tokenizer, _NO_TEXT)
        if options.raw and not isinstance(task, str):
            raise RequestError("raw is given with messages; give one text, or leave raw out")
        if not isinstance(task, str):
            return None
        if options.raw:
            return tokenizer.encode(task)
        if (tokenizer.tool_template if options.tools else tokenizer.template) is not None:
            return None
        if options.tools:
            raise RequestError("this model has no chat template, which describes tools; leave tools out")
        return tokenizer.encode_text(task)

    def _rendered(self, messages: Sequence[Message], options: Spoken) -> tuple[list[str], str]:
        """What the template writes: text, control token, ..., text; and what stands for an image in it, if one does."""
        messages, mark = marked(messages) if _shows(messages) else (messages, "")
        tokenizer = need_tokenizer(self._tokenizer, _NO_TEXT)
        return tokenizer.render_pieces(messages, tools=options.tools, enable_thinking=options.thinking), mark

    def _encoded(
        self,
        pieces: Sequence[str],
        mark: str,
        messages: Sequence[Message],
        pictures: Mapping[str, Picture],
        first: int = 0,
    ) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Ids of a template's pieces after ``first`` tokens, and where the pictures that ``mark`` stands for are."""
        tokenizer = need_tokenizer(self._tokenizer, _NO_TEXT)
        if not mark or self.images is None:
            return tokenizer.encode_pieces(pieces), ()
        shown = [pictures[str(name)] for name in sources_of(messages)]
        return encode_shown(tokenizer, pieces, mark, shown, self.images.vision, first)

    def _shared(self, messages: Sequence[Message], ids: tuple[int, ...], options: Spoken) -> int:
        """How many ids do not depend on what the user says: system messages and tools, and what frames them."""
        system = [message for message in messages if message.get("role") == "system"]
        if messages[: len(system)] != system or len(system) == len(messages) or not (system or options.tools):
            return 0
        key = json.dumps([system, options.tools, options.thinking], default=repr)
        if (probe := self._probed.get(key)) is None:
            other = [*system, {"role": "user", "content": _PROBE}]
            tokenizer = need_tokenizer(self._tokenizer, _NO_TEXT)
            probe = tokenizer.encode_chat(other, tools=options.tools, enable_thinking=options.thinking)
            self._probed[key] = probe
            while len(self._probed) > _KNOWN_PREFIXES:
                self._probed.popitem(last=False)
        pairs = enumerate(zip(ids, probe, strict=False))
        return next((at for at, (one, another) in pairs if one != another), 0)

    def _next_turn(
        self, before: Conversation, turn: list[Message], pictures: Mapping[str, Picture], options: Spoken
    ) -> Prompt | None:
        """The prompt of one more turn: the tokens as they are, and what the template writes from an answer to the next.

        The conversation only grows: earlier answers stay as they were generated, thinking included, so nothing is
        computed twice; a thinking span in which the last one was cut is closed here. None when the template does not
        write answers as they are: then all has to be encoded anew.
        """
        tokenizer, tokens = need_tokenizer(self._tokenizer, _NO_TEXT), before.tokens
        said = [*before.messages[:-1], {"role": "assistant", "content": _MARK}, *turn]
        pieces, mark = self._rendered(said, options)
        places = [at for at, piece in enumerate(pieces) if _MARK in piece]
        if len(places) != 1 or pieces[places[0]].count(_MARK) != 1:
            return None
        after = [pieces[places[0]].partition(_MARK)[2], *pieces[places[0] + 1 :]]
        ended = tokens[-1] in self._stop_token_ids
        if ended and after[:2] == ["", tokenizer.token(tokens[-1])]:  # it is there already
            after = after[2:]
        if before.thinking and Markers.of(tokenizer).end_think is not None:
            after = ["\n", "</think>", "\n\n" + after[0], *after[1:]]
        ids, placed = self._encoded(after, mark, said, pictures, len(tokens))
        whole = [*before.messages, *turn]
        return Prompt((*tokens, *ids), pictures=(*before.pictures, *placed), said=whole, turn=turn)


def need_tokenizer(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """The tokenizer. Raises RequestError, saying ``what`` is to be done, when the bundle has none."""
    if tokenizer is None:
        raise RequestError(
            f"this bundle has no tokenizer: {what}, or build it again from a checkpoint with tokenizer.json"
        )
    return tokenizer


def _shows(messages: Sequence[Message]) -> bool:
    """Whether messages, as :func:`as_messages` gives them, hold images: then a content has parts."""
    return any(isinstance(message, Mapping) and isinstance(message.get("content"), list) for message in messages)


def tools_of(options: Spoken) -> str:
    """The tools of a request, as a conversation remembers them."""
    return json.dumps(options.tools or [], default=dict)


def as_message(answer: Answer) -> Message:
    """An answer as the message that templates take back."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.thinking or "</think>" in answer.content:  # which stands behind the thinking, so it is text
        message["reasoning_content"] = answer.thinking
    if answer.tool_calls:
        message["tool_calls"] = [call.openai() for call in answer.tool_calls]
    return message
