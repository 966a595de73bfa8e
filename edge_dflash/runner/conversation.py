"""Prompts from messages: a whole conversation, the part of it that others share, what one more turn adds.

Knows the chat template by what it writes, never by its name. Knows nothing of engines.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from edge_dflash.decode.options import Options, Task, as_messages, token_ids
from edge_dflash.errors import RequestError
from edge_dflash.runner.prepare import Model
from edge_dflash.text.chat import Answer, Markers, encode_conversation, render_conversation
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import Tokenizer

_PROBE = "\ue000"  # private use: no message begins with it
_MARK = "\ue000\ue001\ue002"  # stands for an answer when the text behind it is looked for
_KNOWN_PREFIXES = 16


@dataclass(frozen=True)
class Prompt:
    """Ids of a prompt, and its length up to the first user's words if it begins with something to share."""

    ids: tuple[int, ...]
    shared: int = 0


class Encoder:
    """Encodes tasks; remembers what it found out about system prompts. May be used from any thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._probed: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def prompt(self, task: Task, options: Options) -> Prompt:
        """A task as a prompt of its own.

        Raises RequestError when it is of another kind, empty, or cannot be turned into ids.
        """
        messages = as_messages(task)
        if messages is None:
            return Prompt(token_ids(task))
        tokenizer = self._model.need_tokenizer("give token ids instead of text")
        if (text := _without_template(tokenizer, task, options)) is not None:
            return Prompt(text)
        ids = encode_conversation(tokenizer, messages, tools=options.tools, enable_thinking=options.thinking)
        return Prompt(ids, self._shared(tokenizer, messages, ids, options))

    def _shared(self, tokenizer: Tokenizer, messages: Sequence[Message], ids: tuple[int, ...], options: Options) -> int:
        """How many ids do not depend on what the user says: system messages and tools, and what frames them."""
        system = [message for message in messages if message.get("role") == "system"]
        if messages[: len(system)] != system or len(system) == len(messages) or not (system or options.tools):
            return 0
        key = json.dumps([system, options.tools, options.thinking], default=repr)
        if (probe := self._probed.get(key)) is None:
            other = [*system, {"role": "user", "content": _PROBE}]
            probe = encode_conversation(tokenizer, other, tools=options.tools, enable_thinking=options.thinking)
            self._probed[key] = probe
            while len(self._probed) > _KNOWN_PREFIXES:
                self._probed.popitem(last=False)
        pairs = enumerate(zip(ids, probe, strict=False))
        return next((at for at, (one, another) in pairs if one != another), 0)


def next_turn(
    model: Model, tokens: Sequence[int], messages: Sequence[Message], task: Task, options: Options, *, thinking: bool
) -> tuple[int, ...] | None:
    """The prompt of one more turn: ``tokens`` as they are, and what the template writes between an answer and the next.

    The conversation only grows: earlier answers stay as they were generated, thinking included, so nothing is computed
    twice. ``messages`` are those of ``tokens``, the answer last; ``thinking``: it was cut inside a thinking span, which
    is closed here. None when the template does not write answers as they are: then all has to be encoded anew.
    """
    new = as_messages(task)
    if new is None:
        return (*tokens, *token_ids(task))
    tokenizer = model.need_tokenizer("give token ids instead of text")
    if (text := _without_template(tokenizer, task, options)) is not None:
        return (*tokens, *text)
    whole = [*messages[:-1], {"role": "assistant", "content": _MARK}, *new]
    pieces = render_conversation(tokenizer, whole, tools=options.tools, enable_thinking=options.thinking)
    places = [at for at, piece in enumerate(pieces) if _MARK in piece]
    if len(places) != 1 or pieces[places[0]].count(_MARK) != 1:
        return None
    after = [pieces[places[0]].partition(_MARK)[2], *pieces[places[0] + 1 :]]
    if tokens[-1] in model.stop_token_ids and after[:2] == ["", tokenizer.token(tokens[-1])]:  # it is there already
        after = after[2:]
    if thinking and Markers.of(tokenizer).end_think is not None:
        after = ["\n", "</think>", "\n\n" + after[0], *after[1:]]
    return (*tokens, *tokenizer.encode_pieces(after))


def _without_template(tokenizer: Tokenizer, task: Task, options: Options) -> tuple[int, ...] | None:
    """Ids of a text that no chat template takes; None for a task that one does."""
    if options.raw:
        if not isinstance(task, str):
            raise RequestError("raw is given with messages; give one text, or leave raw out")
        return tokenizer.encode(task)
    return tokenizer.encode_text(task) if isinstance(task, str) and tokenizer.template is None else None


def as_said(model: Model, task: Task) -> list[Message]:
    """The task as messages to remember; ids as their text."""
    messages = as_messages(task)
    if messages is None:
        ids = token_ids(task)
        return [{"role": "user", "content": "" if model.tokenizer is None else model.tokenizer.decode(ids)}]
    return [dict(message) for message in messages]


def as_message(answer: Answer) -> Message:
    """An answer as the message that templates take back."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content}
    if answer.thinking or "</think>" in answer.content:  # which stands behind the thinking, so it is text
        message["reasoning_content"] = answer.thinking
    if answer.tool_calls:
        message["tool_calls"] = [call.openai() for call in answer.tool_calls]
    return message
