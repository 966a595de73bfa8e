"""The keywords of JSON Schema that a grammar enforces, and what each may be set to.

A value of another kind is refused with its place and the remedy. So is one that would not be enforced as written: an
unknown format, a number that a double does not hold, lists of items in two dialects at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeAlias, TypeGuard

from edge_dflash.decode.grammar.schema_formats import ENCODINGS, FORMATS, INTEGERS
from edge_dflash.errors import RequestError, short

Node: TypeAlias = "dict[str, Any] | bool"

LARGEST = 2**63 - 1024  # the largest 64-bit integer that a double holds; the library reads numbers as doubles
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # characters that JSON escapes by their numbers
MOST = 2**31 - 1  # characters, items or properties
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

SINGLE = ("additionalProperties", "items", "additionalItems")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
DEFINITIONS = ("$defs", "definitions")
NAMED = ("properties", "patternProperties", *DEFINITIONS)
ANNOTATIONS = (  # of the standard, OpenAPI's (its discriminator repeats what oneOf says), editors' and forms'
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "example", "externalDocs", "xml", "$anchor", "$dynamicAnchor"),
    *("enumNames", "enumDescriptions", "markdownDescription", "markdownEnumDescriptions", "propertyOrdering"),
    *("deprecationMessage", "errorMessage", "defaultSnippets"),
)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return is_number(value) and -inf < value < inf  # NaN is not


def _scalars_in(*values: object) -> Iterator[object]:
    """The scalars of JSON values, also those inside lists and objects."""
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        else:
            yield value


def numbers_in(*values: object) -> Iterator[int | float]:
    """The numbers of JSON values, also those inside lists and objects."""
    return filter(is_number, _scalars_in(*values))


def kinds_of(node: dict[str, Any]) -> list[Any]:
    """Types that a schema names, with null where it is OpenAPI's nullable; empty when it names none."""
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [*kinds, "null"] if kinds and node.get("nullable") is True and "null" not in kinds else kinds


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # what a keyword may be set to, and the remedy
    **dict.fromkeys(
        COUNTS,
        (
            lambda value: is_number(value) and 0 <= value <= MOST and value % 1 == 0,
            f"give a whole number from 0 to {MOST}",
        ),
    ),
    **dict.fromkeys(("minimum", "maximum"), (_is_finite, "give a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        (lambda value: isinstance(value, bool) or _is_finite(value), "give a number"),
    ),
    "multipleOf": (lambda value: _is_finite(value) and value > 0, "give a number above 0"),
    "pattern": (lambda value: isinstance(value, str), "give a regular expression as a text"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "give a list of names",
    ),
    "enum": (lambda value: isinstance(value, list) and value != [], "give a list of at least one value"),
    "type": (lambda value: value != [], f"give one or more of {', '.join(TYPES)}"),
    **dict.fromkeys(("anyOf", "oneOf"), (lambda value: value != [], "give a list of at least one schema")),
}
ENFORCED = frozenset((*SINGLE, *LISTS, *NAMED, "$ref", "const", "format", "contentEncoding", *_RULES))
KNOWN = ENFORCED | frozenset(ANNOTATIONS)


def check_values(node: dict[str, Any], where: str, kinds: list[Any]) -> None:
    """Raise RequestError for a value of a keyword that cannot be taken. ``kinds`` are the types that ``node`` names."""
    if any(kind not in TYPES for kind in kinds):
        raise RequestError(f"type at {where} is {short(node['type'])}; give one or more of {', '.join(TYPES)}")
    for key, (takes, remedy) in _RULES.items():
        try:
            taken = key not in node or takes(node[key])
        except (TypeError, OverflowError):  # unhashable, or beyond a double
            taken = False
        if not taken:
            raise RequestError(f"{key} at {where} is {short(node[key])}; {remedy}")
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
    _check_format(node, where, kinds)
    _check_named(node, where)


def check_least(node: dict[str, Any], where: str) -> None:
    """A name that a schema leaves free could be written twice, so that an object has fewer properties than it shows."""
    least, names = node.get("minProperties", 0), set(node.get("required", ()))
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if least > len(names) + 1 and not closed and names.issuperset(node.get("properties", ())):
        raise RequestError(
            f"minProperties at {where} is {short(least)}; that free names differ would not be enforced, "
            f"require more names, or give at most {len(names) + 1}"
        )


def _check_format(node: dict[str, Any], where: str, kinds: list[Any]) -> None:
    """Formats and encodings must be of a type that the values have."""
    texts, numbers = not kinds or "string" in kinds, "integer" in kinds or "number" in kinds
    known = {**(FORMATS if texts else {}), **(INTEGERS if numbers else {})}
    beside = {"a pattern": texts, "minimum or maximum": numbers}
    both = (("format", known, beside), ("contentEncoding", ENCODINGS if texts else {}, {"a pattern": texts}))
    for key, enforced, others in both:
        name = node.get(key)
        if key not in node or (isinstance(name, str) and name in enforced):
            continue
        if not kinds and isinstance(name, str) and name in INTEGERS:
            raise RequestError(f"format {name!r} at {where} would not be enforced without a type; give type integer")
        given = f"{key} at {where} is {short(name)}"
        if not texts:
            given = f"{key} {short(name)} at {where} would not be enforced on type {short(node['type'])}"
        known_ones = f"enforced are {', '.join(enforced)}; " if enforced else ""
        instead = " or ".join(word for word, fits in others.items() if fits)
        raise RequestError(f"{given}; {known_ones}remove it{f', or give {instead} beside it' if instead else ''}")


def _check_named(node: dict[str, Any], where: str) -> None:
    """Numbers must be those that the answer is held to: the library reads them as doubles. Texts must be written."""
    for key in ("const", "enum"):
        for value in _scalars_in(node.get(key)):
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
    for key, beyond in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        bound = node.get(key)
        if is_number(bound) and bound * beyond >= LARGEST:
            raise RequestError(
                f"{key} at {where} is {short(bound)}; numbers between -{LARGEST} and {LARGEST} are written, "
                "give a bound within"
            )
