"""Tables read strictly: every key known and given once, every value of its type.

Errors name the place, the value found and what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge_dflash.common.files import SMALL, parse_json, read_bytes, read_text
from edge_dflash.errors import BundleError, CheckpointError, RecipeError, short

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")

UNWRITTEN: Mapping[str, Any] = {"unwritten": True}  # metadata of a field that is left out where it has its default


def encode(value: object) -> Any:
    """Turn a dataclass (or a value such as one may hold) into what :mod:`json` writes."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: (field, getattr(value, field.name)) for field in fields(value)}
        return {
            name: encode(item)
            for name, (field, item) in found.items()
            if field.metadata != UNWRITTEN or item != field.default
        }
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} has no JSON form")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form here")


def decode(cls: type[T], value: object, where: str) -> T:
    """Build ``cls`` from a JSON value. Raises BundleError, naming the field under ``where``, found and wanted."""
    return cast(T, _decode(cls, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = get_origin(kind)
    if is_dataclass(kind):
        return _decode_dataclass(cast("Callable[..., object]", kind), value, where)
    if origin in (Union, UnionType):
        return _decode_union(get_args(kind), value, where)
    if origin is Literal:
        accepted = get_args(kind)
        if not isinstance(value, str) or value not in accepted:
            raise _mismatch(where, value, "one of " + ", ".join(map(repr, accepted)))
        return value
    if origin is tuple:
        return _decode_tuple(get_args(kind), value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _mismatch(where, value, "an object")
        return {key: _decode(get_args(kind)[1], item, f"{where}.{key}") for key, item in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Any, value: object, where: str) -> object:
    """Scalars keep their type: true is no int, 1.0 is no int, but 1 is a float that was written shortly."""
    if kind is float and type(value) in (int, float):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            if math.isfinite(number := float(cast(float, value))):
                return number
    elif kind in (bool, int, str) and type(value) is kind:
        return value
    elif kind is NoneType and value is None:
        return None
    raise _mismatch(where, value, "null" if kind is NoneType else str(getattr(kind, "__name__", kind)))


def _decode_union(kinds: tuple[Any, ...], value: object, where: str) -> object:
    """``X | None``: null, or X with X's own message. Of several dataclasses, that whose keys are all there."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) > 1:
        if not all(is_dataclass(kind) for kind in others):
            raise TypeError(f"{where}: a union of more than one type and None is only supported of dataclasses")
        given = value.keys() if isinstance(value, dict) else set()
        keys = [(kind, _hints(cast(Any, kind)).keys()) for kind in others]
        others = [kind for kind, names in keys if names == given] or others
    return _decode(others[0], value, where)


def _decode_tuple(kinds: tuple[Any, ...], value: object, where: str) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise _mismatch(where, value, "an array")
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    elif len(kinds) != len(value):
        raise _mismatch(where, value, f"an array of {len(kinds)}")
    return tuple(_decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _decode_dataclass(cls: Callable[..., object], value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _mismatch(where, value, "an object")
    hints = _hints(cls)
    if unknown := sorted(value.keys() - hints.keys()):
        raise BundleError(f"{where}: unknown key {unknown[0]!r}; accepted keys are {', '.join(hints)}")
    unwritten = {field.name for field in fields(cast(Any, cls)) if field.metadata == UNWRITTEN}
    if missing := sorted(hints.keys() - value.keys() - unwritten):
        raise BundleError(f"{where}: key {missing[0]!r} is missing")
    return cls(**{k: _decode(kind, value[k], f"{where}.{k}") for k, kind in hints.items() if k in value})


@cache
def _hints(cls: Callable[..., object]) -> dict[str, Any]:
    """Types of the fields, annotations resolved, in the order of the class."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cast(Any, cls))}


def _mismatch(where: str, value: object, wanted: str) -> BundleError:
    return BundleError(f"{where}: found {short(value)}, wanted {wanted}")


Choice = TypeVar("Choice", bound=str)

MOST = 1 << 16  # bytes of a file; those that ship have at most a few thousand


def read_table(path: Path, accepted: tuple[str, ...], help_file: str, *, complete: bool = False) -> Table:
    """Read a file whose document is a mapping with some of the keys ``accepted``, or all. Raises RecipeError."""
    try:
        document = _loader()(read_text(path, MOST)).get_single_data()
    except Exception as error:  # the library lets ValueError, KeyError and others out of tagged or odd scalars
        deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if deep else getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise RecipeError(f"{path}: not a readable YAML file ({reason}); see {help_file}") from None
    return Table(str(path), document, accepted, help_file if complete else None)


@cache
def _loader() -> type[yaml.SafeLoader]:
    """YAML's safe loader, stricter. Imported with the first table: what runs a bundle reads none."""
    import yaml

    class Plain(yaml.SafeLoader):
        """Refuses what a table has no use for: keys given twice, and aliases, which multiply."""

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
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    return Plain


class Table:
    """A YAML mapping; every reader checks the value's type. A default of None makes a key required.

    ``complete``: all keys must be given, here and in the tables inside; the file that explains them.
    """

    def __init__(self, where: str, value: Any, accepted: tuple[str, ...], complete: str | None = None) -> None:
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: found {type(value).__name__}, wanted a mapping of {', '.join(accepted)}")
        if unknown := [str(key) for key in value if key not in accepted]:
            raise RecipeError(f"{where}: unknown key {', '.join(unknown)[:200]}; accepted: {', '.join(accepted)}")
        if complete is not None and (missing := [key for key in accepted if key not in value]):
            raise RecipeError(f"{where}: missing key {', '.join(missing)}; add it, see {complete}")
        self.where, self._value, self._complete = where, value, complete

    @property
    def given(self) -> list[str]:
        """Keys that the file gives."""
        return list(self._value)

    def get(self, key: str, default: Any = None) -> Any:
        """Value of any type."""
        return self._value.get(key, default)

    def text(self, key: str, default: str | None, wanted: str = "text") -> str:
        """Text; not blank when required."""
        value = self.get(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.wrong(key, wanted)
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer above 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(key, "a positive integer")
        return value

    def optional_int(self, key: str) -> int | None:
        """Return an integer from 0, or None."""
        value = self.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise self.wrong(key, "an integer from 0, or null")
        return value

    def items(self, key: str) -> list[Any]:
        """A list; empty when the file does not give it."""
        value = self.get(key, [])
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
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
        return Table(f"{self.where}: {key}", self.get(key, {}), accepted, self._complete)

    def children(self, key: str, accepted: tuple[str, ...]) -> list[Table]:
        """List of mappings under a key; empty when the file does not give it."""
        entries = enumerate(self.items(key))
        return [Table(f"{self.where}: {key}[{i}]", entry, accepted, self._complete) for i, entry in entries]

    def wrong(self, key: str, wanted: str) -> RecipeError:
        """Error that names file, key, value found and what is wanted."""
        return RecipeError(f"{self.where}: {key} is {short(self.get(key))}; wanted {wanted}")


def read_json(file: Path, most: int = SMALL) -> dict[str, Any]:
    """Read a JSON object of at most so many bytes. Raises CheckpointError when there is no file or no object in it."""
    try:
        value = parse_json(read_bytes(file, most), object_pairs_hook=unique_keys, parse_constant=_no_constant)
    except FileNotFoundError:
        raise CheckpointError(f"no {file.name} in {file.parent}; give the directory of a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; correct that or download it again") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a JSON {type(value).__name__}, wanted an object; download it again")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON object whose names are all different: a second entry of one name would hide the first."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:60]!r} occurs twice in one object")
    return value


def _no_constant(name: str) -> Any:
    """JSON has no NaN and no infinity, though Python's reader takes them."""
    raise ValueError(f"{name} is no number of JSON")
