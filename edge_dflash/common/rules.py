"""What a value may be, declared once: how it is taken, what a message says to give, and its JSON Schema.

A :class:`Rule` is of one value; :class:`Items`, :class:`Object` and :class:`Tagged` are of what JSON, TOML and YAML
nest. All structured input that people write is read by them: options of a request (:mod:`edge_dflash.decode.options`),
settings of a planner and of the service, bodies over HTTP, recipes and board profiles; what the OpenAPI document
says of a body is their ``schema``. Above them :mod:`edge_dflash.model.fields` says which keys of a model's config are
read; files that only this package writes are read by their dataclasses (:mod:`edge_dflash.common.tables`).

Why not msgspec (0.22): of 16 bad bodies of the API its errors named the place of 15, the value that was found of 2,
what is accepted of 6 and a remedy of none, so a second table with words of all fields would stand above its types; it
has no slips of the pen, no NumPy numbers and no conditions between fields. It costs 0.7 MB and 14 ms of each start, and
would have taken the place of about 120 lines here.

Texts must be texts: a lone surrogate (U+D800 to U+DFFF) is no character, and neither UTF-8 nor a tokenizer takes it.
JSON and Python's strings can hold one, in values and in keys alike: everything that comes in is looked through here.

A name is called a slip only of one that it can be a slip of. Another key of another framework is no slip, however
alike the two are spelled: who follows such advice gets another model, or another answer. So one letter may be wrong,
missing or too many, or two may have changed places, in one word of four letters or more; never its first letter, and
never a digit.
"""

from __future__ import annotations

import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeAlias

from edge_dflash.errors import RequestError, short

_LEAST = 4  # letters of a word in which a slip is one: top_k, top_p and min_p are three settings


