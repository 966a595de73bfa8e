"""Values that callers give, checked one by one against a table: what each may be, and what it becomes.

A rule takes a value as the rest of the program uses it (numbers of NumPy become Python's) or refuses it. The tables
stand where the values are used: options of a request in :mod:`edge_dflash.decode.options`, arguments of a planner in
:mod:`edge_dflash.planner`.

Texts must be texts: a lone surrogate (U+D800 to U+DFFF) is no character, and neither UTF-8 nor a tokenizer takes it.
JSON and Python's strings can hold one, in values and in keys alike: everything that comes in is looked through here.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeAlias

from edge_dflash.common.suggest import slip_of
from edge_dflash.errors import RequestError, short

SAME: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "top_logprobs": "logprobs",
    "enable_thinking": "thinking",
    "guided_json": "schema",
    "guided_regex": "regex",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "num_speculative_tokens": "drafts",
}
"""Names of other APIs for settings of ours that mean the same."""

_TEXTLESS = (bytes, bytearray, memoryview, array, range)  # sequences that hold no text


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


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has objects or arrays in more than so many levels."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
    return bool(level)


def refuse_surrogates(value: Any, where: str) -> None:
    """Raise RequestError, naming the place, when a text inside ``value`` holds a lone surrogate."""
    if (place := lone_surrogate(value, where)) is not None:
        raise RequestError(surrogate_message(place))


def surrogate_message(place: str) -> str:
    """The message of such an error."""
    return f"{place[:200]} holds a lone surrogate (U+D800 to U+DFFF), which is no character; remove it"


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Take: TypeAlias = Callable[[Any], Any]


@dataclass(frozen=True)
class Rule:
    """What a value may be. ``take`` returns it as it is used; it raises ValueError or TypeError to refuse."""

    take: Take
    accepted: str  # for messages, after "give"


def checked(rules: Mapping[str, Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as their rules take them. Raises RequestError naming the value and what is accepted.

    Also for a name without a rule; see :func:`refuse_unknown`.
    """
    refuse_unknown(rules, values)
    taken = {}
    for name, value in values.items():
        try:
            taken[name] = rules[name].take(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            raise RequestError(f"{name} is {short(value)}; give {rules[name].accepted}") from None
        if rules[name].take is not path:  # a file's name may be any bytes
            refuse_surrogates(value, name)
    return taken


def refuse_unknown(rules: Mapping[str, Rule], names: Iterable[str]) -> None:
    """Raise RequestError for a name without a rule, with the one that it is a slip of, or another API's name of."""
    if unknown := next((name for name in names if name not in rules), None):
        refuse_surrogates(unknown, "the name of an option")
        near = slip_of(unknown, rules) or SAME.get(unknown)
        hint = f"did you mean {near}? " if near in rules else ""
        raise RequestError(f"{unknown} is unknown; {hint}known are {', '.join(rules)}")


# What a value may be --------------------------------------------------------------------------------------------------


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        from numpy import bool_  # here, because a grammar's process imports this module, and little else

        if not isinstance(value, bool_):
            raise TypeError
    return bool(value)


def whole(low: float = -math.inf, high: float = math.inf) -> Take:
    """A whole number of a range."""

    def take(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            raise ValueError
        return int(value)

    return take


def number(low: float = -math.inf, high: float = math.inf) -> Take:
    """A number of a range; infinity is one."""

    def take(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
            raise ValueError
        return float(value)

    return take


def any_number(value: Any) -> float:
    """A number, NaN too, for a check of its range that comes later."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise TypeError
    return value


def path(value: Any) -> Any:
    """A path, as text or as a path object. One with a NUL is none: the system would take what stands before it."""
    if not isinstance(value, str | os.PathLike) or not isinstance(found := os.fspath(value), str):
        raise TypeError
    if "\0" in found:
        raise ValueError
    return value


def refuse_nul(values: Mapping[str, Any]) -> None:
    """Raise RequestError, naming it, for a text or path among the values that holds a NUL."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, str | os.PathLike) and "\0" in os.fsdecode(one):
                raise RequestError(f"{name} is {short(os.fsdecode(one))}; give one without NUL (U+0000)")


def texts(value: Any) -> Any:
    """A text, or a sequence of texts; none is empty."""
    if isinstance(value, str):
        found: Any = value
    else:
        found = sequence_of(str)(value)
    if not all([found] if isinstance(found, str) else found):
        raise ValueError
    return found


def sequence_of(kind: type) -> Take:
    """A sequence of values of a type; text is none."""

    def take(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
            raise TypeError
        if not all(isinstance(item, kind) for item in value):
            raise TypeError
        return tuple(value)

    return take


def one_of(*accepted: str) -> Take:
    """One of some texts."""

    def take(value: Any) -> str:
        if not isinstance(value, str) or value not in accepted:
            raise ValueError
        return value

    return take


def instance_of(kind: type) -> Take:
    """An object of a class."""

    def take(value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return take


def having(*methods: str) -> Take:
    """An object with these methods."""

    def take(value: Any) -> Any:
        if not all(callable(getattr(value, method, None)) for method in methods):
            raise TypeError
        return value

    return take


def optional(take: Take) -> Take:
    """None, or what ``take`` takes."""
    return lambda value: None if value is None else take(value)


def called(value: Any) -> Any:
    """A function."""
    if not callable(value):
        raise TypeError
    return value
