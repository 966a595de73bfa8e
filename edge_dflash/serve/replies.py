"""Bodies of the OpenAI API, written: plans as completions, increments as chunks, and what OpenAI has no field for.

SCHEMAS says so to the document of the API; tests compare it with answers, in both directions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from edge_dflash.common.rules import Schema
from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.logprobs import TokenLogprob
from edge_dflash.result import Increment, Plan, PlanTimings
from edge_dflash.runner.planning import MOST_CANDIDATES
from edge_dflash.serve.bodies import COUNT, STRING, exactly
from edge_dflash.serve.calls import Call
from edge_dflash.serve.openapi import BOOLEAN, IDS, NUMBER, list_of, or_null, ref

LEAST = -9999.0  # OpenAI's number for a token that is next to impossible; JSON has no infinity
_FINISH = {"stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "length"}


class Writer:
    """Writes the answer to one request: whole, or its pieces in order."""

    def __init__(self, call: Call, model: str, fingerprint: str, request_id: str) -> None:
        self._call = call
        self._head = {
            "id": ("chatcmpl-" if call.chat else "cmpl-") + request_id,
            "object": "chat.completion" if call.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.echo = ""  # what each completion begins with
        self._calls = [0] * call.n  # tool calls of each choice so far
        self._characters = [0] * call.n  # begun by its tokens so far, whose log-probabilities were written

    def whole(self, plans: Sequence[Plan], details: Mapping[str, Any]) -> dict[str, Any]:
        """A finished plan for each choice."""
        choices = [self._choice(plan, index) for index, plan in enumerate(plans)]
        extra = extension(self._call, plans[0], details)
        if len(plans) > 1:
            extra["candidates"] = [extension(self._call, plan, {}) for plan in plans]
        return {**self._head, "choices": choices, "usage": _usage(plans), "edge_dflash": extra}

    def _choice(self, plan: Plan, index: int) -> dict[str, Any]:
        said = {"message": _message(plan)} if self._call.chat else {"text": self.echo + (plan.text or "")}
        logprobs = self._logprobs((*plan.prompt_logprobs, *plan.logprobs), index)
        return {"index": index, "finish_reason": finish_reason(plan), "logprobs": logprobs, **said}

    def opening(self) -> list[dict[str, Any]]:
        """The first chunks, one for each choice: of a chat, or of a completion that begins with its prompt."""
        said: dict[str, Any] = (
            {"delta": {"role": "assistant", "content": ""}} if self._call.chat else {"text": self.echo}
        )
        wanted = self._call.chat or (self.echo and not self._call.options.get("prompt_logprobs"))
        return [self._chunk(said, index) for index in range(self._call.n)] if wanted else []

    def piece(self, part: Increment, index: int) -> dict[str, Any] | None:
        """The chunk of an increment of a choice; None when there is nothing to say."""
        first = self._calls[index]
        self._calls[index] += len(part.tool_calls)
        if self._call.chat:
            delta: dict[str, Any] = {"content": part.text} if part.text else {}
            if part.thinking:
                delta["reasoning_content"] = part.thinking
            if part.tool_calls:
                delta["tool_calls"] = [
                    {"index": index, **call.openai()} for index, call in enumerate(part.tool_calls, first)
                ]
            choice: dict[str, Any] = {"delta": delta}
        else:
            choice = {"text": self.echo if part.prompt_logprobs else part.text or ""}
        found = part.prompt_logprobs or part.logprobs
        choice["logprobs"] = self._logprobs(found, index) if found else None
        if not any(choice.values()) and not (self._call.with_tokens and part.tokens):
            return None
        made = self._chunk(choice, index)
        if self._call.with_tokens:
            made["edge_dflash"] = {"tokens": list(part.tokens), **({"echo": True} if part.prompt_logprobs else {})}
        return made

    def closing(self, plans: Sequence[Plan], details: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last chunks: the end of each choice and its details, then the usage if it was asked for."""
        said: dict[str, Any] = {"delta": {}} if self._call.chat else {"text": ""}
        chunks = [self._chunk(said, index, finish_reason(plan)) for index, plan in enumerate(plans)]
        for chunk, plan in zip(chunks, plans, strict=True):
            chunk["edge_dflash"] = extension(self._call, plan, details)
        if not self._call.include_usage:
            return chunks
        return [*chunks, {**self._chunk({}, 0), "choices": [], "usage": _usage(plans)}]

    def _chunk(self, choice: dict[str, Any], index: int, reason: str | None = None) -> dict[str, Any]:
        kind = {"object": "chat.completion.chunk"} if self._call.chat else {}
        choices = [{"index": index, "logprobs": None, **choice, "finish_reason": reason}]
        return {**self._head, **kind, "choices": choices, **({"usage": None} if self._call.include_usage else {})}

    def _logprobs(self, found: Sequence[TokenLogprob], index: int) -> dict[str, Any] | None:
        """The field ``logprobs`` for the next tokens; None when they were not asked for.

        Where token ids are wanted, entries have them, and a completion has entries, too.
        """
        if self._call.options.get("logprobs") is None:
            return None
        entries = ({**self._entry(one), "top_logprobs": list(map(self._entry, one.top))} for one in found)
        if self._call.chat:
            return {"content": list(entries), "refusal": None}
        lists = {
            "tokens": [_text(one) for one in found],
            "token_logprobs": [_number(one) for one in found],
            "top_logprobs": [None if one.logprob is math.nan else _by_text(one.top) for one in found],
            "text_offset": [self._offset(one, index) for one in found],
        }
        return {**lists, "content": list(entries)} if self._call.with_tokens else lists

    def _entry(self, one: TokenLogprob) -> dict[str, Any]:
        entry = {"token": _text(one), "logprob": _number(one), "bytes": None if one.text is None else list(one.text)}
        return {**entry, "token_id": one.token} if self._call.with_tokens else entry

    def _offset(self, one: TokenLogprob, index: int) -> int:
        """Characters before the one that the token begins, or of which it is a further part."""
        text = one.text or b""
        before = self._characters[index] - (1 if text and _continues(text[0]) else 0)
        self._characters[index] += sum(not _continues(byte) for byte in text)
        return max(before, 0)


