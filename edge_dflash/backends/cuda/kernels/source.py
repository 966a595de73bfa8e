"""What kernels take, read from their C++ text, which alone declares it: parameters of a kernel, fields of a structure.

Values are given by name: as keywords, or as fields of records. A matrix ``x`` also gives ``x_stride``. A parameter that
nothing is given for, and a number in the place of a pointer, raise TypeError.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from edge_dflash.backends.cuda.memory import NULL, Argument, DevicePointer, Matrix

if TYPE_CHECKING:
    from edge_dflash.backends.cuda.driver import Gpu, Module

KERNELS = Path(__file__).parent
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_DECLARATION = re.compile(r"(?:const )?(\w+)\s*([^;]+);")
_DECLARATOR = re.compile(r"\s*(\**)\s*(\w+)(?:\[([^\]]+)\])?\s*")
_PARAMETERS = re.compile(r"\(([^()]*)\)\s*\{")
_NUMBERS: Mapping[str, Any] = {
    "int": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}

Value: TypeAlias = "DevicePointer | Matrix | int | float | ctypes.Structure | None"
"""A pointer (of a matrix: to its first row; None: null), a number, or a structure."""


class Signature:
    """Parameters of a kernel in order; called, the arguments of a launch.

    ``kernel``: its name in ``file`` or in what that includes, or the name of the macro that defines such kernels.
    """

    def __init__(self, file: str, kernel: str) -> None:
        text = _text(file)
        begin = re.search(rf"(?<!\w){kernel}\(", text)
        found = _PARAMETERS.search(text, begin.start()) if begin else None
        if found is None:
            raise TypeError(f"{file} has no kernel {kernel}")
        self._parameters = [(part.split()[-1].lstrip("*"), "*" in part) for part in found[1].split(",")]

    def __call__(self, *records: object, **values: Any) -> tuple[Argument, ...]:
        """Arguments, each from ``values`` or from the first of ``records`` that has it."""
        return tuple(_fit(name, pointer, find(name, records, values)) for name, pointer in self._parameters)


class KernelFace:
    """The loaded kernels of a unit, each launched by its name with its parameters by theirs."""

    _signatures: ClassVar[Mapping[str, Signature]] = {}

    def __init__(self, gpu: Gpu, module: Module) -> None:
        self._gpu = gpu
        self._kernels = {name: module.kernel(name) for name in self._signatures}

    def _launch(self, name: str, grid: tuple[int, int, int], threads: int, *records: object, **values: Any) -> None:
        self._gpu.launch(self._kernels[name], grid, threads, self._signatures[name](*records, **values), overlap=True)


class Struct(ctypes.Structure):
    """A structure that a kernel takes by value; made by :func:`structure`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = ()

    @classmethod
    def of(cls, *records: object, **values: Any) -> Self:
        """The structure, each field from ``values`` or from the first of ``records`` that has it.

        A field that is an array takes a sequence; what is left of it is zero.
        """
        made = cls()
        for name, kind in cls._fields_:
            value = find(name, records, values)
            if issubclass(kind, ctypes.Array):
                pointers = kind._type_ is ctypes.c_void_p
                getattr(made, name)[: len(value)] = [_word(name, kind._type_, x) for x in value] if pointers else value
            else:
                setattr(made, name, _word(name, kind, value))
        return made


@cache
def structure(file: str, name: str) -> type[Struct]:
    """The structure ``name`` of ``file``, or of what that includes."""
    text = _text(file)
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.S)
    if body is None:
        raise TypeError(f"{file} has no structure {name}")
    fields: list[tuple[str, Any]] = []
    for word, declarators in _DECLARATION.findall(body[1]):
        for declarator in declarators.split(","):
            found = _DECLARATOR.fullmatch(declarator)
            assert found is not None
            stars, field, size = found.groups()
            kind = ctypes.c_void_p if stars else _NUMBERS.get(word) or structure(file, word)
            fields.append((field, kind * _size(text, size) if size else kind))
    return type(name, (Struct,), {"_fields_": fields})


@cache
def _text(file: str) -> str:
    """A file, then what it includes, without comments and continued lines."""
    text = (KERNELS / file).read_text()
    parts = [COMMENT.sub(" ", text).replace("\\\n", " "), *(_text(name) for name in INCLUDE.findall(text))]
    return "\n".join(parts)


def _size(text: str, product: str) -> int:
    """Value of a product of numbers and constants."""
    factors = (word if word.isdigit() else re.search(rf"\b{word} = (\d+)", text) for word in product.split(" * "))
    return math.prod(int(one if isinstance(one, str) else one[1]) for one in factors if one)


def find(name: str, records: Sequence[object], values: Mapping[str, Any]) -> Any:
    """What ``values`` or the first of ``records`` that has it gives for a name; of a matrix its stride, too."""
    if name in values:
        return values[name]
    for record in records:
        if hasattr(record, name):
            return getattr(record, name)
    if name.endswith("_stride"):
        matrix = find(name.removesuffix("_stride"), records, values)
        if isinstance(matrix, Matrix):
            return matrix.stride
        if isinstance(matrix, Sequence):
            return [one.stride for one in matrix]
    raise TypeError(f"nothing is given for {name}")


def _fit(name: str, pointer: bool, value: Value) -> Argument:
    if isinstance(value, Matrix):
        value = value.pointer
    if value is None:
        value = NULL
    if not isinstance(value, DevicePointer if pointer else int | float | ctypes.Structure):
        raise TypeError(f"{name} is {value!r}, {'a pointer' if pointer else 'a number'} is wanted")
    return value


def _word(name: str, kind: Any, value: Value) -> Any:
    """A value as a field takes it."""
    found = _fit(name, kind is ctypes.c_void_p, value)
    return found.address if isinstance(found, DevicePointer) else found
