"""The keywords of JSON Schema: what each may be set to, and where it forbids nothing.

JSON Schema lets a validator ignore what it does not know; here a keyword that would not be enforced is an error,
because the caller wrote it to be obeyed. What forbids nothing is enforced by leaving it out: that is judged by its
value and by what stands beside it, not by its name. Values that would not be enforced as they are written are refused
with their place and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias, TypeGuard

from edge_dflash.common.rules import slip_of
from edge_dflash.decode.grammar.formats import BYTE_HINTS, ENCODINGS, FORMATS, INTEGERS, NUMBER_HINTS, TEXT_HINTS
from edge_dflash.errors import RequestError, short

Node: TypeAlias = "dict[str, Any] | bool"

LARGEST = 2**63 - 1024  # the largest 64-bit integer that a double holds; the library reads numbers as doubles
MOST = 2**31 - 1  # characters, items or properties
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
SINGLE = ("additionalProperties", "items", "additionalItems")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS)
_ANNOTATIONS = (  # of the standard, OpenAPI's (its discriminator repeats what oneOf says), editors' and forms'
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "example", "externalDocs", "xml", "$anchor", "$dynamicAnchor"),
    *("enumNames", "enumDescriptions", "markdownDescription", "markdownEnumDescriptions", "propertyOrdering"),
    *("deprecationMessage", "errorMessage", "defaultSnippets"),
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_EVALUATING = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that JSON escapes by their numbers


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def scalars_in(*values: object) -> Iterator[object]:
    """The scalars of JSON values, also those inside lists and objects."""
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, list | dict):
            pending += value if isinstance(value, list) else value.values()
        else:
            yield value


def kinds_of(node: dict[str, Any]) -> list[Any]:
    """Types that a schema names, with null where it is OpenAPI's nullable; empty when it names none."""
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [*kinds, "null"] if kinds and node.get("nullable") is True and "null" not in kinds else kinds


def may_be(node: dict[str, Any], *kinds: str) -> bool:
    """Whether a schema allows values of one of some types, as far as its ``type`` says."""
    return not kinds_of(node) or any(kind in kinds_of(node) for kind in kinds)


# Where keywords forbid nothing ----------------------------------------------------------------------------------------


def forbids_nothing(key: str, node: dict[str, Any]) -> bool:
    """Whether a keyword of ``node`` allows everything that the others allow."""
    if key.startswith("x-") and key != "x-guidance":  # that is the library's own
        return True
    return key in KEYWORDS and KEYWORDS[key].idle(node[key], node)


def is_free(schema: object, kind: str = "") -> bool:
    """Whether a schema allows every value, or every one of a type."""
    if not isinstance(schema, dict):
        return schema is True
    says = (key for key in schema if key not in DEFINITIONS and not forbids_nothing(key, schema))
    return all(key == "type" and kind in kinds_of(schema) for key in says)


def _is_zero(value: object) -> bool:
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


def _idle_format(name: object, node: dict[str, Any]) -> bool:
    """Whether every value has a format, or other keywords say which do and the format is not known."""
    texts, numbers = may_be(node, "string"), may_be(node, "integer", "number")
    if not isinstance(name, str) or (texts and name in FORMATS) or (numbers and name in INTEGERS):
        return False
    hinted = (texts and name in TEXT_HINTS) or (numbers and name in NUMBER_HINTS)
    return hinted or _said_otherwise(node, texts) or (numbers and any(key in node for key in _BOUNDS))


def _idle_encoding(name: object, node: dict[str, Any]) -> bool:
    if not isinstance(name, str) or name in ENCODINGS or not may_be(node, "string"):
        return False
    return name in BYTE_HINTS or _said_otherwise(node, True)


def _said_otherwise(node: dict[str, Any], texts: bool) -> bool:
    """Whether values are listed, or texts have a pattern."""
    parts = node["allOf"] if isinstance(node.get("allOf"), list) else []
    pattern = any(isinstance(part, dict) and "pattern" in part for part in (node, *parts))
    return (texts and pattern) or "const" in node or "enum" in node


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keyword:
    """What is known of a keyword."""

    idle: Callable[[Any, dict[str, Any]], bool] = lambda value, node: False  # whether it forbids nothing beside others
    takes: Callable[[Any], bool] = lambda value: True  # values that may be enforced
    remedy: str = ""  # for other values
    enforced: bool = False  # else it is refused unless it is idle


def _enforced(takes: Callable[[Any], bool] = lambda value: True, remedy: str = "", **more: Any) -> Keyword:
    return Keyword(takes=takes, remedy=remedy, enforced=True, **more)


