"""The keywords of JSON Schema that a grammar enforces, and what each may be set to.

A value of another kind is refused with its place and the remedy. So is one that would not be enforced as written: a
format without a pattern, a number that a double does not hold, lists of items in two dialects at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from edge_dflash.errors import RequestError, short

LARGEST = 2**63 - 1024  # the largest 64-bit integer that a double holds; the library reads numbers as doubles
MOST = 2**31 - 1  # characters, items or properties
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

SINGLE = ("additionalProperties", "items", "additionalItems")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
ANNOTATIONS = (  # of the standard, and OpenAPI's; its discriminator repeats what oneOf says
    *("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "example", "externalDocs", "xml"),
)

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # 0001 to 9999
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # 04, 08, ..., 96
_LEAP = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

_N = "[0-9]{1,9}"  # digits of one part of a duration
_CLOCK = f"(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = f"P(?:{_DAYS}(?:T{_CLOCK})?|T{_CLOCK}|{_N}W)"

_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"(?:{_BYTE}\\.){{3}}{_BYTE}"
_ATEXT = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_LOCAL = f"(?:{_ATEXT}{{1,64}}|{_ATEXT}{{1,15}}(?:\\.{_ATEXT}{{1,15}}){{1,3}})"  # at most 64 characters
_EMAIL = f"{_LOCAL}@(?:{_HOST}|\\[{_IPV4}\\])"

_HEX = "[0-9a-fA-F]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}"
_H16 = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Eight groups; or fewer, with ``::`` in place of at least one (RFC 4291)."""
    forms = [f"(?:{_H16}:){{7}}{_H16}", f"::(?:{_H16}(?::{_H16}){{0,6}})?"]
    for before in range(1, 8):
        left = f"{_H16}(?::{_H16}){{{before - 1}}}" if before > 1 else _H16
        after = 7 - before
        forms.append(f"{left}::" + (f"(?:{_H16}(?::{_H16}){{0,{after - 1}}})?" if after else ""))
    return "(?:" + "|".join(forms) + ")"


_PCHAR = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_USER = "(?:[a-zA-Z0-9._~!$&'()*+,;=:-]|%[0-9a-fA-F]{2})"
_NAME = "(?:[a-zA-Z0-9._~!$&'()*+,;=-]|%[0-9a-fA-F]{2})"
_PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9]?[0-9]{1,3})"
_AUTHORITY = f"(?:{_USER}*@)?(?:\\[{_ipv6()}\\]|{_NAME}*)(?::{_PORT})?"
_URI = (
    f"[a-zA-Z][a-zA-Z0-9+.-]*:(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*)?"
    f"(?:\\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
)

FORMATS: dict[str, tuple[str, ...]] = {
    "date-time": (f"{_DATE}T{_TIME}",),
    "date": (_DATE,),
    "time": (_TIME,),
    "duration": (_DURATION,),
    "email": (_EMAIL,),
    "hostname": (_HOST, ".{1,253}"),
    "ipv4": (_IPV4,),
    "ipv6": (_ipv6(),),
    "uuid": (_UUID,),
    "uri": (_URI,),
}
"""Name of a format of JSON strings: what the whole string matches, all of them, in the syntax of Rust's regex crate.

None is looser than what Python's standard library and the RFC both read: no leap second (RFC 3339 allows 60,
``datetime`` does not), no 29 February of other years, no year 0, capital T and Z, and a bound wherever digits could go
on for ever.
"""

ENCODINGS: dict[str, tuple[str, ...]] = {
    "base64": ("(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",),
    "base16": ("(?:[0-9A-F]{2})*",),
}
"""``contentEncoding``: what the whole string matches (RFC 4648, with padding and without line breaks)."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def numbers_in(*values: object) -> Iterator[int | float]:
    """The numbers of JSON values, also those inside lists and objects."""
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif is_number(value):
            yield value


def kinds_of(node: dict[str, Any]) -> list[Any]:
    """Types that a schema names; empty when it names none."""
    kinds = node.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # what a keyword may be set to, and the remedy
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (
            lambda value: is_number(value) and 0 <= value <= MOST and value % 1 == 0,
            f"give a whole number from 0 to {MOST}",
        ),
    ),
    **dict.fromkeys(("minimum", "maximum"), (is_number, "give a number")),
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"), (lambda value: isinstance(value, int | float), "give a number")
    ),
    "multipleOf": (lambda value: is_number(value) and value > 0, "give a number above 0"),
    "pattern": (lambda value: isinstance(value, str), "give a regular expression as a text"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "give a list of names",
    ),
    "enum": (lambda value: isinstance(value, list) and value != [], "give a list of at least one value"),
    "type": (lambda value: value != [], f"give one or more of {', '.join(TYPES)}"),
    **dict.fromkeys(("anyOf", "oneOf"), (lambda value: value != [], "give a list of at least one schema")),
    "format": (FORMATS.__contains__, f"enforced are {', '.join(FORMATS)}; remove it, or give a pattern"),
    "contentEncoding": (ENCODINGS.__contains__, f"enforced are {', '.join(ENCODINGS)}; remove it, or give a pattern"),
}
ENFORCED = frozenset((*SINGLE, *LISTS, *NAMED, "$ref", "const", *_RULES))
KNOWN = ENFORCED | frozenset(ANNOTATIONS)


def check_values(node: dict[str, Any], where: str, kinds: list[Any]) -> None:
    """Raise RequestError for a value of a keyword that cannot be taken. ``kinds`` are the types that ``node`` names."""
    if any(kind not in TYPES for kind in kinds):
        raise RequestError(f"type at {where} is {short(node['type'])}; give one or more of {', '.join(TYPES)}")
    for key in ("format", "contentEncoding"):
        if key in node and kinds and "string" not in kinds:
            raise RequestError(
                f"{key} {short(node[key])} at {where} would not be enforced on type {short(node['type'])}; "
                "use minimum and maximum"
            )
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
    _check_numbers(node, where)


def _check_numbers(node: dict[str, Any], where: str) -> None:
    """Numbers must be those that the answer is held to: the library reads them as doubles."""
    for key in ("const", "enum"):
        for value in numbers_in(node.get(key)):
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
