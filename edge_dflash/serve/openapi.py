"""The document of the API (OpenAPI 3.1), made of what the code itself goes by.

A route is declared where it is handled (:class:`Operations`). What its body may be is what its reader asks for while it
reads samples: :class:`~edge_dflash.serve.fields.BodyFields` notes that in a :class:`Record`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from edge_dflash.decode.options import Options
from edge_dflash.serve.config import DefaultConfig, LimitConfig, ServeConfig
from edge_dflash.version import __version__

Schema: TypeAlias = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS: Schema = {"type": "array", "items": COUNT}
NAME: Schema = {"pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"}  # of a session: a file of the state directory, no path


def ref(name: str) -> Schema:
    """A schema of the document's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def list_of(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """A value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def exactly(optional: Schema | None = None, **properties: Any) -> Schema:
    """An object that has these properties, perhaps the optional ones, and no others."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": sorted(properties),
        "additionalProperties": False,
    }


ERROR = exactly(error=exactly(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT)))

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


# Bodies ---------------------------------------------------------------------------------------------------------------


@dataclass
class ObjectRecord:
    """One object that was read."""

    fields: dict[str, list[Schema]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)
    tag: tuple[str, str] | None = None  # field and value that decide which others there are; "": its mere presence
    also: Schema = field(default_factory=dict)

    def note(self, key: str, schema: Schema, *, needed: bool) -> None:
        """A field was asked for."""
        found = self.fields.setdefault(key, [])
        if schema not in found:
            found.append(schema)
        if needed:
            self.needed.add(key)

    def add(self, other: ObjectRecord) -> None:
        """What was asked of another object of the same kind."""
        for key, schemas in other.fields.items():
            for schema in schemas:
                self.note(key, schema, needed=key in other.needed)
        self.also |= other.also


class Record:
    """All objects that were read, by their paths without indexes (``messages[].content``), and their kinds."""

    def __init__(self) -> None:
        self._objects: dict[str, list[ObjectRecord]] = {}

    def object(self, path: str) -> ObjectRecord:
        """Begin an object."""
        one = ObjectRecord()
        self._objects.setdefault(re.sub(r"\[\d+\]", "[]", path), []).append(one)
        return one

    def schema(self, path: str = "") -> Schema:
        """The schema of the objects at a path."""
        kinds: dict[tuple[str, str] | None, ObjectRecord] = {}
        for one in self._objects[path]:
            kinds.setdefault(one.tag, ObjectRecord()).add(one)
        made = [self._kind(path, tag, kind) for tag, kind in kinds.items()]
        return made[0] if len(made) == 1 else {"oneOf": made}

    def _kind(self, path: str, tag: tuple[str, str] | None, kind: ObjectRecord) -> Schema:
        properties = {key: self._field(path, key, kind) for key in kind.fields}
        if tag is not None and tag[0]:
            properties[tag[0]] = {"type": "string", "const": tag[1]}
        made: Schema = {"type": "object", "properties": properties}
        if kind.needed:
            made["required"] = sorted(kind.needed)
        if kind.also:
            made["allOf"] = [kind.also]
        return {**made, "additionalProperties": False}

    def _field(self, path: str, key: str, kind: ObjectRecord) -> Schema:
        inner = f"{path}.{key}" if path else key
        if inner in self._objects:
            made = self.schema(inner)
        else:
            schemas = kind.fields[key]
            made = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            if f"{inner}[]" in self._objects:
                made = {**made, "items": self.schema(f"{inner}[]")}
        null = {"type": "null"}  # counts as absent
        return made if key in kind.needed or made in ({}, null) else or_null(made)


RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded() -> Iterator[Record]:
    """Note what is asked of the bodies that are read inside the block."""
    token = RECORD.set(record := Record())
    try:
        yield record
    finally:
        RECORD.reset(token)


# Routes ---------------------------------------------------------------------------------------------------------------

Read: TypeAlias = Callable[[dict[str, Any], ServeConfig], Any]  # what a body says. Raises Refusal


@dataclass(frozen=True)
class Operation:
    """A method of a path, and what the document says of it."""

    method: str
    path: str
    summary: str
    answer: Schema | None  # JSON; None: text
    handler: Callable[..., Any]  # (Service, Request) to an ASGI response; its name is the operation's id
    refusals: Mapping[int, str]
    read: Read | None = None  # the reader of its body
    samples: tuple[dict[str, Any], ...] = ()  # bodies whose reading goes through everything that it may ask for
    event: Schema | None = None  # of a stream
    unready: bool = False  # the answer comes with 503, too


class Operations(list[Operation]):
    """The operations of a module; called, it declares that of the handler below it."""

    def __call__(
        self,
        method: str,
        path: str,
        summary: str,
        answer: Schema | None,
        refusals: Mapping[int, str] | None = None,
        **more: Any,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """See the fields of :class:`Operation`."""

        def declare(handler: Callable[..., Any]) -> Callable[..., Any]:
            self.append(Operation(method, path, summary, answer, handler, refusals or {}, **more))
            return handler

        return declare


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
        schema = TEXT if ":path}" in one.path else {**TEXT, **NAME}
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": schema}]
    if one.read is not None:
        limits = LimitConfig(new_tokens=config.limits.new_tokens)  # the samples need not fit into the others
        with recorded() as record:
            for sample in one.samples:
                one.read(sample, replace(config, limits=limits))
        schema = _with_defaults(record.schema(), config.defaults)
        made["requestBody"] = {"required": True, "content": _json(schema)}
    content = {"text/plain": {"schema": TEXT}} if one.answer is None else _json(one.answer)
    if one.event is not None:
        events = "data: and one of these objects each, then data: [DONE]; an error is the last but one."
        kinds = {"anyOf": [one.event, ref("Error")]}
        content["text/event-stream"] = {"schema": {**TEXT, "description": events}, "x-event": kinds}
    made["responses"] = {"200": {"description": "Done.", "content": content}}
    if one.unready:
        made["responses"]["503"] = {"description": "No.", "content": _json({"anyOf": [one.answer, ref("Error")]})}
    for status, why in sorted({**_EVERYWHERE, **one.refusals}.items()):
        made["responses"].setdefault(str(status), {"description": why, "content": _json(ref("Error"))})
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