def slip_of(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is a slip of; None: none, or several."""
    found = [one for one in known if _is_slip(name, one)]
    return found[0] if len(found) == 1 else None


def _is_slip(name: str, known: str) -> bool:
    ours, theirs = _words(name), _words(known)
    if "".join(ours) == "".join(theirs):  # capitals, underscores
        return len(known) >= _LEAST
    differ = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
    if len(ours) != len(theirs) or len(differ) != 1:
        return False
    return len(differ[0][1]) >= _LEAST and _one_letter(*differ[0])


def _words(name: str) -> list[str]:
    """Words between underscores and hyphens, and from capital to capital."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower().split("_")


def _one_letter(first: str, second: str) -> bool:
    """Whether two words differ by one letter behind the first, or by two neighbours that changed places."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    ours, theirs = first[at:], second[at:]
    if any(letter.isdigit() for letter in ours[:2] + theirs[:2]):
        return False
    swapped = ours[:2] == theirs[1::-1] and ours[2:] == theirs[2:]
    return swapped or (at > 0 and theirs[1:] in (ours, ours[1:])) or (at > 0 and theirs == ours[1:])


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


@dataclass(frozen=True)
class Items:
    """A list."""

    of: ValueReader
    least: int = 0

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        return {"type": "array", "items": self.of.schema, **({"minItems": self.least} if self.least else {})}

    def read(self, value: Any, place: str) -> list[Any]:
        """As that of :class:`Rule`."""
        if not isinstance(value, list):
            raise FieldError(f"{place} is {short(value)}; give a list", place)
        if len(value) < self.least:
            raise FieldError(f"{place} is empty; give at least one", place)
        return [self.of.read(item, f"{place}[{at}]") for at, item in enumerate(value)]


@dataclass(frozen=True)
class Object:
    """A mapping with these fields and no others; those of ``needed`` must be there, and it says what to give for them.

    ``lenient``: null counts as absent and 3.0 as 3, as in the OpenAI API.
    """

    fields: Mapping[str, ValueReader]
    needed: Mapping[str, str] = field(default_factory=dict)
    lenient: bool = False
    also: Schema = field(default_factory=dict)  # what its reader checks of several fields together

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        made: Schema = {"type": "object", "properties": {name: self._field(name) for name in self.fields}}
        if self.needed:
            made["required"] = sorted(self.needed)
        return {**made, **({"allOf": [self.also]} if self.also else {}), "additionalProperties": False}

    def _field(self, name: str) -> Schema:
        found = self.fields[name].schema
        if name in self.needed or not found or found == {"type": "null"}:
            return found
        return {"anyOf": [found, {"type": "null"}]}

    def read(self, value: Any, place: str = "") -> dict[str, Any]:
        """The fields that are given, as :meth:`Rule.read`."""
        if not isinstance(value, Mapping):
            raise FieldError(
                f"{place or 'the document'} is {short(value)}; give a mapping of {', '.join(self.fields)}", place
            )
        given = {name: item for name, item in value.items() if item is not None or not self.lenient}
        made, before = {}, f"{place}." if place else ""
        for name, entry in self.fields.items():
            if name in given:
                item = given.pop(name)
                if self.lenient and type(item) is float and item.is_integer() and _is_whole(entry):
                    item = int(item)
                made[name] = entry.read(item, before + name)
            elif name in self.needed:
                raise FieldError(f"{before}{name} is missing; {self.needed[name]}", before + name)
        if given:
            raise unknown_name(str(next(iter(given))), self.fields, before)
        return made


def _is_whole(entry: ValueReader) -> bool:
    return isinstance(entry, Rule) and entry.schema.get("type") == "integer"


@dataclass(frozen=True)
class Tagged:
    """A mapping of one of several kinds; the text in its field ``tag`` says of which."""

    tag: str
    kinds: Mapping[str, Object]

    @property
    def schema(self) -> Schema:
        """As that of :class:`Rule`."""
        made = []
        for name, kind in self.kinds.items():
            schema = kind.schema
            properties = {self.tag: {"type": "string", "const": name}, **schema["properties"]}
            made.append({**schema, "properties": properties, "required": sorted({self.tag, *kind.needed})})
        return {"oneOf": made}

    def read(self, value: Any, place: str) -> dict[str, Any]:
        """As that of :class:`Rule`."""
        if not isinstance(value, Mapping):
            raise FieldError(f"{place} is {short(value)}; give an object with {self.tag}", place)
        tag = one_of(*self.kinds).read(value.get(self.tag), f"{place}.{self.tag}")
        rest = {name: item for name, item in value.items() if name != self.tag}
        return {self.tag: tag, **self.kinds[tag].read(rest, place)}


ValueReader: TypeAlias = Rule | Items | Object | Tagged


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


def refuse_unknown(rules: Mapping[str, ValueReader], names: Iterable[str]) -> None:
    """Raise RequestError for a name without a rule, with the one that it is a slip of, or another API's name of."""
    if unknown := next((name for name in names if name not in rules), None):
        raise unknown_name(unknown, rules)


def unknown_name(name: str, known: Mapping[str, ValueReader], before: str | None = None) -> FieldError:
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


def only(why: str, *accepted: object) -> Rule:
    """A field that is known and has one meaning here: everything but ``accepted`` is refused, not dropped."""

    def same(value: Any) -> bool:  # 1 and 1.0 are equal, 1 and True are not
        return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in accepted)

    schema = {"enum": list(accepted), "description": why} if accepted else {"type": "null"}
    return replace(such(same, "", schema), wanted=why)


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


def as_json(rule: Rule) -> Rule:
    """The rule where null counts as absent, in JSON's and TOML's words."""
    return replace(rule, none=False, wanted="give true or false" if rule.take is _flag else rule.wanted)


FLAG = Rule(_flag, "give True or False", {"type": "boolean"})
TEXT = such(lambda value: isinstance(value, str), "a text", {"type": "string"})
LINE = such(lambda value: bool(TEXT.take(value).strip()), "text in quotes, not blank", {"type": "string"})
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


def refuse_nul(values: Mapping[str, Any]) -> None:
    """Raise RequestError, naming it, for a text or path among the values that holds a NUL."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, str | os.PathLike) and "\0" in os.fsdecode(one):
                raise RequestError(f"{name} is {short(os.fsdecode(one))}; give one without NUL (U+0000)")


def is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value has objects or arrays in more levels than ``levels``."""
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, dict | list)]
    return bool(level)
