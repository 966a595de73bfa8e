"""Which keywords of a schema forbid nothing: judged by their value and what stands beside them, not by their name.

What allows everything is enforced by leaving it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_dflash.decode.grammar.schema_formats import (
    BYTE_HINTS,
    ENCODINGS,
    FORMATS,
    INTEGERS,
    NUMBER_HINTS,
    TEXT_HINTS,
)
from edge_dflash.decode.grammar.schema_keywords import ANNOTATIONS, DEFINITIONS, is_number, kinds_of

_EVALUATING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def is_free(schema: object, kind: str = "") -> bool:
    """Whether a schema allows every value, or every one of a type."""
    if not isinstance(schema, dict):
        return schema is True
    says = (key for key in schema if key not in DEFINITIONS and not forbids_nothing(key, schema))
    return all(key == "type" and kind in kinds_of(schema) for key in says)


def forbids_nothing(key: str, node: dict[str, Any]) -> bool:
    """Whether a keyword of ``node`` allows everything that the others allow."""
    if key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):  # that is the library's own
        return True
    return key in _IDLE and _IDLE[key](node[key], node)


def closes(key: str, node: dict[str, Any]) -> bool:
    """Whether ``unevaluatedProperties`` is ``additionalProperties``: false, where nothing else evaluates any."""
    return key == "unevaluatedProperties" and node[key] is False and node.keys().isdisjoint(_EVALUATING)


def may_be(node: dict[str, Any], *kinds: str) -> bool:
    """Whether a schema allows values of one of some types, as far as its ``type`` says."""
    return not kinds_of(node) or any(kind in kinds_of(node) for kind in kinds)


def _is_zero(value: object, _node: dict[str, Any]) -> bool:
    return is_number(value) and value == 0


def _all_free(value: object, _node: dict[str, Any]) -> bool:
    return isinstance(value, dict) and all(one == [] or is_free(one) for one in value.values())


def _closed_over(value: object, node: dict[str, Any]) -> bool:
    """Whether no object has more than ``value`` properties anyway."""
    names = node.get("properties", {})
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    return closed and is_number(value) and isinstance(names, dict) and value >= len(names)


def _required_anyway(value: object, node: dict[str, Any]) -> bool:
    names = node.get("required", [])
    return is_number(value) and value >= 0 and isinstance(names, list) and value <= len(set(map(str, names)))


def _has_pattern(node: dict[str, Any]) -> bool:
    parts = node.get("allOf", [])
    inside = parts if isinstance(parts, list) else []
    return any(isinstance(part, dict) and "pattern" in part for part in (node, *inside))


def _idle_format(name: object, node: dict[str, Any]) -> bool:
    """Whether every value has a format, or other keywords say which do and the format is not known."""
    texts, numbers = may_be(node, "string"), may_be(node, "integer", "number")
    if not isinstance(name, str) or (texts and name in FORMATS) or (numbers and name in INTEGERS):
        return False
    if (texts and name in TEXT_HINTS) or (numbers and name in NUMBER_HINTS):
        return True
    said = (texts and _has_pattern(node)) or (numbers and any(key in node for key in _BOUNDS))
    return said or "const" in node or "enum" in node


def _idle_encoding(name: object, node: dict[str, Any]) -> bool:
    if not isinstance(name, str) or name in ENCODINGS or not may_be(node, "string"):
        return False
    return name in BYTE_HINTS or _has_pattern(node) or "const" in node or "enum" in node


def _is_bytes(value: object, node: dict[str, Any]) -> bool:
    """Whether every text is of a media type; where it is encoded, any bytes."""
    return value == "text/plain" or (value == "application/octet-stream" and "contentEncoding" in node)


_IDLE: dict[str, Callable[[Any, dict[str, Any]], bool]] = {  # takes the value and its schema
    "allOf": lambda value, node: isinstance(value, list) and all(map(is_free, value)),
    "additionalItems": lambda value, node: is_free(value),
    "contains": lambda value, node: _is_zero(node.get("minContains"), node) and "maxContains" not in node,
    "contentEncoding": _idle_encoding,
    "contentMediaType": _is_bytes,
    "contentSchema": lambda value, node: is_free(value),
    "dependencies": _all_free,
    "dependentRequired": _all_free,
    "dependentSchemas": _all_free,
    "else": lambda value, node: True,  # if is judged by it, or is not there
    "format": _idle_format,
    "if": lambda value, node: is_free(node.get("then", True)) and is_free(node.get("else", True)),
    "maxContains": lambda value, node: "contains" not in node,
    "maxProperties": _closed_over,
    "minContains": lambda value, node: "contains" not in node or _is_zero(value, node),
    "minItems": _is_zero,
    "minLength": _is_zero,
    "minProperties": _required_anyway,
    "multipleOf": lambda value, node: is_number(value) and value == 1 and kinds_of(node) == ["integer"],
    "not": lambda value, node: value is False,
    "nullable": lambda value, node: value is False or "null" in kinds_of(node),
    "patternProperties": lambda value, node: value == {},
    "propertyNames": lambda value, node: is_free(value, "string"),
    "required": lambda value, node: value == [],
    "then": lambda value, node: True,
    "unevaluatedItems": lambda value, node: is_free(value),
    "unevaluatedProperties": lambda value, node: is_free(value) or "additionalProperties" in node,
    "uniqueItems": lambda value, node: value is False or (is_number(most := node.get("maxItems")) and most <= 1),
}
