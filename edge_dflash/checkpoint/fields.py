"""Typed access to the fields of a config.json, with errors that name file, field, found and wanted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_dflash.errors import CheckpointError
from edge_dflash.files import short

MOST = 1 << 30  # of an integer: sizes, ids and positions stay far from where 32 bits end
_LONGEST = 1024  # entries of a list of layers

_MISSING: Any = object()


class Fields:
    """A JSON object of a config file. A field that is null counts as missing."""

    def __init__(self, file: Path, values: Mapping[str, Any], path: str = "") -> None:
        self.file = file
        self.values = values
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(self, name: str, default: int = _MISSING, *, least: int = 1, most: int = MOST) -> int:
        """Integer from ``least`` to ``most``."""
        value = self._value(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, value, f"an integer of at least {least}")
        if value > most:
            raise self.error(name, value, f"an integer of at most {most}")
        return value

    def number(self, name: str, default: float = _MISSING) -> float:
        """Positive finite number."""
        value = self._value(name, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.error(name, value, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if type(value) is not bool:
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str = _MISSING) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """List of integers >= 0, of at most as many as a model may have layers."""
        value = self._value(name)
        if isinstance(value, list) and len(value) > _LONGEST:
            raise self.error(name, f"{len(value)} entries", f"at most {_LONGEST}")
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(name, value, "a list of integers of at least 0")
        return tuple(value)

    def choices(self, name: str, accepted: Sequence[str], length: int) -> tuple[str, ...]:
        """List of ``length`` strings, each one of ``accepted``."""
        value = self._value(name)
        if not isinstance(value, list) or len(value) != length:
            count = len(value) if isinstance(value, list) else value
            raise self.error(name, count, f"a list of {length} entries, one a layer")
        for item in value:
            if item not in accepted:
                raise self.error(name, item, f"one of {', '.join(accepted)} for each layer")
        return tuple(value)

    def child(self, name: str) -> Fields:
        """A nested object; empty when it is missing."""
        value = {} if self.values.get(name) is None else self.values[name]
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(self.file, value, f"{self._path}{name}.")

    def error(self, name: str, found: object, wanted: str) -> CheckpointError:
        """An error about a field."""
        return CheckpointError(f"{self.file}: {self._path}{name} is {short(found)}, wanted {wanted}")

    def _value(self, name: str, default: Any = _MISSING) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise CheckpointError(f"{self.file} lacks the field {self._path}{name}; the checkpoint is incomplete")
        return default
