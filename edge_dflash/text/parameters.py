"""What a tool's schema says of a parameter: its types, and its values where it names them.

The grammar of a call and whoever reads one ask here. Of any schema, also of one that no grammar is made of: what is not
understood says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from edge_dflash.common.pointer import resolve
from edge_dflash.errors import RequestError

# What a schema without a type says all the same: keywords that mean nothing for values of other types.
_IMPLIED = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
               "maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains", "minItems",
              "maxItems", "uniqueItems", "unevaluatedItems"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
}  # fmt: skip
_READ = frozenset(("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"))
_WORTH = 1000  # schemas that are looked at for one: branches multiply
_DEPTH = 32


@dataclass(frozen=True)
class Meaning:
    """What a schema says of its values."""

    kinds: set[str] | None = None  # their types; None where it says nothing
    named: bool = True  # no value of another type satisfies it; False: its keywords imply the types
    values: list[Any] | None = None  # there are no others; None where it does not name them
    exact: bool = True  # it says nothing else


_UNKNOWN = Meaning(exact=False)


def parameter(root: Mapping[str, Any], name: str) -> object:
    """The schema of one parameter of the schema of all, whose references it shares."""
    return _parameter(root, root, name, [_WORTH])


def _parameter(node: object, root: Mapping[str, Any], name: str, left: list[int]) -> object:
    said: list[object] = []
    for part in parts_of(node, root, left):
        named = part.get("properties")
        if isinstance(named, Mapping) and name in named:
            said.append(named[name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            said.append(part["additionalProperties"])
        for key in ("anyOf", "oneOf"):
            if isinstance(part.get(key), list):
                said.append({"anyOf": [_parameter(option, root, name, left) for option in part[key]]})
    return said[0] if len(said) == 1 else {"allOf": said} if said else {}


def parts_of(
    node: object, root: Mapping[str, Any] | None = None, left: list[int] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Schemas that all hold where one does: itself, what it refers to and its ``allOf``."""
    left = [_WORTH] if left is None else left
    left[0] -= 1
    if not isinstance(node, Mapping) or left[0] < 0:
        return
    root = node if root is None else root
    yield node
    inside = node["allOf"] if isinstance(node.get("allOf"), list) else []
    for child in (*inside, _target(node.get("$ref"), root)):
        yield from parts_of(child, root, left)


def meaning(schema: object, root: Mapping[str, Any]) -> Meaning:
    """What a schema says, whose references are those of ``root``."""
    return _read(schema, root, _DEPTH, [_WORTH])


def _read(schema: object, root: Mapping[str, Any], depth: int, left: list[int]) -> Meaning:
    """Every keyword narrows what the others leave."""
    left[0] -= 1
    if isinstance(schema, bool):
        return Meaning() if schema else Meaning(set(), values=[])
    if not isinstance(schema, Mapping) or not depth or left[0] < 0:
        return _UNKNOWN
    inside = partial(_read, root=root, depth=depth - 1, left=left)
    said = list(_own(schema, left))
    if "$ref" in schema:
        said.append(inside(_target(schema["$ref"], root)))
    if isinstance(schema.get("allOf"), list):
        said += map(inside, schema["allOf"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            said.append(_either([inside(option) for option in schema[key]]))
    made = reduce(_both, said, Meaning())
    if made.kinds is None:
        implied = {kind for kind, keywords in _IMPLIED.items() if not schema.keys().isdisjoint(keywords)}
        made = replace(made, kinds=implied or None, named=not implied)
    elif made.values is not None:
        made = replace(made, values=[value for value in made.values if type_names(value) & made.kinds])
    return replace(made, exact=made.exact and schema.keys() <= _READ)


def _own(schema: Mapping[str, Any], left: list[int]) -> Iterator[Meaning]:
    """What the keywords say that hold no schemas."""
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            left[0] -= len(values) // 20
            yield Meaning(set[str]().union(*map(type_names, values)), values=values)
    named = schema.get("type")
    kinds = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if kinds:
        null = {"null"} if schema.get("nullable") is True else set()  # OpenAPI's
        yield Meaning(kinds | null, values=[None] if kinds == {"null"} else None)


def _either(options: list[Meaning]) -> Meaning:
    kinds: set[str] | None = set()
    values: list[Any] | None = []
    for option in options:
        kinds = None if kinds is None or option.kinds is None else kinds | option.kinds
        values = None if values is None or option.values is None else [*values, *option.values]
    return Meaning(kinds, all(one.named for one in options), values, all(one.exact for one in options))


def _both(some: Meaning, other: Meaning) -> Meaning:
    exact = some.exact and other.exact
    values = some.values if other.values is None else other.values
    if some.values is not None and other.values is not None:
        known = set(map(written, other.values))
        values = [value for value in some.values if written(value) in known]
    if some.kinds is None or other.kinds is None:
        one = some if other.kinds is None else other
        return Meaning(one.kinds, one.named, values, exact)
    # a whole number is a number
    left, right = (kinds | {"integer"} if "number" in kinds else kinds for kinds in (some.kinds, other.kinds))
    kinds = left & right
    named = (some.named and (other.named or left <= kinds)) or (other.named and right <= kinds)
    return Meaning(kinds, named, values, exact)


def _target(reference: object, root: Mapping[str, Any]) -> object:
    try:
        return resolve(root, reference) if isinstance(reference, str) else None
    except RequestError:
        return None


def type_names(value: object) -> set[str]:
    """JSON Schema's names for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return {"integer", "number"}
    names: dict[type, str] = {float: "number", str: "string", list: "array", dict: "object"}
    return {names[type(value)]}


def written(value: Any) -> str:
    """A value as it stands between the tags of a parameter."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