def finish_reason(plan: Plan) -> str:
    """OpenAI's word for the end of a plan; ``edge_dflash.finish_reason`` has ours."""
    return "tool_calls" if plan.tool_calls and plan.finish_reason == "stop" else _FINISH[plan.finish_reason]


def extension(call: Call, plan: Plan, details: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under ``edge_dflash``."""
    return {
        **{name: getattr(plan, name) for name in _OF_PLAN},
        "drafts": plan.drafting.drafts,
        "accepted_drafts": plan.drafting.accepted,
        "timings": asdict(plan.timings),
        "session": call.session,
        "malformed": [asdict(one) for one in plan.malformed],
        **({"tokens": plan.tokens} if call.with_tokens else {}),
        **details,
    }


def _usage(plans: Sequence[Plan]) -> dict[str, Any]:
    """The prompt counts once: the first plan has its cost."""
    first, made = plans[0], sum(len(plan.tokens) for plan in plans)
    return {
        "prompt_tokens": first.prompt_tokens,
        "completion_tokens": made,
        "total_tokens": first.prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": first.reused_tokens},
    }


def _message(plan: Plan) -> dict[str, Any]:
    calls = [call.openai() for call in plan.tool_calls]
    content = None if calls and not plan.text else plan.text or ""
    more = {"reasoning_content": plan.thinking, "tool_calls": calls}
    return {"role": "assistant", "content": content, "refusal": None, **{key: one for key, one in more.items() if one}}


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 goes on with a character, and does not begin one."""
    return byte & 0xC0 == 0x80


def _by_text(top: Sequence[TokenLogprob]) -> dict[str, float | None]:
    """The likeliest of several tokens that have the same text."""
    found: dict[str, float | None] = {}
    for one in top:
        found.setdefault(_text(one), _number(one))
    return found


def _text(one: TokenLogprob) -> str:
    return f"token_id:{one.token}" if one.text is None else one.text.decode(errors="replace")


def _number(one: TokenLogprob) -> float | None:
    """None for the first token of a prompt; LEAST for another NaN, too."""
    return None if one.logprob is math.nan else one.logprob if one.logprob >= LEAST else LEAST


# Schemas --------------------------------------------------------------------------------------------------------------

_USAGE = exactly(
    prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT, prompt_tokens_details=exactly(cached_tokens=COUNT)
)
_OF_PLAN: dict[str, Schema] = {  # told as a plan has them
    "finish_reason": {"enum": list(get_args(FinishReason))},
    "accept_length": NUMBER,
    "accept_lengths": IDS,
    "tokens_per_second": NUMBER,
    "speculative": BOOLEAN,
    "lossy": BOOLEAN,
    "relaxed_tokens": COUNT,
    "reused_tokens": COUNT,
    "prompt_tokens": COUNT,
    "seed": COUNT,
}
_EXTENSION = exactly(
    {"board": {"type": "object"}, "session_error": STRING, "tokens": IDS, "candidates": list_of(ref("Extension"))},
    **_OF_PLAN,
    drafts=IDS,
    accepted_drafts=IDS,
    timings=exactly(**{one.name: NUMBER for one in fields(PlanTimings)}),
    session=or_null(STRING),
    malformed=list_of(exactly(text=STRING, reason=STRING)),
)


def _tool_call(**more: Schema) -> Schema:
    return exactly(id=STRING, type={"const": "function"}, function=exactly(name=STRING, arguments=STRING), **more)


_MESSAGE = exactly(
    {"reasoning_content": STRING, "tool_calls": list_of(_tool_call())},
    role={"const": "assistant"},
    content=or_null(STRING),
    refusal={"type": "null"},
)
_DELTA: Schema = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": STRING,
        "reasoning_content": STRING,
        "tool_calls": list_of(_tool_call(index=COUNT)),
    },
    "additionalProperties": False,
}
_TOKEN: Schema = {"token": STRING, "logprob": NUMBER, "bytes": or_null(IDS)}
_SCORED = {**_TOKEN, "logprob": or_null(NUMBER)}  # null: of a prompt's first token
_ENTRY = exactly({"token_id": COUNT}, **_TOKEN, top_logprobs=list_of(exactly({"token_id": COUNT}, **_TOKEN)))
_CHAT_LOGPROBS = exactly(content=list_of(_ENTRY), refusal={"type": "null"})
_LOGPROBS = exactly(
    {"content": list_of(exactly({"token_id": COUNT}, **_SCORED, top_logprobs=_ENTRY["properties"]["top_logprobs"]))},
    tokens=list_of(STRING),
    token_logprobs=list_of(or_null(NUMBER)),
    top_logprobs=list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
    text_offset=IDS,
)


