"""A schema in plain form: the same documents, said in the keywords and values that a grammar is made of.

What forbids nothing is left out. A oneOf is an anyOf, because no two of its options hold together; the property that a
discriminator names is required, as OpenAPI says. Names of properties are listed, or have a pattern. Formats of whole
numbers are their bounds, lengths have no decimal point. Whatever is referred to is a definition under ``$defs``, and
all definitions are referred to.

The schema was taken by :func:`edge_dflash.decode.grammar.schema_check.check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any, TypeAlias

from edge_dflash.common.pointer import resolve
from edge_dflash.decode.grammar.schema_apart import tag_of
from edge_dflash.decode.grammar.schema_check import all_nodes
from edge_dflash.decode.grammar.schema_formats import INTEGERS, WITHOUT_LOOKING
from edge_dflash.decode.grammar.schema_idle import forbids_nothing, may_be
from edge_dflash.decode.grammar.schema_keywords import (
    COUNTS,
    DEFINITIONS,
    KNOWN,
    LISTS,
    NAMED,
    SINGLE,
    Node,
    is_number,
    kinds_of,
)
from edge_dflash.decode.grammar.schema_names import Names

Tags: TypeAlias = "tuple[str, ...]"  # properties that discriminators name

_PLACE = "#/$defs/"
_DEFINITION = re.compile(r"#/(?:\$defs|definitions)/([\w.-]+)")
_SAME = ("$ref", "allOf", "anyOf", "oneOf")  # schemas inside that are of the same value
_SHORT = 64  # bytes of a schema that is written again rather than referred to


def plain(root: dict[str, Any]) -> dict[str, Any]:
    """The schema in plain form. ``root`` is not changed. Raises RequestError when that is much longer."""
    return _Plain(root).root()


def alone(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema inside a plain one, with the definitions that it needs."""
    found: dict[str, Any] = {}
    pending: list[Any] = [schema]
    while pending:
        for node in all_nodes(pending.pop()):
            name = node["$ref"].removeprefix(_PLACE) if "$ref" in node else None
            if name is not None and name not in found:
                found[name] = root["$defs"][name]
                pending.append(found[name])
    return {**schema, "$defs": found} if found else schema


class _Plain:
    """One schema, each part of which is written once."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._names = Names(partial(resolve, root))
        known = {name for key in DEFINITIONS for name in root.get(key, ())}
        self._fresh = (name for name in map("left{}".format, count()) if name not in known)
        self._defs: dict[str, Any] = {}
        self._places: dict[tuple[str, Tags], str] = {}  # of a reference: the name of its definition
        self._taken: set[str] = set()  # names
        self._pending: list[tuple[str, Node, Tags]] = []
        self._shared: dict[str, str] = {}  # a schema as JSON: the name of its definition

    def root(self) -> dict[str, Any]:
        made: dict[str, Any] = self._node(self._root)
        while self._pending:
            name, node, tags = self._pending.pop()
            self._defs[name] = {} if node is True else self._node(node, tags)
        return {**made, "$defs": self._defs} if self._defs else made

    def _node(self, node: Any, tags: Tags = ()) -> Any:
        """A schema; ``tags`` are required, by its options where it has some."""
        if not isinstance(node, dict):
            return node
        kept = [key for key in node if key not in DEFINITIONS and not forbids_nothing(key, node)]
        made = {key: self._value(key, node, tags) for key in kept if key in KNOWN}
        assert set(kept) - KNOWN <= {"propertyNames", "unevaluatedProperties"}, kept
        if "propertyNames" in kept:
            self._name(node, made)
        if "unevaluatedProperties" in kept:
            made["additionalProperties"] = False
        if "oneOf" in made:
            options = made.pop("oneOf")
            if "anyOf" in made:
                made["allOf"] = [*made.get("allOf", ()), {"anyOf": options}]
            else:
                made["anyOf"] = options
        if "type" in made and node.get("nullable") is True:
            made["type"] = kinds_of(node)
        if made.get("format") in INTEGERS and may_be(node, "integer", "number"):
            _be_within(made, *INTEGERS[made.pop("format")])
        if needed := [tag for tag in tags if tag in node.get("properties", ()) or set(kept).isdisjoint(_SAME)]:
            made["required"] = list(dict.fromkeys([*made.get("required", ()), *needed]))
        return made

    def _value(self, key: str, node: dict[str, Any], tags: Tags) -> Any:
        value = node[key]
        if key == "oneOf" and (tag := tag_of(node)):
            tags = tuple(dict.fromkeys((*tags, tag)))
        inside = tags if key in _SAME else ()
        if key == "$ref":
            return self._reference(value, inside)
        if key in NAMED:
            return {name: self._node(child) for name, child in value.items()}
        if key in LISTS and isinstance(value, list):
            return [self._node(child, inside) for child in value]
        if key in SINGLE:
            return self._node(value)
        if key == "pattern":
            return WITHOUT_LOOKING.get(value, value)
        if key in COUNTS or (is_number(value) and value == 0):  # 2.0 is 2, -0.0 is 0
            return int(value)
        return value

    def _reference(self, reference: str, tags: Tags) -> str:
        """The place of a definition, which is written later."""
        found = resolve(self._root, reference)
        required: Iterable[str] = found.get("required", ()) if isinstance(found, dict) else ()
        tags = tuple(tag for tag in tags if tag not in required)
        if (reference, tags) not in self._places:
            own = _DEFINITION.fullmatch(reference)
            if own and own[1] not in self._taken:
                name = own[1]
            else:
                name = next(self._fresh)
                if reference != "#" or tags:
                    self._names.spend_copy(reference, found)
            self._taken.add(name)
            self._places[reference, tags] = name
            self._pending.append((name, found, tags))
        return _PLACE + self._places[reference, tags]

    def _name(self, node: dict[str, Any], made: dict[str, Any]) -> None:
        """Say propertyNames by other keywords."""
        names, rest = self._names.said(node), made.get("additionalProperties", True)
        assert names is not None
        made["additionalProperties"] = False
        if isinstance(names, str):
            made["patternProperties"] = {names: rest}
            return
        text = json.dumps(rest)
        if len(text) > _SHORT:
            if text not in self._shared:
                self._shared[text] = next(self._fresh)
                self._defs[self._shared[text]] = rest
            rest = {"$ref": _PLACE + self._shared[text]}
        known, listed = made.get("properties", {}), set(names)
        made["properties"] = {name: known[name] for name in known if name in listed}
        made["properties"] |= {name: rest for name in names if name not in known}
        if made.get("minProperties") == len(made["properties"]):
            del made["minProperties"]
            made["required"] = list(dict.fromkeys([*made.get("required", ()), *made["properties"]]))


def _be_within(made: dict[str, Any], low: int, high: int) -> None:
    """Let numbers be whole, and within bounds besides those that are given."""
    made["type"] = list(dict.fromkeys("integer" if kind == "number" else kind for kind in kinds_of(made)))
    for key, bound, sign in (("minimum", low, 1), ("maximum", high, -1)):
        given = made.get(key)
        if not is_number(given) or (bound - given) * sign > 0:
            made[key] = bound
            if isinstance(made.get(f"exclusive{key.capitalize()}"), bool):  # it was of the other bound
                del made[f"exclusive{key.capitalize()}"]
