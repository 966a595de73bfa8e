"""What the keywords of a JSON Schema may be set to: a value of another kind is refused with its place and the remedy.

Also values that the grammar would not enforce as written: formats and encodings without a pattern, numbers that a
double does not hold, lists of items in two dialects at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

from edge_dflash.decode.grammar.formats import ENCODINGS, FORMATS
from edge_dflash.errors import RequestError, short

LARGEST = 2**63 - 1024  # the largest 64-bit integer that a double holds; the library reads numbers as doubles
MOST = 2**31 - 1  # characters, items or properties
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def _count(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MOST and float(value).is_integer()


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_or_flag(value: Any) -> bool:
    return isinstance(value, int | float)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _choices(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_COUNT: tuple[Callable[[Any], bool], str] = (_count, f"give a whole number from 0 to {MOST}")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    "minimum": (is_number, "give a number"),
    "maximum": (is_number, "give a number"),
    "exclusiveMinimum": (_number_or_flag, "give a number"),
    "exclusiveMaximum": (_number_or_flag, "give a number"),
    "multipleOf": (lambda value: is_number(value) and value > 0, "give a number above 0"),
    "pattern": (_text, "give a regular expression as a text"),
    "required": (_texts, "give a list of names"),
    "enum": (_choices, "give a list of at least one value"),
    "type": (lambda value: value != [], f"give one or more of {', '.join(TYPES)}"),
    "anyOf": (lambda value: value != [], "give a list of at least one schema"),
    "oneOf": (lambda value: value != [], "give a list of at least one schema"),
    "format": (lambda value: value in FORMATS, f"enforced are {', '.join(FORMATS)}; remove it, or give a pattern"),
    "contentEncoding": (
        lambda value: value in ENCODINGS,
        f"enforced are {', '.join(ENCODINGS)}; remove it, or give a pattern",
    ),
}


def check_values(node: dict[str, Any], where: str, kinds: list[Any]) -> None:
    """Raise RequestError for a value of a keyword that cannot be taken. ``kinds`` are the types that ``node`` names."""
    for kind in kinds:
        if kind not in TYPES:
            raise RequestError(f"type at {where} is {short(node['type'])}; give one or more of {', '.join(TYPES)}")
    for key in ("format", "contentEncoding"):
        if key in node and kinds and "string" not in kinds:
            raise RequestError(
                f"{key} {short(node[key])} at {where} would not be enforced on type {short(node['type'])}; "
                "use minimum and maximum"
            )
    for key, (takes, remedy) in _RULES.items():
        if key in node and not _takes(takes, node[key]):
            raise RequestError(f"{key} at {where} is {short(node[key])}; {remedy}")
    _check_items(node, where)
    _check_numbers(node, where)


def _takes(takes: Callable[[Any], bool], value: Any) -> bool:
    try:
        return takes(value)
    except (TypeError, OverflowError):  # unhashable, or beyond a double
        return False


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


def _check_numbers(node: dict[str, Any], where: str) -> None:
    """Numbers must be those that the answer is held to: the library reads them as doubles."""
    for key in ("const", "enum"):
        pending = [node[key]] if key in node else []
        while pending:
            value = pending.pop()
            pending += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
            if type(value) is int and (abs(value) > LARGEST or int(float(value)) != value):
                raise RequestError(
                    f"{key} at {where} has {short(value)}, which a double does not hold; give it as a text"
                )
    for key, beyond in (("minimum", 1), ("exclusiveMinimum", 1), ("maximum", -1), ("exclusiveMaximum", -1)):
        value = node.get(key)
        if is_number(value) and value * beyond >= LARGEST:
            raise RequestError(
                f"{key} at {where} is {short(value)}; numbers between -{LARGEST} and {LARGEST} are written, "
                "give a bound within"
            )
