"""What a chat model answered, taken apart: thinking, content and tool calls, whole or as the tokens come.

Spans are found by the ids of the tokens that open and close them, never by text: an answer may quote ``<think>``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_dflash.errors import RequestError
from edge_dflash.text import tool_calls as calls
from edge_dflash.text.template import Message
from edge_dflash.text.tokenizer import REPLACEMENT, Tokenizer


@dataclass(frozen=True)
class Markers:
    """Ids of the tokens that bound spans; None when the tokenizer has no such token."""

    think: int | None
    end_think: int | None
    tool_call: int | None
    end_tool_call: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Markers:
        """Look the Qwen family's markers up."""
        return cls(*(tokenizer.control_id(name) for name in ("<think>", "</think>", "<tool_call>", "</tool_call>")))


@dataclass(frozen=True)
class Answer:
    """An answer, or a piece of one: pieces joined with ``+`` give the whole."""

    thinking: str = ""
    content: str = ""
    tool_calls: tuple[calls.ToolCall, ...] = ()
    malformed: tuple[calls.MalformedToolCall, ...] = ()  # calls that cannot be run; none is dropped

    def __add__(self, other: Answer) -> Answer:
        return Answer(
            self.thinking + other.thinking,
            self.content + other.content,
            self.tool_calls + other.tool_calls,
            self.malformed + other.malformed,
        )