def _is_count(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST and value % 1 == 0


def _is_finite(value: Any) -> bool:
    return is_number(value) and -inf < value < inf  # NaN is not


_COUNT = (_is_count, f"give a whole number from 0 to {MOST}")
_EXCLUDED = _enforced(lambda value: isinstance(value, bool) or _is_finite(value), "give a number")
_OPTIONS = _enforced(lambda value: value != [], "give a list of at least one schema")
KEYWORDS: dict[str, Keyword] = {
    **dict.fromkeys(_ANNOTATIONS, Keyword(idle=lambda value, node: True)),
    **dict.fromkeys(("$ref", "const", "properties", "additionalProperties", "prefixItems", *DEFINITIONS), _enforced()),
    "items": _enforced(),
    "maxLength": _enforced(*_COUNT),
    "maxItems": _enforced(*_COUNT),
    "minLength": _enforced(*_COUNT, idle=lambda value, node: _is_zero(value)),
    "minItems": _enforced(*_COUNT, idle=lambda value, node: _is_zero(value)),
    "minProperties": _enforced(*_COUNT, idle=_required_anyway),
    "maxProperties": _enforced(*_COUNT, idle=_closed_over),
    "minimum": _enforced(_is_finite, "give a number"),
    "maximum": _enforced(_is_finite, "give a number"),
    "exclusiveMinimum": _EXCLUDED,
    "exclusiveMaximum": _EXCLUDED,
    "multipleOf": _enforced(
        lambda value: _is_finite(value) and value > 0,
        "give a number above 0",
        idle=lambda value, node: is_number(value) and value == 1 and kinds_of(node) == ["integer"],
    ),
    "pattern": _enforced(lambda value: isinstance(value, str), "give a regular expression as a text"),
    "required": _enforced(
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "give a list of names",
        idle=lambda value, node: value == [],
    ),
    "enum": _enforced(lambda value: isinstance(value, list) and value != [], "give a list of at least one value"),
    "type": _enforced(lambda value: value != [], f"give one or more of {', '.join(TYPES)}"),
    "anyOf": _OPTIONS,
    "oneOf": _OPTIONS,
    "allOf": _enforced(idle=lambda value, node: isinstance(value, list) and all(map(is_free, value))),
    "additionalItems": _enforced(idle=lambda value, node: is_free(value)),
    "patternProperties": _enforced(idle=lambda value, node: value == {}),
    "format": _enforced(idle=_idle_format),
    "contentEncoding": _enforced(idle=_idle_encoding),
    "propertyNames": Keyword(idle=lambda value, node: is_free(value, "string")),  # else said by other keywords
    "contains": Keyword(lambda value, node: _is_zero(node.get("minContains")) and "maxContains" not in node),
    "minContains": Keyword(lambda value, node: "contains" not in node or _is_zero(value)),
    "maxContains": Keyword(lambda value, node: "contains" not in node),
    "contentMediaType": Keyword(  # every text is of one; where it is encoded, any bytes
        lambda value, node: value == "text/plain" or (value == "application/octet-stream" and "contentEncoding" in node)
    ),
    "contentSchema": Keyword(lambda value, node: is_free(value)),
    "dependencies": Keyword(_all_free),
    "dependentRequired": Keyword(_all_free),
    "dependentSchemas": Keyword(_all_free),
    "if": Keyword(lambda value, node: is_free(node.get("then", True)) and is_free(node.get("else", True))),
    "then": Keyword(lambda value, node: True),  # if is judged by it, or is not there
    "else": Keyword(lambda value, node: True),
    "not": Keyword(lambda value, node: value is False),
    "nullable": Keyword(lambda value, node: value is False or "null" in kinds_of(node)),
    "unevaluatedItems": Keyword(lambda value, node: is_free(value)),
    "unevaluatedProperties": Keyword(lambda value, node: is_free(value) or "additionalProperties" in node),
    "uniqueItems": Keyword(
        lambda value, node: value is False or (is_number(most := node.get("maxItems")) and most <= 1)
    ),
}
ENFORCED = frozenset(key for key, word in KEYWORDS.items() if word.enforced)
KNOWN = ENFORCED | frozenset(_ANNOTATIONS)


# Values that are refused ----------------------------------------------------------------------------------------------


def check(node: dict[str, Any], where: str) -> None:
    """Raise RequestError for a keyword of a schema, or a value of one, that would not be enforced as it is written."""
    kept = {key: value for key, value in node.items() if not forbids_nothing(key, node)}
    for key in kept.keys() - ENFORCED - {"propertyNames"}:  # which depends on the others, and is looked at after them
        if not (key == "unevaluatedProperties" and node[key] is False and node.keys().isdisjoint(_EVALUATING)):
            raise unenforced(key, where)  # else it is additionalProperties: false
    kinds = kinds_of(node)
    if any(kind not in TYPES for kind in kinds):
        raise RequestError(f"type at {where} is {short(node['type'])}; give one or more of {', '.join(TYPES)}")
    for key in kept.keys() & ENFORCED:
        try:
            taken = KEYWORDS[key].takes(kept[key])
        except (TypeError, OverflowError):  # unhashable, or beyond a double
            taken = False
        if not taken:
            raise RequestError(f"{key} at {where} is {short(kept[key])}; {KEYWORDS[key].remedy}")
    _check_reference(node, where)
    _check_items(kept, where)
    _check_format(kept, where, kinds)
    _check_named(kept, where)
    for key, beyond in zip(_BOUNDS, (1, -1, 1, -1), strict=True):
        if is_number(bound := kept.get(key)) and bound * beyond >= LARGEST:
            raise RequestError(
                f"{key} at {where} is {short(bound)}; numbers between -{LARGEST} and {LARGEST} are written, "
                "give a bound within"
            )


def unenforced(key: str, where: str) -> RequestError:
    """The error of a keyword that would not be enforced."""
    close = slip_of(key, KNOWN - {key})
    advice = f"did you mean {close!r}? " if close else ""
    return RequestError(
        f"the schema's keyword {short(key)} at {where} would not be enforced; {advice}"
        "remove it, or write the rule with other keywords"
    )


def check_least(node: dict[str, Any], where: str) -> None:
    """A name that a schema leaves free could be written twice, so that an object has fewer properties than it shows."""
    least, names = node.get("minProperties", 0), set(node.get("required", ()))
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if least > len(names) + 1 and not closed and names.issuperset(node.get("properties", ())):
        raise RequestError(
            f"minProperties at {where} is {short(least)}; that free names differ would not be enforced, "
            f"require more names, or give at most {len(names) + 1}"
        )


def _check_reference(node: dict[str, Any], where: str) -> None:
    reference = node.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise RequestError(
            f"$ref at {where} is {short(reference)}; only references inside the schema (#/...) are taken"
        )
    if "$id" in node and where != "#":
        raise RequestError(f"$id at {where} would change what references mean; remove it")


def _check_items(node: dict[str, Any], where: str) -> None:
    listed = isinstance(node.get("items"), list)
    if "prefixItems" in node and (listed or "additionalItems" in node):
        raise RequestError(
            f"prefixItems at {where} stands beside the older form of it, and one of them would not be enforced; "
            "give prefixItems, and the rest as items"
        )
    if "additionalItems" in node and not listed:
        raise RequestError(
            f"additionalItems at {where} would not be enforced without a list of items; give prefixItems and items"
        )


def _check_format(node: dict[str, Any], where: str, kinds: list[Any]) -> None:
    """Formats and encodings must be of a type that the values have."""
    texts, numbers = not kinds or "string" in kinds, "integer" in kinds or "number" in kinds
    formats = {**(FORMATS if texts else {}), **(INTEGERS if numbers else {})}
    beside = ["a pattern"] * texts + ["minimum or maximum"] * numbers
    encodings: Collection[str] = ENCODINGS if texts else ()
    for key, enforced, others in (("format", formats, beside), ("contentEncoding", encodings, ["a pattern"] * texts)):
        name = node.get(key)
        if key not in node or (isinstance(name, str) and name in enforced):
            continue
        if not kinds and isinstance(name, str) and name in INTEGERS:
            raise RequestError(f"format {name!r} at {where} would not be enforced without a type; give type integer")
        given = f"{key} at {where} is {short(name)}"
        if not texts:
            given = f"{key} {short(name)} at {where} would not be enforced on type {short(node['type'])}"
        known = f"enforced are {', '.join(enforced)}; " if enforced else ""
        instead = f", or give {' or '.join(others)} beside it" if others else ""
        raise RequestError(f"{given}; {known}remove it{instead}")


def _check_named(node: dict[str, Any], where: str) -> None:
    """Numbers must be those that the answer is held to: the library reads them as doubles. Texts must be written."""
    for key in ("const", "enum"):
        for value in scalars_in(node.get(key)):
            if isinstance(value, str) and _UNWRITTEN.search(value):
                raise RequestError(
                    f"{key} at {where} has {short(value)}; control characters besides \\b, \\t, \\n, \\f and \\r "
                    "are not written, leave them out"
                )
            if is_number(value) and not _is_finite(value):
                raise RequestError(f"{key} at {where} has a number beyond those of a double; give it as a text")
            if isinstance(value, int) and (abs(value) > LARGEST or int(float(value)) != value):
                raise RequestError(
                    f"{key} at {where} has {short(value)}, which a double does not hold; give it as a text"
                )
