"""The document of the API (OpenAPI 3.1), made of what the code itself goes by.

A route is declared where it is handled (:func:`operation`), its body in :mod:`edge_dflash.serve.bodies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from edge_dflash.common.nested import Object
from edge_dflash.common.rules import Schema
from edge_dflash.decode.options import Options
from edge_dflash.serve.bodies import COUNT, NAME, STRING, exactly
from edge_dflash.serve.config import DefaultConfig, ServeConfig
from edge_dflash.version import __version__

BOOLEAN: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
IDS: Schema = {"type": "array", "items": COUNT}


def ref(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """A value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = exactly(error=exactly(message=STRING, type=STRING, param=or_null(STRING), code=or_null(STRING)))

# Statuses of a refusal, and why: of every route, and of kinds of routes.
_EVERYWHERE = {
    401: "The API key is missing or wrong.",
    403: "The request names another machine as its host.",
    431: "The headers are too long.",
    500: "A defect of the service.",
    503: "The service is loading, is stopping, has failed, or has too many connections.",
}
WITH_BODY = {
    400: "The body, or a part of it, cannot be taken.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not application/json.",
}
RUNS = {404: "There is no such model.", 409: "The session is in use.", 429: "The queue is full."}
NAMED = {400: "This is no name of a session.", 404: "There is no such session.", 409: "The session is in use."}
TAKEN = {409: "The session is in use, or the name that was given is another session's."}
STORED = {507: "The disk is full."}


@dataclass(frozen=True)
class Operation:
    """A method of a path, and what the document says of it."""

    method: str
    path: str
    summary: str
    answer: Schema | str | None  # JSON: its schema, or the name of that; None: text
    handler: Callable[..., Any]  # (Service, Request) to an ASGI response; its name is the operation's id
    refusals: Mapping[int, str]
    body: Object | Callable[[int], Object] | None = None  # of the most tokens of an answer, 0: no limit of the service
    event: str = ""  # of a stream: the name of its schema
    unready: bool = False  # the answer comes with 503, too


def operation(
    method: str, path: str, summary: str, answer: Schema | str | None, refusals: Mapping[int, str] = {}, **more: Any
) -> Callable[[Callable[..., Any]], Operation]:
    """The operation of the handler below it; see the fields of :class:`Operation`."""
    return lambda handler: Operation(method, path, summary, answer, handler, refusals, **more)


def document(
    operations: Iterable[Operation], schemas: Mapping[str, Schema], config: ServeConfig, *, key: bool
) -> dict[str, Any]:
    """The document of a service. ``key``: whether TCP callers must send one."""
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path.replace(":path", ""), {})[one.method.lower()] = _described(one, config)
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "edge-dflash", "version": __version__},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR, **schemas}},
    }
    if key:
        made["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"key": []}]
    return made


def _described(one: Operation, config: ServeConfig) -> dict[str, Any]:
    made: dict[str, Any] = {"operationId": one.handler.__name__, "summary": one.summary}
    if "{" in one.path:
        schema = STRING if ":path}" in one.path else NAME.schema
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    if one.body is not None:
        body = one.body if isinstance(one.body, Object) else one.body(config.limits.new_tokens)
        made["requestBody"] = {"required": True, "content": _json(_with_defaults(body.schema, config.defaults))}
    answer = ref(one.answer) if isinstance(one.answer, str) else one.answer
    content = {"text/plain": {"schema": STRING}} if answer is None else _json(answer)
    if one.event:
        events = "data: and one of these objects each, then data: [DONE]; an error is the last but one."
        kinds = {"anyOf": [ref(one.event), ref("Error")]}
        content["text/event-stream"] = {"schema": {**STRING, "description": events}, "x-event": kinds}
    answers = {status: (why, _json(ref("Error"))) for status, why in {**_EVERYWHERE, **one.refusals}.items()}
    answers[200] = ("Done.", content)
    if one.unready:
        answers[503] = ("No.", _json({"anyOf": [answer, ref("Error")]}))
    made["responses"] = {str(status): {"description": why, "content": what} for status, (why, what) in answers.items()}
    return made


def _json(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _with_defaults(schema: Schema, defaults: DefaultConfig) -> Schema:
    """Write what holds where a field is left out, as far as it is a value."""
    known = {one.name: one.default for one in fields(Options) if isinstance(one.default, bool | int | float)}
    known |= {one.name: getattr(defaults, one.name) for one in fields(defaults)}
    known |= {"stream": False, "tokens": False}
    del known["seed"]  # drawn anew for each request that samples
    for key, found in schema.get("properties", {}).items():
        if key in known:
            found["default"] = known[key]
        if key == "edge_dflash":
            _with_defaults(found["anyOf"][0], defaults)
    return schema
