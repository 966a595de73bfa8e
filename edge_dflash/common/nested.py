"""What JSON, TOML and YAML nest, read by rules: lists, objects, and objects of several kinds.

All structured input that people write is read by them: bodies over HTTP, the service's settings, recipes and board
profiles; what the OpenAPI document says of a body is their ``schema``. Above them :mod:`edge_dflash.model.fields` says
which keys of a model's config are read; files that only this package writes are read by their dataclasses
(:mod:`edge_dflash.common.tables`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from edge_dflash.common.rules import FLAG, TEXT, FieldError, Rule, Schema, one_of, such, unknown_name
from edge_dflash.errors import RequestError, short


@dataclass(frozen=True)
class Items:
    """A list."""

    of: ValueReader
    least: int = 0

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        return {"type": "array", "items": self.of.schema, **({"minItems": self.least} if self.least else {})}

    def read(self, value: Any, place: str) -> list[Any]:
        """As that of :class:`Rule`."""
        if not isinstance(value, list):
            raise FieldError(f"{place} is {short(value)}; give a list", place)
        if len(value) < self.least:
            raise FieldError(f"{place} is empty; give at least one", place)
        return [self.of.read(item, f"{place}[{at}]") for at, item in enumerate(value)]


@dataclass(frozen=True)
class Object:
    """A mapping with these fields and no others; those of ``needed`` must be there, and it says what to give for them.

    ``lenient``: null counts as absent and 3.0 as 3, as in the OpenAI API.
    """

    fields: Mapping[str, ValueReader]
    needed: Mapping[str, str] = field(default_factory=dict)
    lenient: bool = False
    also: Schema = field(default_factory=dict)  # what its reader checks of several fields together

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        made: Schema = {"type": "object", "properties": {name: self._field(name) for name in self.fields}}
        if self.needed:
            made["required"] = sorted(self.needed)
        return {**made, **({"allOf": [self.also]} if self.also else {}), "additionalProperties": False}

    def _field(self, name: str) -> Schema:
        found = self.fields[name].schema
        if name in self.needed or not found or found == {"type": "null"}:
            return found
        return {"anyOf": [found, {"type": "null"}]}

    def read(self, value: Any, place: str = "") -> dict[str, Any]:
        """The fields that are given, as :meth:`Rule.read`."""
        if not isinstance(value, Mapping):
            raise FieldError(
                f"{place or 'the document'} is {short(value)}; give a mapping of {', '.join(self.fields)}", place
            )
        given = {name: item for name, item in value.items() if item is not None or not self.lenient}
        made, before = {}, f"{place}." if place else ""
        for name, entry in self.fields.items():
            if name in given:
                item = given.pop(name)
                whole = isinstance(entry, Rule) and entry.schema.get("type") == "integer"
                if self.lenient and whole and type(item) is float and item.is_integer():
                    item = int(item)
                made[name] = entry.read(item, before + name)
            elif name in self.needed:
                raise FieldError(f"{before}{name} is missing; {self.needed[name]}", before + name)
        if given:
            raise unknown_name(str(next(iter(given))), self.fields, before)
        return made


@dataclass(frozen=True)
class Tagged:
    """A mapping of one of several kinds; the text in its field ``tag`` says of which."""

    tag: str
    kinds: Mapping[str, Object]

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        made = []
        for name, kind in self.kinds.items():
            schema = kind.schema
            properties = {self.tag: {"type": "string", "const": name}, **schema["properties"]}
            made.append({**schema, "properties": properties, "required": sorted({self.tag, *kind.needed})})
        return {"oneOf": made}

    def read(self, value: Any, place: str) -> dict[str, Any]:
        """As that of :class:`Rule`."""
        if not isinstance(value, Mapping):
            raise FieldError(f"{place} is {short(value)}; give an object with {self.tag}", place)
        tag = one_of(*self.kinds).read(value.get(self.tag), f"{place}.{self.tag}")
        rest = {name: item for name, item in value.items() if name != self.tag}
        return {self.tag: tag, **self.kinds[tag].read(rest, place)}


ValueReader: TypeAlias = Rule | Items | Object | Tagged


# Rules of what JSON and TOML hold, and their bounds -------------------------------------------------------------------

LINE = such(lambda value: bool(TEXT.take(value).strip()), "text in quotes, not blank", {"type": "string"})


def only(why: str, *accepted: object) -> Rule:
    """A field that is known and has one meaning here: everything but ``accepted`` is refused, not dropped."""

    def same(value: Any) -> bool:  # 1 and 1.0 are equal, 1 and True are not
        return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in accepted)

    schema = {"enum": list(accepted), "description": why} if accepted else {"type": "null"}
    return replace(such(same, "", schema), wanted=why)


def as_json(rule: Rule) -> Rule:
    """The rule where null counts as absent, in JSON's and TOML's words."""
    return replace(rule, none=False, wanted="give true or false" if rule.take is FLAG.take else rule.wanted)


def refuse_nul(values: Mapping[str, Any]) -> None:
    """Raise RequestError, naming it, for a text or path among the values that holds a NUL."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, str | os.PathLike) and "\0" in os.fsdecode(one):
                raise RequestError(f"{name} is {short(os.fsdecode(one))}; give one without NUL (U+0000)")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has objects or arrays in more levels than ``levels``."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
    return bool(level)
