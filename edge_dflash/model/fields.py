"""Keys of a config file: how a table says what one is, and typed access to those of a file.

Every key of a file is checked before one is read. Errors name
file, key, the value found and what was wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edge_dflash.errors import CheckpointError, UnsupportedModelError, short
from edge_dflash.model.specs import MAX_LAYERS

Use = Literal["read", "refused unless", "without effect"]
Kind = Literal["integer", "number", "flag", "text", "integers", "numbers", "names", "tokens", "object", "any"]
Table = Mapping[str, "Key"]

REQUIRED: Any = object()
ANY = "*"  # the entry of a table for keys that it does not list
MOST = 1 << 30  # of an integer: sizes, ids and positions stay far from where 32 bits end
_UNKNOWN = "this version does not know what it changes; remove it if that is nothing"
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Key:
    """One key of a JSON object."""

    use: Use
    kind: Kind = "any"
    default: Any = REQUIRED  # of a missing key that is read
    least: int = 1  # of an integer; length of a list of numbers
    most: int = MOST
    accepted: tuple[Any, ...] = ()  # values of a key refused unless one of them; of a text, empty: all; of an object
    null: bool = False  # null counts as missing; otherwise null is refused
    keys: Table | None = None  # of an object
    required: bool = False  # of a key refused unless one of some values: whether it must be there
    why: str = ""  # it has no effect, or what another value would mean
    beside: str = ""  # when a key that is read does not count


def integer(default: Any = REQUIRED, least: int = 1, most: int = MOST, *, null: bool = False, beside: str = "") -> Key:
    """An integer from ``least`` to ``most``."""
    return Key("read", "integer", default, least, most, null=null, beside=beside)


def number(default: Any = REQUIRED, *, null: bool = False, beside: str = "") -> Key:
    """A positive number that float32 can hold."""
    return Key("read", "number", default, null=null, beside=beside)


def flag(default: Any = REQUIRED, *, null: bool = False, beside: str = "") -> Key:
    """True or false."""
    return Key("read", "flag", default, null=null, beside=beside)


def text(*accepted: str, default: Any = REQUIRED, null: bool = False) -> Key:
    """A string, one of ``accepted`` if some are given."""
    return Key("read", "text", default, accepted=accepted, null=null)


def integers(*, least: int = 0, null: bool = False) -> Key:
    """A list of integers, each at least ``least``."""
    return Key("read", "integers", least=least, null=null)


def numbers(length: int) -> Key:
    """A list of so many numbers from 0 on that float32 can hold."""
    return Key("read", "numbers", least=length)


def names(*accepted: str) -> Key:
    """A list of strings; null counts as missing."""
    return Key("read", "names", accepted=accepted, null=True)


def inner(keys: Table | None = None, *accepted: str) -> Key:
    """An object, or a text of ``accepted``; null counts as missing. Without ``keys`` its reader brings the table."""
    return Key("read", "object", keys=keys, null=True, accepted=accepted)


def only(keys: str, *accepted: Any, why: str, required: bool = False) -> Table:
    """Words that are keys, each refused unless it is one of ``accepted``, or missing where it is not required."""
    null = None in accepted
    return dict.fromkeys(keys.split(), Key("refused unless", accepted=accepted, null=null, why=why, required=required))


def free(why: str, keys: str) -> Table:
    """Words that are keys without effect, whatever they hold."""
    return dict.fromkeys(keys.split(), Key("without effect", null=True, why=why))


class Fields:
    """A JSON object of a config file, checked against ``table``.

    Raises CheckpointError for a key that the table does not have and for a value that it does not accept;
    UnsupportedModelError where the value is that of a model that this version does not run.
    """

    def __init__(self, file: Path, values: Mapping[str, Any], table: Table, path: str = "") -> None:
        self.file = file
        self.values = values
        self._table = table
        self._path = path
        self._children: dict[str, Fields] = {}
        for name, value in values.items():
            if (key := table.get(name, table.get(ANY))) is not None:
                self._check(name, key, value)
        for name, key in table.items():
            if key.required and name not in values:
                raise self.lacks(name)
        for name, value in values.items():
            if name not in table and ANY not in table:
                outer = [key for key, known in table.items() if known.keys is not None and name in known.keys]
                here = f" here (it is known inside {' and '.join(outer)})" if outer else ""
                raise self.error(name, value, f"no such setting{here}: {_UNKNOWN}")

    def has(self, name: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(name) is not None

    def __getitem__(self, name: str) -> Any:
        """The value of a key that is read, of the type that its table says; its default where it is missing or null.

        A list is a tuple, empty where it is missing; one token id is a list of one. Raises CheckpointError for a key
        that is missing and has no default.
        """
        key, value = self._table[name], self.values.get(name)
        if key.use != "read":
            raise KeyError(f"{self._path}{name} is not read")
        if key.kind in ("integers", "names", "tokens"):
            return tuple(value if isinstance(value, list) else () if value is None else (value,))
        if value is None:
            value = key.default
        if value is REQUIRED:
            raise self.lacks(name)
        if key.kind == "numbers":
            return tuple(map(float, value))
        return float(value) if key.kind == "number" and value is not None else value

    def choices(self, name: str, length: int) -> tuple[str, ...]:
        """List of ``length`` strings, one a layer."""
        if len(value := tuple(map(str, self[name]))) != length:
            raise self.error(name, len(value), f"a list of {length} entries, one a layer")
        return value

    def child(self, name: str) -> Fields:
        """A nested object; empty when it is missing."""
        key = self._table.get(name, self._table.get(ANY))
        if key is None or key.kind != "object" or key.keys is None:
            raise KeyError(f"{self._path}{name} has no table")
        if name not in self._children:
            self._children[name] = Fields(self.file, self.values.get(name) or {}, key.keys, f"{self._path}{name}.")
        return self._children[name]

    def error(self, name: str, found: object, wanted: str) -> CheckpointError:
        """An error about a key."""
        return CheckpointError(f"{self.file}: {self._path}{name} is {_short(found)}, wanted {wanted}")

    def lacks(self, name: str) -> CheckpointError:
        """An error about a key that is missing."""
        return CheckpointError(f"{self.file} lacks the field {self._path}{name}; the checkpoint is incomplete")

    def _check(self, name: str, key: Key, value: Any) -> None:
        if (value is None and key.null) or key.use == "without effect":
            return
        if key.use == "refused unless":
            if not any(type(value) is type(item) and value == item for item in key.accepted):
                raise self._unsupported(name, key, value)
            return
        if key.kind == "object":
            if value in key.accepted:
                return
            if not isinstance(value, dict):
                raise self.error(name, value, "an object")
            if key.keys is not None:
                self.child(name)
        elif key.kind == "names":
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.error(name, value, "a list of names" if key.accepted else "a list of names or patterns")
            for item in value if key.accepted else ():
                if item not in key.accepted:
                    raise self.error(name, item, f"one of {', '.join(key.accepted)} for each layer")
        elif (wanted := _wanted(key, value)) is not None:
            raise self.error(name, value, wanted)

    def _unsupported(self, name: str, key: Key, value: Any) -> CheckpointError:
        if all(isinstance(item, bool) for item in key.accepted) and not isinstance(value, bool):
            return self.error(name, value, "true or false")
        wanted = " or ".join([*map(_short, key.accepted), *([] if key.required else ["no such key"])])
        return UnsupportedModelError(f"{self.file}: {self._path}{name} is {_short(value)}: {key.why}, wanted {wanted}")


def _wanted(key: Key, value: Any) -> str | None:
    """What a key of a plain kind wants, where ``value`` is not that."""
    if key.kind == "integer":
        if type(value) is int and value > key.most:
            return f"an integer of at most {key.most}"
        return None if type(value) is int and value >= key.least else f"an integer of at least {key.least}"
    if key.kind == "number":
        good = type(value) in (int, float) and _LEAST <= value <= _MOST
        return None if good else "a positive number that float32 can hold"
    if key.kind == "flag":
        return None if type(value) is bool else "true or false"
    if key.kind == "text":
        if isinstance(value, str) and (not key.accepted or value in key.accepted):
            return None
        return " or ".join(map(repr, key.accepted)) or "a string"
    if key.kind == "integers":
        if isinstance(value, list) and len(value) > MAX_LAYERS:
            return f"at most {MAX_LAYERS} entries"
        good = isinstance(value, list) and all(type(item) is int and key.least <= item <= key.most for item in value)
        return None if good else f"a list of integers of at least {key.least}"
    if key.kind == "numbers":
        good = isinstance(value, list) and all(type(item) in (int, float) and 0 <= item <= _MOST for item in value)
        return None if good and len(value) == key.least else f"a list of {key.least} numbers from 0"
    return None  # token ids are checked against the vocabulary by their reader


def _short(value: object) -> str:
    """The value, cut to 60 characters; null, true and false as JSON has them."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else short(value)
