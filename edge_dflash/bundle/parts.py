"""The weight files of a bundle: which weight lies in which file, what its tensors are called, how a file is written.

A weight ``target.layers.3.mlp.gate_proj`` is stored as tensors named by it and ModelOpt's suffixes: ``.weight`` (BF16,
F32, F8_E4M3, or U8 for packed E2M1 pairs), ``.weight_scale``, ``.weight_scale_2``, ``.input_scale``. Knows nothing of
checkpoints, recipes or manifests.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge_dflash.bundle.manifest import FileEntry
from edge_dflash.weights.formats import FORMATS, SCALAR, Array, Weight
from edge_dflash.weights.safetensors import DTYPES, forget_pages

CHUNK = 8 << 20  # bytes read or written at once
Advance = Callable[[int], None]  # told the number of bytes done since the last call


def part_of(name: str) -> str:
    """Relative path of the file that holds the weight ``name``."""
    model, _, rest = name.partition(".")
    if rest.startswith("layers."):
        return f"weights/{model}-layer-{int(rest.split('.')[1]):03d}.safetensors"
    group = {"embed_tokens": "embed", "fc": "context", "hidden_norm": "context"}.get(rest, "head")
    return f"weights/{model}-{group}.safetensors"


def to_tensors(name: str, weight: Weight) -> dict[str, tuple[str, Array]]:
    """Tensors that store a weight in a bundle: name -> (safetensors dtype, array)."""
    parts = weight.parts()
    if weight.input_scale is not None:
        parts["input_scale"] = ("F32", np.array(weight.input_scale, dtype=np.float32))
    return {f"{name}.{suffix}": part for suffix, part in parts.items()}


def from_tensors(name: str, tensors: Mapping[str, tuple[str, Array]], shape: tuple[int, ...]) -> Weight:
    """Undo :func:`to_tensors`, with views of the same bytes.

    ``tensors`` are all tensors whose name starts with ``name.``; ``shape`` is the logical shape. Raises ValueError
    saying what was found and what is wanted.
    """
    found = {key.removeprefix(f"{name}."): value for key, value in tensors.items()}

    def take(suffix: str, kind: str, shapes: Iterable[tuple[int, ...]]) -> Array:
        got, array = found.pop(suffix, ("nothing", np.empty(0)))
        if got != kind or array.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"{suffix} is {got} {list(array.shape)}, wanted {kind} {wanted}")
        return array

    kind, data = found.pop("weight", ("nothing", np.empty(0)))
    form = next((form for form in FORMATS.values() if form.dtype == kind), None)
    if form is None:
        *others, last = (form.dtype for form in FORMATS.values())
        raise ValueError(f"{name}.weight is {kind}, wanted {', '.join(others)} or {last}")
    weight = form.weight.of(data, shape, take)
    if form.quantized and "input_scale" in found:
        weight = replace(weight, input_scale=float(take("input_scale", "F32", SCALAR)))  # type: ignore[type-var]
    if found:
        raise ValueError(f"{name}.{sorted(found)[0]} is not part of a weight stored as {kind}")
    if weight.shape != shape:
        raise ValueError(f"{name} has shape {list(weight.shape)}, wanted {list(shape)}")
    return weight


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written: its bytes are made when the file has come that far."""

    name: str
    kind: str  # safetensors dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Array]]  # its values in C order, in pieces

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * np.dtype(DTYPES[self.kind]).itemsize


def whole(name: str, weight: Weight) -> list[Tensor]:
    """Tensors of a weight that is at hand."""
    return [
        Tensor(key, kind, array.shape, partial(_once, array)) for key, (kind, array) in to_tensors(name, weight).items()
    ]


def write_part(path: Path, weights: Mapping[str, Weight], advance: Advance) -> FileEntry:
    """Write weights as one safetensors file, durably, and return its hash and size.

    Bytes depend on the weights alone. Raises OSError; the caller removes what was begun.
    """
    tensors = [tensor for name, weight in weights.items() for tensor in whole(name, weight)]
    return write_tensors(path, sorted(tensors, key=wide_first), advance)


def wide_first(tensor: Tensor) -> tuple[int, str]:
    """Order in a file: wide types first keep views aligned."""
    return -np.dtype(DTYPES[tensor.kind]).itemsize, tensor.name


def write_tensors(path: Path, tensors: Sequence[Tensor], advance: Advance) -> FileEntry:
    """Write tensors in the order given, as :func:`write_part` does."""
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with DurableFile(path, advance) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            end = file.entry.size + tensor.nbytes
            for array in tensor.chunks():
                file.write_array(array)
            if file.entry.size != end:
                raise ValueError(
                    f"{tensor.name} came to {file.entry.size - end + tensor.nbytes} of {tensor.nbytes} bytes"
                )
    return file.entry


class DurableFile:
    """A file being written: hashed on the way, flushed to the disk at the end, and not kept in the page cache."""

    def __init__(self, path: Path, advance: Advance) -> None:
        self._path = path
        self._advance = advance
        self._hash = hashlib.sha256()
        self._size = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> DurableFile:
        self._file = self._path.open("wb")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        file = self._file
        if file is None:
            return
        self._file = None
        with file:
            if kind is None:
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        if self._file is None:
            raise ValueError(f"{self._path} is not open")
        write_bytes(self._file, data)
        self._hash.update(data)
        self._size += len(data)
        self._advance(len(data))

    def write_array(self, array: Array) -> None:
        """Append an array's bytes in C order, a chunk at a time, and forget the pages of a mapped array."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, flat.size, CHUNK):
            self.write(flat[start : start + CHUNK].data)
            forget_pages(flat[start : start + CHUNK])

    @property
    def entry(self) -> FileEntry:
        """Hash and size of what was written."""
        return FileEntry(self._hash.hexdigest(), self._size)


def write_bytes(file: BinaryIO, data: bytes | memoryview) -> None:
    """The one place where a build writes file contents."""
    file.write(data)


def hash_file(path: Path, advance: Advance) -> FileEntry:
    """SHA-256 and size of a file, streamed. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            advance(count)
    return FileEntry(digest.hexdigest(), size)


def _once(array: Array) -> tuple[Array, ...]:
    return (array,)