def _completion(kind: str, choice: Schema, optional: Schema | None = None, **more: Schema) -> Schema:
    """An answer, or a chunk of one."""
    logprobs = or_null(_LOGPROBS if kind == "text_completion" else _CHAT_LOGPROBS)
    said = exactly(index={**COUNT, "maximum": MOST_CANDIDATES - 1}, logprobs=logprobs, **choice)
    head = {"id": STRING, "object": {"const": kind}, "created": COUNT, "model": STRING, "system_fingerprint": STRING}
    most = 1 if kind.endswith(".chunk") else MOST_CANDIDATES
    return exactly(optional, **head, choices={**list_of(said), "maxItems": most}, **more)


def _chunk(kind: str, choice: Schema) -> Schema:
    """A chunk: a piece, the end, or the usage."""
    chat = kind == "chat.completion.chunk"
    extra = {"anyOf": [exactly(None if chat else {"echo": {"const": True}}, tokens=IDS), ref("Extension")]}
    choice = {**choice, "finish_reason": or_null(_REASON)}
    return _completion(kind, choice, {"usage": or_null(ref("Usage")), "edge_dflash": extra})


_REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}
_WHOLE = {"usage": ref("Usage"), "edge_dflash": ref("Extension")}
SCHEMAS: dict[str, Schema] = {
    "Usage": _USAGE,
    "Extension": _EXTENSION,
    "ChatCompletion": _completion("chat.completion", {"message": _MESSAGE, "finish_reason": _REASON}, **_WHOLE),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": _DELTA}),
    "Completion": _completion("text_completion", {"text": STRING, "finish_reason": _REASON}, **_WHOLE),
    "CompletionChunk": _chunk("text_completion", {"text": STRING}),
}
