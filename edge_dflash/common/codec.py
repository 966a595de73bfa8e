"""Frozen dataclasses to JSON values and back, strictly: every key present, no key unknown, no type coerced.

Knows bool, int, float, str, None, Literal, unions of these, variadic and fixed tuples, string-keyed mappings and
nested dataclasses. Knows nothing about files or about any particular dataclass. Errors are :class:`BundleError`, whose
message starts with the dotted path of the field and names what was found and what is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from edge_dflash.errors import BundleError, short

T = TypeVar("T")


def encode(value: object) -> Any:
    """Turn a dataclass (or a value such as one may hold) into what :mod:`json` writes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
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
        number = float(cast(float, value))
        if math.isfinite(number):
            return number
    elif kind in (bool, int, str) and type(value) is kind:
        return value
    elif kind is NoneType and value is None:
        return None
    raise _mismatch(where, value, "null" if kind is NoneType else str(getattr(kind, "__name__", kind)))


def _decode_union(kinds: tuple[Any, ...], value: object, where: str) -> object:
    """``X | None``: null, or X with X's own message."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) != 1:
        raise TypeError(f"{where}: a union of more than one type and None is not supported")
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
    if missing := sorted(hints.keys() - value.keys()):
        raise BundleError(f"{where}: key {missing[0]!r} is missing")
    return cls(**{name: _decode(kind, value[name], f"{where}.{name}") for name, kind in hints.items()})


@cache
def _hints(cls: Callable[..., object]) -> dict[str, Any]:
    """Types of the fields, annotations resolved, in the order of the class."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cast(Any, cls))}


def _mismatch(where: str, value: object, wanted: str) -> BundleError:
    return BundleError(f"{where}: found {short(value)}, wanted {wanted}")
