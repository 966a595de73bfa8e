"""Files read strictly: every key known and given once, every value of its type.

JSON that this package writes is the fields of a dataclass (:func:`encode`, :func:`decode`); YAML that people write is
read by rules (:func:`read_yaml`); JSON of a checkpoint is an object, whose readers know more (:func:`read_json`).
Errors name the place, the value found and what is wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge_dflash.common.files import SMALL, parse_json, read_bytes, read_text
from edge_dflash.common.nested import Object
from edge_dflash.common.rules import FieldError
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


def finite(value: float) -> float | None:
    """Itself, or None: JSON has no infinity and no NaN."""
    return value if math.isfinite(value) else None


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


MOST = 1 << 16  # bytes of a YAML file; those that ship have at most a few thousand


def read_yaml(path: Path, table: Object | None, help_file: str) -> dict[str, Any]:
    """The keys that a YAML file gives, as ``table`` takes them; None: for :func:`decode`. Raises RecipeError.

    ``help_file`` explains the keys.
    """
    try:
        document = _loader()(read_text(path, MOST)).get_single_data()
    except Exception as error:  # the library lets ValueError, KeyError and others out of tagged or odd scalars
        deep = isinstance(error, RecursionError)
        reason = "nested too deeply" if deep else getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise RecipeError(f"{path}: not a readable YAML file ({reason}); see {help_file}") from None
    try:
        return table.read(document) if table else document
    except FieldError as error:
        raise RecipeError(f"{path}: {error}; see {help_file}") from None


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


def read_json(file: Path, most: int = SMALL) -> dict[str, Any]:
    """Read a JSON object of at most so many bytes. Raises CheckpointError when there is no file or no object in it."""
    try:
        value = parse_json(read_bytes(file, most), object_pairs_hook=unique_keys, parse_constant=no_constant)
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
        twice = repeated(name for name, _ in pairs) or ""
        raise ValueError(f"the name {twice[:60]!r} occurs twice in one object")
    return value


def repeated(names: Iterable[str]) -> str | None:
    """The first name that occurs more than once; None: all differ."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def no_constant(name: str) -> Any:
    """JSON has no NaN and no infinity, though Python's reader takes them."""
    raise ValueError(f"{name} is no number of JSON")
