"""Reading a YAML mapping strictly: every key known and given once, every value of its type. Knows no recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml

from edge_dflash.common.files import read_text
from edge_dflash.errors import RecipeError, short

Choice = TypeVar("Choice", bound=str)

MOST = 1 << 16  # bytes of a file; those that ship have at most a few thousand


def read_table(path: Path, accepted: tuple[str, ...], help_file: str) -> Table:
    """Read a file whose document is a mapping with some of the keys ``accepted``. Raises RecipeError."""
    try:
        document = yaml.load(read_text(path, MOST), Loader=_Plain)
    except Exception as error:  # the library lets ValueError, KeyError and others out of tagged or odd scalars
        deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if deep else getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise RecipeError(f"{path}: not a readable YAML file ({reason}); see {help_file}") from None
    return Table(str(path), document, accepted)


class _Plain(yaml.SafeLoader):
    """A safe loader that refuses what a table has no use for: keys given twice, and aliases, which multiply."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node that is no alias."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(None, None, "aliases are not accepted", self.get_mark())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping after checking that its keys differ."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class Table:
    """A YAML mapping; every reader checks the value's type. A default of None makes a key required."""

    def __init__(self, where: str, value: Any, accepted: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: found {type(value).__name__}, wanted a mapping of {', '.join(accepted)}")
        if unknown := [str(key) for key in value if key not in accepted]:
            raise RecipeError(f"{where}: unknown key {', '.join(unknown)[:200]}; accepted: {', '.join(accepted)}")
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
        return RecipeError(f"{self._where}: {key} is {short(self.get(key))}; wanted {wanted}")