def thinking_is_open(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt leaves the model inside a thinking span.

    It does when the last marker of the prompt opens one and only blanks follow it. A template that answers without
    thinking writes an empty span, whose last marker closes; a ``<think>`` inside a message is followed by text.
    """
    markers = Markers.of(tokenizer)
    for index in range(len(prompt) - 1, -1, -1):
        if prompt[index] == markers.think:
            return not tokenizer.decode(prompt[index + 1 :]).strip()
        if prompt[index] == markers.end_think:
            return False
    return False


def dialect_of(tokenizer: Tokenizer) -> calls.JsonCalls | calls.TaggedCalls:
    """How a model writes tool calls: found from what its chat template writes for one, never from the model's name.

    Raises RequestError when it writes none, or in an unknown dialect.
    """
    markers = Markers.of(tokenizer)
    if markers.tool_call is None or markers.end_tool_call is None:
        raise RequestError(
            "this tokenizer has no tokens <tool_call> and </tool_call>, so no call can be forced; give auto"
        )
    call = {"type": "function", "function": {"name": calls.PROBE, "arguments": calls.PROBE_ARGUMENTS}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tool = {"type": "function", "function": {"name": "zqlisted", "description": "x", "parameters": {"type": "object"}}}
    text = "".join(tokenizer.render_pieces(messages, tools=[tool]))
    before, called, after = text.rpartition(calls.PROBE)
    written = called and "<tool_call>" in before and "</tool_call>" in after
    body = before.rpartition("<tool_call>")[2] + called + after.partition("</tool_call>")[0] if written else ""
    if (found := calls.dialect_in(body)) is None:
        raise RequestError("the chat template writes tool calls in a form that is not known; give tool_choice auto")
    return found


class AnswerStream:
    """Takes an answer apart as its tokens come.

    ``prompt`` tells whether the answer begins inside a thinking span. Newlines around the thinking and before a tool
    call belong to the template and are left out. A tool call comes whole, once it is closed; one that is never closed
    is reported as malformed by :meth:`finish`. Inside the thinking the markers of tool calls are text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        *,
        stop_token_ids: Sequence[int] = (),
        tools: Sequence[calls.Tool] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._markers = Markers.of(tokenizer)
        self._stop = frozenset(stop_token_ids)
        self._special = self._stop.union(vars(self._markers).values())
        self._tools = tools
        self._seed = hashlib.sha256(",".join(map(str, prompt)).encode())
        self._calls = 0
        self._call: list[int] | None = None  # ids of the tool call that is open
        self._thinking = thinking_is_open(prompt, tokenizer)
        self._span = _Span(tokenizer.decode, trim_start=self._thinking)

    @property
    def thinking(self) -> bool:
        """Whether the answer stands inside a thinking span."""
        return self._thinking

    def add(self, ids: Sequence[int]) -> Answer:
        """Take ids and return what is certain now."""
        piece, run = Answer(), list[int]()
        for token in ids:
            if token in self._special:
                piece += self._words(run) + self._step(token)
                run = []
            else:
                run.append(token)
        return piece + self._words(run)

    def finish(self) -> Answer:
        """Return what is left when no more tokens come."""
        if self._call is not None:
            text = self._tokenizer.decode(self._call)
            self._call = None
            return Answer(malformed=(calls.MalformedToolCall(text, "the answer ended inside the call"),))
        return self._text(self._span.end(keep_newlines=not self._thinking))

    def _words(self, tokens: Sequence[int]) -> Answer:
        """Tokens that are no markers, at once: a decoder's call costs more than a token."""
        if self._call is not None:
            self._call.extend(tokens)
            return Answer()
        return self._text(self._span.add(tokens)) if tokens else Answer()

    def _step(self, token: int) -> Answer:
        markers = self._markers
        if token in self._stop:
            return Answer()
        if self._thinking:
            return self._turn(thinking=False) if token == markers.end_think else self._words([token])
        if self._call is not None:
            return self._step_call(token)
        if token == markers.tool_call:
            self._call = []
            return self._text(self._span.end(keep_newlines=False))
        if token == markers.think:
            return self._turn(thinking=True)
        return Answer() if token == markers.end_think else self._words([token])  # it closes nothing

    def _turn(self, *, thinking: bool) -> Answer:
        """The end of a span; one of the other kind begins."""
        rest = self._text(self._span.end(keep_newlines=False))
        self._thinking, self._span = thinking, _Span(self._tokenizer.decode, trim_start=True)
        return rest

    def _step_call(self, token: int) -> Answer:
        assert self._call is not None
        if token not in (self._markers.end_tool_call, self._markers.tool_call):
            self._call.append(token)
            return Answer()
        text = self._tokenizer.decode(self._call)
        if token == self._markers.tool_call:  # another begins
            self._call = []
            return Answer(malformed=(calls.MalformedToolCall(text, "another call begins inside the call"),))
        self._call = None
        self._span = _Span(self._tokenizer.decode, trim_start=True)
        call = calls.parse_tool_call(text, self._call_id(text), self._tools)
        return Answer(tool_calls=(call,)) if isinstance(call, calls.ToolCall) else Answer(malformed=(call,))

    def _call_id(self, text: str) -> str:
        """The same plan gives the same ids; calls of other prompts or places have others."""
        digest = self._seed.copy()
        digest.update(f"|{self._calls}|{text}".encode())
        self._calls += 1
        return f"call_{digest.hexdigest()[:24]}"

    def _text(self, text: str) -> Answer:
        return Answer(thinking=text) if self._thinking else Answer(content=text)


class _Span:
    """Text of one span: newlines at its start may be dropped, those at its end are held back until it is known."""

    def __init__(self, decode: Callable[[Sequence[int]], str], *, trim_start: bool) -> None:
        self._detokenizer = Detokenizer(decode)
        self._trim_start = trim_start
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        return self._out(self._detokenizer.add(tokens))

    def end(self, *, keep_newlines: bool) -> str:
        text = self._out(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text + held if keep_newlines and not self._trim_start else text

    def _out(self, text: str) -> str:
        if self._trim_start:
            text = text.lstrip("\n")
            self._trim_start = not text
        text = self._held + text
        certain = text.rstrip("\n")
        self._held = text[len(certain) :]
        return certain


class Detokenizer:
    """Text of a stream of ids, piece by piece, holding back bytes that are not a whole character yet.

    The pieces, with :meth:`finish` at the end, join to what the decoder gives for all ids at once.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # ids before the pending ones: decoders may treat the first id of a text apart
        self._pending: list[int] = []  # ids whose text is not all out
        self._sent = 0  # characters of the pending ids that are out

    def add(self, ids: Sequence[int]) -> str:
        """Take ids and return the text that is certain now."""
        self._pending.extend(ids)
        fresh = self._fresh()
        certain = fresh.rstrip(REPLACEMENT)  # more bytes may turn the end into a character
        piece = certain[self._sent :]
        if certain == fresh and fresh:
            self._context, self._pending, self._sent = self._pending, [], 0
        else:
            self._sent = max(self._sent, len(certain))
        return piece

    def finish(self) -> str:
        """Return what is left: a character that never became whole comes as U+FFFD."""
        rest = self._fresh()[self._sent :]
        self._context, self._pending, self._sent = [], [], 0
        return rest

    def _fresh(self) -> str:
        """Text of the pending ids."""
        before = len(self._decode(self._context)) if self._context else 0
        return self._decode([*self._context, *self._pending])[before:]
