"""What one value may be, declared once: how it is taken, what a message says to give, and its JSON Schema.

Options of a request (:mod:`edge_dflash.decode.options`) and settings of a planner are read by rules; what JSON, TOML
and YAML nest is read by :mod:`edge_dflash.common.nested`, which is made of them.

Texts must be texts: a lone surrogate (U+D800 to U+DFFF) is no character, and neither UTF-8 nor a tokenizer takes it.
JSON and Python's strings can hold one, in values and in keys alike: everything that comes in is looked through here.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeAlias

from edge_dflash.common.slips import SAME, slip_of
from edge_dflash.errors import RequestError, short

Schema: TypeAlias = dict[str, Any]
_TEXTLESS = (bytes, bytearray, memoryview, array, range)  # sequences that hold no text


class FieldError(RequestError):
    """A value at ``place`` that cannot be taken; ``unknown``: nothing of its name is known there."""

    def __init__(self, message: str, place: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.place = place
        self.unknown = unknown


@dataclass(frozen=True)
class Rule:
    """What a value may be. ``take`` returns it as it is used; it raises ValueError or TypeError to refuse."""

    take: Callable[[Any], Any]
    wanted: str  # the remedy that a message ends with: "give ..."
    schema: Schema = field(default_factory=dict)
    none: bool = False  # whether None is taken as it is

    def read(self, value: Any, place: str) -> Any:
        """The value as the program uses it. Raises FieldError, naming ``place``, the value and what to give."""
        if value is None and self.none:
            return None
        try:
            return self.take(value)
        except (TypeError, ValueError, LookupError, OverflowError, RecursionError):
            wanted = f"{self.wanted}, or None" if self.none else self.wanted
            raise FieldError(f"{place} is {short(value)}; {wanted}", place) from None

    def saying(self, accepted: str) -> Rule:
        """The same rule in other words: ``give`` and what is accepted."""
        return replace(self, wanted=f"give {accepted}")

    def or_none(self) -> Rule:
        """The same, or None."""
        return replace(self, none=True)


def checked(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Python as their rules take them. Raises RequestError naming the value and what to give.

    Also for a name without a rule; see :func:`refuse_unknown`.
    """
    refuse_unknown(rules, values)
    taken = {}
    for name, value in values.items():
        taken[name] = rules[name].read(value, name)
        if rules[name].take is not PATH.take:  # a file's name may be any bytes
            refuse_surrogates(value, name)
    return taken


def refuse_unknown(rules: Mapping[str, object], names: Iterable[str]) -> None:
    """Raise RequestError for a name without a rule, with the one that it is a slip of, or another API's name of."""
    if unknown := next((name for name in names if name not in rules), None):
        raise unknown_name(unknown, rules)


def unknown_name(name: str, known: Mapping[str, object], before: str | None = None) -> FieldError:
    """The error of a name that is not known; ``before`` is the place of its object, if it stands in one."""
    refuse_surrogates(name, "the name of an option")
    near = slip_of(name, known) or SAME.get(name)
    hint = f"did you mean {near}? " if near in known else ""
    place = (before or "") + (name if len(name) <= 60 else f"{name[:57]}...")
    here = "" if before is None else " here"
    return FieldError(f"{place} is unknown{here}; {hint}known are {', '.join(known)}", place, unknown=True)


# Rules ----------------------------------------------------------------------------------------------------------------


def such(test: Callable[[Any], bool], accepted: str, schema: Schema | None = None) -> Rule:
    """A value that passes a test, as it is."""

    def take(value: Any) -> Any:
        if not test(value):
            raise ValueError
        return value

    return Rule(take, f"give {accepted}", schema or {})


def instance_of(kind: type, accepted: str) -> Rule:
    """An object of a class."""
    return such(lambda value: isinstance(value, kind), accepted)


def having(methods: Iterable[str], accepted: str) -> Rule:
    """An object with these methods."""
    return such(lambda value: all(callable(getattr(value, method, None)) for method in methods), accepted)


def one_of(*accepted: str) -> Rule:
    """One of some texts."""
    words = f"one of {', '.join(accepted)}"
    return such(lambda value: isinstance(value, str) and value in accepted, words, {"enum": list(accepted)})


def either(first: Rule, second: Rule, accepted: str) -> Rule:
    """What the one rule takes, or the other."""

    def take(value: Any) -> Any:
        try:
            return first.take(value)
        except (TypeError, ValueError):
            return second.take(value)

    return Rule(take, f"give {accepted}", first.schema)


def whole(low: float = -math.inf, high: float = math.inf) -> Rule:
    """A whole number of a range."""
    return _ranged(Integral, int, "whole number", "integer", low, high)


def number(low: float = -math.inf, high: float = math.inf) -> Rule:
    """A number of a range; infinity is one where the range has it."""
    return _ranged(Real, float, "number", "number", low, high)


def _ranged(kind: Any, made: Any, word: str, schema_type: str, low: float, high: float) -> Rule:
    def take(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= made(value) <= high:
            raise ValueError
        return made(value)

    bounds = {name: end for name, end in (("minimum", low), ("maximum", high)) if math.isfinite(end)}
    where = f" from {low} to {high}" if "maximum" in bounds else f" of at least {low}" if bounds else ""
    return Rule(take, f"give a {word}{where}", {"type": schema_type, **bounds})


def sequence_of(kind: type, accepted: str) -> Rule:
    """A sequence of values of a type; text is none."""

    def take(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
            raise TypeError
        if not all(isinstance(item, kind) for item in value):
            raise TypeError
        return tuple(value)

    return Rule(take, f"give {accepted}")


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        from numpy import bool_  # here, because a grammar's process imports this module, and little else

        if not isinstance(value, bool_):
            raise TypeError
    return bool(value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and isinstance(name := os.fspath(value), str) and "\0" not in name


def _texts(value: Any) -> Any:
    found = value if isinstance(value, str) else sequence_of(str, "").take(value)
    if not all([found] if isinstance(found, str) else found):
        raise ValueError
    return found


FLAG = Rule(_flag, "give True or False", {"type": "boolean"})
TEXT = such(lambda value: isinstance(value, str), "a text", {"type": "string"})
TEXTS = Rule(_texts, "give a text, or several, none of them empty")
PATH = such(_is_path, "a path, as text without NUL or as a path object")
FUNCTION = such(callable, "a function")

# Texts ----------------------------------------------------------------------------------------------------------------


def lone_surrogate(value: Any, where: str) -> str | None:
    """Where a text inside ``value`` holds a lone surrogate, as a path that begins with ``where``; None: nowhere.

    Looks into mappings, their keys, and sequences; at nothing twice.
    """
    pending: list[tuple[Any, str]] = [(value, where)]
    seen: set[int] = set()
    while pending:
        value, where = pending.pop()
        if isinstance(value, str):
            if not _is_text(value):
                return where
        elif isinstance(value, Mapping | Sequence) and not isinstance(value, _TEXTLESS) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                if any(isinstance(key, str) and not _is_text(key) for key in value):
                    return f"a key of {where or 'the body'}"
                pending += [(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()]
            else:
                pending += [(item, f"{where}[{at}]") for at, item in enumerate(value) if not isinstance(item, int)]
    return None


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_surrogates(value: Any, where: str) -> None:
    """Raise FieldError, naming the place, when a text inside ``value`` holds a lone surrogate."""
    if (place := lone_surrogate(value, where)) is not None:
        why = "holds a lone surrogate (U+D800 to U+DFFF), which is no character; remove it"
        raise FieldError(f"{place[:200]} {why}", place)
