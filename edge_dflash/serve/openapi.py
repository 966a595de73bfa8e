"""The document of the API (OpenAPI 3.1), made of what the code itself goes by.

The routes are those that the application has (OPERATIONS); what a body may be is what its reader asks for while it
reads samples (:mod:`edge_dflash.serve.record`); answers are in :mod:`edge_dflash.serve.answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from edge_dflash.decode.options import Options
from edge_dflash.serve.answers import SCHEMAS
from edge_dflash.serve.config import DefaultConfig, LimitConfig, ServeConfig
from edge_dflash.serve.names import NAME, new_name, other_name
from edge_dflash.serve.openai import chat_call, completion_call, encode_call
from edge_dflash.serve.record import Schema, recorded
from edge_dflash.version import __version__

_EVERYWHERE = {
    401: "The API key is missing or wrong.",
    403: "The request names another machine as its host.",
    431: "The headers are too long.",
    500: "A defect of the service.",
    503: "The service is loading, is stopping, has failed, or has too many connections.",
}
_WITH_BODY = {
    400: "The body, or a part of it, cannot be taken.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
}
_RUNS = {404: "There is no such model.", 409: "The session is in use.", 429: "The queue is full."}
_NAMED = {400: "This is no name of a session.", 404: "There is no such session.", 409: "The session is in use."}
_STORED = {507: "The disk is full."}
_PARAMETERS: dict[str, Schema] = {"name": {"type": "string", **NAME}, "name:path": {"type": "string"}}


@dataclass(frozen=True)
class Operation:
    """A route. ``samples``: bodies whose reading goes through everything that ``read`` may ask for."""

    method: str
    path: str
    endpoint: str  # method of Routes, and the operation's id
    summary: str
    answer: str  # name in SCHEMAS; "": text of Prometheus
    refusals: Mapping[int, str]
    read: Callable[..., object] | None = None
    samples: tuple[dict[str, Any], ...] = ()
    chunk: str = ""  # name in SCHEMAS of the events of a stream


_CALLS: dict[str, Any] = {"tools": [{"function": {"name": "f"}}], "tool_choice": "required"}
_SESSIONS = "/v1/edge_dflash/sessions"
_HELLO = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "assistant", "tool")]
_FORMS = ({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}})
_GENERATES = tuple(
    {"stream": True, "stream_options": {}, "edge_dflash": {}, "response_format": form} for form in _FORMS
)
OPERATIONS = (
    Operation(
        "POST", "/v1/chat/completions", "chat", "Messages in, an answer out.", "ChatCompletion",
        {**_WITH_BODY, **_RUNS, **_STORED}, chat_call,
        tuple({"messages": _HELLO, **body} for body in (*_GENERATES, _CALLS)), "ChatCompletionChunk",
    ),
    Operation(
        "POST", "/v1/completions", "completions", "A text or token ids, used as they are.", "Completion",
        {**_WITH_BODY, **_RUNS, **_STORED}, completion_call,
        tuple({"prompt": "x", **body} for body in _GENERATES), "CompletionChunk",
    ),
    Operation(
        "POST", "/v1/edge_dflash/encode", "encode", "Token ids of messages or of a text.", "Tokens",
        _WITH_BODY, encode_call, ({"messages": _HELLO}, {"text": "x"}),
    ),
    Operation("GET", "/v1/models", "models", "The one model.", "ModelList", {}),
    Operation(
        "GET", "/v1/models/{name:path}", "model", "The model, with its sizes.", "Model",
        {404: "There is no such model."},
    ),
    Operation("GET", "/health", "health", "Whether the engine gets on.", "Health", {}),
    Operation("GET", "/ready", "ready", "Whether requests are taken.", "Ready", {}),
    Operation("GET", "/metrics", "metrics", "Figures for Prometheus.", "", {}),
    Operation("GET", "/openapi.json", "openapi", "This document.", "Document", {}),
    Operation("GET", _SESSIONS, "sessions", "All sessions, open and saved.", "SessionList", {}),
    Operation("GET", _SESSIONS + "/{name}", "session", "One session.", "Session", _NAMED),
    Operation(
        "DELETE", _SESSIONS + "/{name}", "delete_session", "Forget a session and its file.", "SessionDeleted",
        {**_NAMED, **_STORED},
    ),
    Operation(
        "POST", _SESSIONS + "/{name}/save", "save_session", "Write a session.", "SessionSaved",
        {**_WITH_BODY, **_NAMED, **_STORED}, other_name, ({},),
    ),
    Operation(
        "POST", _SESSIONS + "/{name}/fork", "fork_session", "Another session that goes on from here.",
        "SessionForked", {**_WITH_BODY, **_NAMED, **_RUNS, **_STORED}, new_name, ({"to": "x"},),
    ),
)  # fmt: skip


def document(config: ServeConfig, *, key: bool) -> dict[str, Any]:
    """The document of a service. ``key``: whether TCP callers must send one."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, config)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "edge-dflash", "version": __version__},
        "paths": paths,
        "components": {"schemas": SCHEMAS},
    }
    if key:
        made["components"] = {**made["components"], "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        made["security"] = [{"key": []}]
    return made


def _operation(operation: Operation, config: ServeConfig) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": operation.endpoint, "summary": operation.summary}
    if "{" in operation.path:
        name = operation.path.partition("{")[2].partition("}")[0]
        place = {"name": "name", "in": "path", "required": True}
        made["parameters"] = [{**place, "schema": _PARAMETERS[name]}]
    if operation.read is not None:
        schema = _with_defaults(_read(operation, config), config.defaults)
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    made["responses"] = {"200": {"description": "Done.", "content": _content(operation)}}
    if operation.answer in ("Health", "Ready"):
        kinds = [_named(operation.answer), _named("Error")]
        made["responses"]["503"] = {"description": "No.", "content": {"application/json": {"schema": {"anyOf": kinds}}}}
    refused = {"application/json": {"schema": _named("Error")}}
    for status, why in sorted((_EVERYWHERE | dict(operation.refusals)).items()):
        made["responses"].setdefault(str(status), {"description": why, "content": refused})
    return made


def _content(operation: Operation) -> dict[str, Any]:
    if not operation.answer:
        return {"text/plain": {"schema": {"type": "string"}}}
    content: dict[str, Any] = {"application/json": {"schema": _named(operation.answer)}}
    if operation.chunk:
        events = "data: and one of these objects each, then data: [DONE]; an error is the last but one."
        kinds = [_named(operation.chunk), _named("Error")]
        content["text/event-stream"] = {
            "schema": {"type": "string", "description": events},
            "x-event": {"anyOf": kinds},
        }
    return content


def _named(name: str) -> Schema:
    return {"type": "object"} if name == "Document" else {"$ref": f"#/components/schemas/{name}"}


def _read(operation: Operation, config: ServeConfig) -> Schema:
    """The schema of a body, from reading the samples."""
    assert operation.read is not None
    generates = operation.read in (chat_call, completion_call)
    limits = LimitConfig(new_tokens=config.limits.new_tokens)  # the samples need not fit into the others
    settings = (limits, config.defaults) if generates else ()
    with recorded() as record:
        for sample in operation.samples:
            operation.read(sample, *settings)
    return record.schema()


def _with_defaults(schema: Schema, defaults: DefaultConfig) -> Schema:
    """Write what holds where a field is left out, as far as it is a value."""
    known = {one.name: one.default for one in fields(Options) if isinstance(one.default, bool | int | float)}
    known |= {one.name: getattr(defaults, one.name) for one in fields(defaults)}
    known |= {"stream": False, "tokens": False}
    del known["seed"]  # drawn anew for each request that samples
    properties = schema.get("properties", {})
    for key, field in properties.items():
        if key in known:
            field["default"] = known[key]
        if key == "edge_dflash":
            _with_defaults(field["anyOf"][0], defaults)
    return schema
