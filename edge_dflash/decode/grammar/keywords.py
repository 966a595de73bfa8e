"""The keywords of JSON Schema: what each may be set to, and where it forbids nothing.

JSON Schema lets a validator ignore what it does not know; here a keyword that would not be enforced is an error,
because the caller wrote it to be obeyed. What forbids nothing is enforced by leaving it out: that is judged by its
value and by what stands beside it, not by its name. Values that would not be enforced as they are written are refused
with their place and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeAlias, TypeGuard

from edge_dflash.common.slips import slip_of
from edge_dflash.decode.grammar.formats import BYTE_HINTS, ENCODINGS, FORMATS, INTEGERS, NUMBER_HINTS, TEXT_HINTS
from edge_dflash.errors import RequestError, short

Node: TypeAlias = "dict[str, Any] | bool"
Says: TypeAlias = Callable[[Any, dict[str, Any]], bool]  # of a value, and the schema that it stands in

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
    return key in IDLE and IDLE[key](node[key], node)


def is_free(schema: object, kind: str = "") -> bool:
    """Whether a schema allows every value, or every one of a type."""
    if not isinstance(schema, dict):
        return schema is True
    says = (key for key in schema if not forbids_nothing(key, schema))
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


# The tables -----------------------------------------------------------------------------------------------------------

IDLE: dict[str, Says] = {  # whether a keyword forbids nothing
    # Definitions hold where they are referred to, and "if" is judged by its branches.
    **dict.fromkeys((*_ANNOTATIONS, *DEFINITIONS, "then", "else"), lambda value, node: True),
    **dict.fromkeys(("minLength", "minItems"), lambda value, node: _is_zero(value)),
    **dict.fromkeys(("additionalItems", "contentSchema", "unevaluatedItems"), lambda value, node: is_free(value)),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), _all_free),
    "minProperties": _required_anyway,
    "maxProperties": _closed_over,
    "multipleOf": lambda value, node: is_number(value) and value == 1 and kinds_of(node) == ["integer"],
    "required": lambda value, node: value == [],
    "allOf": lambda value, node: isinstance(value, list) and all(map(is_free, value)),
    "patternProperties": lambda value, node: value == {},
    "propertyNames": lambda value, node: is_free(value, "string"),
    "format": _idle_format,
    "contentEncoding": _idle_encoding,
    "contentMediaType": lambda value, node: (
        value == "text/plain"  # every text is; where it is encoded, any bytes
        or (value == "application/octet-stream" and "contentEncoding" in node)
    ),
    "contains": lambda value, node: _is_zero(node.get("minContains")) and "maxContains" not in node,
    "minContains": lambda value, node: "contains" not in node or _is_zero(value),
    "maxContains": lambda value, node: "contains" not in node,
    "if": lambda value, node: is_free(node.get("then", True)) and is_free(node.get("else", True)),
    "not": lambda value, node: value is False,
    "nullable": lambda value, node: value is False or "null" in kinds_of(node),
    "unevaluatedProperties": lambda value, node: is_free(value) or "additionalProperties" in node,
    "uniqueItems": lambda value, node: value is False or (is_number(most := node.get("maxItems")) and most <= 1),
}


def _is_bound(value: Any, sign: int) -> bool:
    return is_number(value) and -inf < value < inf and value * sign < LARGEST


def _is_written(*values: object) -> bool:
    """Whether an answer can hold values as they are: the library reads numbers as doubles."""
    for value in scalars_in(*values):
        if isinstance(value, str) and _UNWRITTEN.search(value):
            return False
        if is_number(value) and not -inf < value < inf:  # NaN is not
            return False
        if isinstance(value, int) and (abs(value) > LARGEST or int(float(value)) != value):
            return False
    return True


def _is_format(name: Any, node: dict[str, Any]) -> bool:
    texts, numbers = may_be(node, "string"), kinds_of(node) != [] and may_be(node, "integer", "number")
    return isinstance(name, str) and ((texts and name in FORMATS) or (numbers and name in INTEGERS))


_BOUND = f"give a number; those between -{LARGEST} and {LARGEST} are written"
_WRITTEN = (
    "give numbers that a double holds, others as texts, and texts without control characters besides "
    "\\b, \\t, \\n, \\f and \\r"
)
TAKEN: dict[str, tuple[Says, str]] = {  # whether a value is enforced; what to give in place of another one
    **dict.fromkeys(("items", "additionalProperties"), (lambda value, node: True, "")),
    **dict.fromkeys(
        ("properties", "patternProperties"), (lambda value, node: isinstance(value, dict), "give an object of schemas")
    ),
    **dict.fromkeys(
        COUNTS,
        (
            lambda value, node: is_number(value) and 0 <= value <= MOST and value % 1 == 0,
            f"give a whole number from 0 to {MOST}",
        ),
    ),
    **dict.fromkeys(
        ("anyOf", "oneOf"),
        (lambda value, node: isinstance(value, list) and value != [], "give a list of at least one schema"),
    ),
    "allOf": (lambda value, node: isinstance(value, list), "give a list of schemas"),
    "$ref": (
        lambda value, node: isinstance(value, str) and (value == "#" or value.startswith("#/")),
        "only references inside the schema (#/...) are taken",
    ),
    "minimum": (lambda value, node: _is_bound(value, 1), _BOUND),
    "maximum": (lambda value, node: _is_bound(value, -1), _BOUND),
    "exclusiveMinimum": (lambda value, node: isinstance(value, bool) or _is_bound(value, 1), _BOUND),
    "exclusiveMaximum": (lambda value, node: isinstance(value, bool) or _is_bound(value, -1), _BOUND),
    "multipleOf": (lambda value, node: is_number(value) and 0 < value < inf, "give a number above 0"),
    "pattern": (lambda value, node: isinstance(value, str), "give a regular expression as a text"),
    "required": (
        lambda value, node: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "give a list of names",
    ),
    "const": (lambda value, node: _is_written(value), _WRITTEN),
    "enum": (
        lambda value, node: isinstance(value, list) and value != [] and _is_written(value),
        f"give a list of at least one value; {_WRITTEN}",
    ),
    "type": (
        lambda value, node: value != [] and all(kind in TYPES for kind in kinds_of({"type": value})),
        f"give one or more of {', '.join(TYPES)}",
    ),
    "prefixItems": (
        lambda value, node: (
            isinstance(value, list) and not (isinstance(node.get("items"), list) or "additionalItems" in node)
        ),
        "give a list of schemas, and the rest as items: of an older form beside it one would not be enforced",
    ),
    "additionalItems": (
        lambda value, node: isinstance(node.get("items"), list),
        "without a list of items it would not be enforced; give prefixItems and items",
    ),
    "format": (
        _is_format,
        f"enforced are {', '.join(FORMATS)} of texts, and where the type says number or integer "
        f"{', '.join(INTEGERS)}; remove it, or give a pattern of texts, minimum or maximum of numbers beside it",
    ),
    "contentEncoding": (
        lambda value, node: isinstance(value, str) and value in ENCODINGS and may_be(node, "string"),
        f"enforced are {', '.join(ENCODINGS)} of texts; remove it, or give a pattern beside it",
    ),
}
KNOWN = frozenset((*TAKEN, *DEFINITIONS, *_ANNOTATIONS))


# Values that are refused ----------------------------------------------------------------------------------------------


def check(node: dict[str, Any], where: str) -> None:
    """Raise RequestError for a keyword of a schema, or a value of one, that would not be enforced as it is written."""
    if "$id" in node and where != "#":
        raise RequestError(f"$id at {where} would change what references mean; remove it")
    kept = {key: value for key, value in node.items() if not forbids_nothing(key, node)}
    for key, value in kept.items():
        if key == "propertyNames" or (  # it depends on the others, and is looked at after them
            key == "unevaluatedProperties" and value is False and node.keys().isdisjoint(_EVALUATING)
        ):  # it is additionalProperties: false
            continue
        if key not in TAKEN:
            raise unenforced(key, where)
        enforces, remedy = TAKEN[key]
        try:
            taken = enforces(value, kept)
        except (TypeError, OverflowError):  # unhashable, or beyond a double
            taken = False
        if not taken:
            raise RequestError(f"{key} at {where} is {short(value)}; {remedy}")


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
