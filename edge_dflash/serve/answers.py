"""What the service answers, as JSON Schema; tests compare it with answers, in both directions.

Bodies are made in :mod:`edge_dflash.serve.replies` and :mod:`edge_dflash.serve.app`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.backend import PairShape
from edge_dflash.result import PlanTimings
from edge_dflash.serve.lifecycle import State
from edge_dflash.serve.record import Schema

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS: Schema = {"type": "array", "items": COUNT}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(optional: Schema | None = None, **properties: Any) -> Schema:
    """An object that has these properties, perhaps the optional ones, and no others."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": sorted(properties),
        "additionalProperties": False,
    }


def _of(kind: type, **schemas: Schema) -> Schema:
    """The object that ``asdict`` makes of a dataclass of numbers; ``schemas``: of other fields."""
    return _object(**{one.name: schemas.get(one.name, NUMBER) for one in fields(kind)})


def _call(**more: Schema) -> Schema:
    function = _object(name=TEXT, arguments=TEXT)
    return _object(id=TEXT, type={"const": "function"}, function=function, **more)


_USAGE = _object(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=_object(cached_tokens=COUNT),
)
_EXTENSION = _object(
    {"board": {"type": "object"}, "session_error": TEXT, "tokens": IDS},
    finish_reason={"enum": list(get_args(FinishReason))},
    accept_length=NUMBER,
    accept_lengths=IDS,
    timings=_of(PlanTimings),
    tokens_per_second=NUMBER,
    speculative=FLAG,
    lossy=FLAG,
    relaxed_tokens=COUNT,
    reused_tokens=COUNT,
    prompt_tokens=COUNT,
    seed=COUNT,
    session=_or_null(TEXT),
    malformed=_list(_object(text=TEXT, reason=TEXT)),
)
_MESSAGE = _object(
    {"reasoning_content": TEXT, "tool_calls": _list(_call())},
    role={"const": "assistant"},
    content=_or_null(TEXT),
    refusal={"type": "null"},
)
_DELTA: Schema = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": _list(_call(index=COUNT)),
    },
    "additionalProperties": False,
}
_TOKEN: Schema = {"token": TEXT, "logprob": NUMBER, "bytes": _or_null(IDS)}
_ENTRY = _object({"token_id": COUNT}, **_TOKEN, top_logprobs=_list(_object({"token_id": COUNT}, **_TOKEN)))
_CHAT_LOGPROBS = _object(content=_list(_ENTRY), refusal={"type": "null"})
_LOGPROBS = _object(
    {"content": _list(_ENTRY)},
    tokens=_list(TEXT),
    token_logprobs=_list(NUMBER),
    top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
    text_offset=IDS,
)


def _completion(kind: str, choice: Schema, optional: Schema | None = None, **more: Schema) -> Schema:
    """An answer, or a chunk of one."""
    logprobs = _or_null(_LOGPROBS if kind == "text_completion" else _CHAT_LOGPROBS)
    said = _object(index={"const": 0}, logprobs=logprobs, **choice)
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}
    return _object(optional, **head, choices={**_list(said), "maxItems": 1}, **more)


def _chunk(kind: str, choice: Schema) -> Schema:
    """A chunk: a piece, the end, or the usage."""
    some = _object({"tokens": IDS})
    extra = {"anyOf": [some, _ref("Extension")]}
    return _completion(
        kind,
        {**choice, "finish_reason": _or_null(_FINISH)},
        {"usage": _or_null(_ref("Usage")), "edge_dflash": extra},
    )


def _session(optional: Schema | None = None, **more: Schema) -> Schema:
    return _object(optional, id=TEXT, object={"const": "edge_dflash.session"}, **more)


_WHOLE = {"usage": _ref("Usage"), "edge_dflash": _ref("Extension")}
SCHEMAS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=_or_null(TEXT))),
    "Usage": _USAGE,
    "Extension": _EXTENSION,
    "ChatCompletion": _completion("chat.completion", {"message": _MESSAGE, "finish_reason": _FINISH}, **_WHOLE),
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": _DELTA}),
    "Completion": _completion("text_completion", {"text": TEXT, "finish_reason": _FINISH}, **_WHOLE),
    "CompletionChunk": _chunk("text_completion", {"text": TEXT}),
    "Session": _session(
        {"messages": _list({"type": "object"}), "token_ids": IDS}, open=FLAG, tokens=_or_null(COUNT), saved=FLAG
    ),
    "SessionList": _object(object={"const": "list"}, data=_list(_ref("Session"))),
    "SessionForked": _session(),
    "SessionSaved": _session(saved={"const": True}, bytes=COUNT),
    "SessionDeleted": _session(deleted={"const": True}),
    "Tokens": _object(tokens=IDS),
    "Model": _object(
        {
            "edge_dflash": _object(
                **{one.name: COUNT for one in fields(PairShape)},
                stop_token_ids=IDS,
                tokenizer=FLAG,
                chat=FLAG,
                fingerprint=TEXT,
            )
        },
        id=TEXT,
        object={"const": "model"},
        created=COUNT,
        owned_by=TEXT,
    ),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "Health": _object(
        status={"enum": ["ok", "hung", "failed"]},
        state={"enum": list(get_args(State))},
        running=FLAG,
        waiting=COUNT,
        stalled_seconds=NUMBER,
    ),
    "Ready": _object(status={"enum": list(get_args(State))}),
}
