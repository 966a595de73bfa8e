"""Arguments of kernels, as the driver takes them."""

from __future__ import annotations

import ctypes
from typing import Any, TypeAlias

from edge_dflash.backends.cuda.memory import DevicePointer

Argument: TypeAlias = "DevicePointer | int | float | ctypes._SimpleCData[Any] | ctypes.Structure"
"""A kernel argument: a pointer, an int (passed as int32), a float (float32), a ctypes scalar of any other type, or a
ctypes structure, passed by value."""


def as_argument(value: Argument) -> tuple[Any, Any]:
    """Value and type; the type of a structure is its own."""
    match value:
        case DevicePointer():
            return value.address, ctypes.c_void_p
        case int():
            return int(value), ctypes.c_int32
        case float():
            return value, ctypes.c_float
        case ctypes.Structure():
            return value, None
        case _:
            return value.value, type(value)
