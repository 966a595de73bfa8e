"""Reading a YAML mapping strictly: every key known and given once, every value of its type. Knows no recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from edge_dflash.errors import RecipeError

Choice = TypeVar("Choice", bound=str)


def read_table(path: Path, accepted: tuple[str, ...], help_file: str) -> Table:
    """Read a file whose document is a mapping with some of the keys ``accepted``. Raises RecipeError."""
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path}: not a readable YAML file ({reason}); see {help_file}") from error
    return Table(str(path), document, accepted)


class _UniqueKeys(yaml.SafeLoader):
    """A safe loader that refuses a key given twice instead of dropping the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping after checking that its keys differ."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


class Table:
    """A YAML mapping; every reader checks the value's type. A default of None makes a key required."""

    def __init__(self, where: str, value: Any, accepted: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: found {type(value).__name__}, wanted a mapping of {', '.join(accepted)}")
        if unknown := [str(key) for key in value if key not in accepted]:
            raise RecipeError(f"{where}: unknown key {', '.join(unknown)}; accepted: {', '.join(accepted)}")
        self._where, self._value = where, value

    @property
    def given(self) -> list[str]:
        """Keys that the file gives."""
        return list(self._value)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of any type."""
        return self._value.get(key, default)

    def text(self, key: str, default: str | None) -> str:
        """Text; not blank when required."""
        value = self.get(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(key, "text")
        return value

    def positive(self, key: str, default: int) -> int:
        """Return an integer above 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, "a positive integer")
        return value

    def one_of(self, key: str, accepted: tuple[Choice, ...], default: Choice | None) -> Choice:
        """One of the accepted texts."""
        value = self.get(key, default)
        for choice in accepted:
            if choice == value:
                return choice
        raise self.wrong(key, "one of " + ", ".join(accepted))

    def child(self, key: str, accepted: tuple[str, ...]) -> Table:
        """Mapping under a key; empty when the file does not give it."""
        return Table(f"{self._where}: {key}", self.get(key, {}), accepted)

    def children(self, key: str, accepted: tuple[str, ...]) -> list[Table]:
        """List of mappings under a key; empty when the file does not give it."""
        value = self.get(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return [Table(f"{self._where}: {key}[{i}]", entry, accepted) for i, entry in enumerate(value)]

    def wrong(self, key: str, wanted: str) -> RecipeError:
        """Error that names file, key, value found and what is wanted."""
        return RecipeError(f"{self._where}: {key} is {self.get(key)!r}; wanted {wanted}")
