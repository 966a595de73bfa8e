"""What the readers of bodies ask for, written down while they read samples: the JSON Schema of a body.

The readers are the one place that says which fields there are. :class:`~edge_dflash.serve.fields.Fields` notes here
what it is asked for; the document of the API is made of that, so that a new field is in it at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

Schema = dict[str, Any]


class ObjectRecord:
    """One object that was read. ``tag``: the field, and its value, that decides which others there are.

    Where no field says so, only its presence, the tag's field is "".
    """

    def __init__(self) -> None:
        self.fields: dict[str, list[Schema]] = {}
        self.needed: set[str] = set()
        self.tag: tuple[str, str] | None = None
        self.also: Schema = {}

    def field(self, key: str, schema: Schema, *, needed: bool) -> None:
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
                self.field(key, schema, needed=key in other.needed)
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
        return made if key in kind.needed or made in ({}, null) else {"anyOf": [made, null]}


RECORD: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded() -> Iterator[Record]:
    """Note what is asked of the bodies that are read inside the block."""
    token = RECORD.set(record := Record())
    try:
        yield record
    finally:
        RECORD.reset(token)
