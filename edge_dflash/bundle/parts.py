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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from edge_dflash.bundle.manifest import FileEntry, WeightFormat
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.weights.formats import Array, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.safetensors import DTYPES, forget_pages

CHUNK = 8 << 20  # bytes read or written at once
JOURNAL = "journal.jsonl"  # of a build, in its working directory
JOURNAL_SCHEMA = 1
Advance = Callable[[int], None]  # told the number of bytes done since the last call
Piece: TypeAlias = "bytes | memoryview | Array"  # of a file's content

_WIDE = {"BF16": np.uint16, "F32": np.float32}


def uncounted(count: int) -> None:
    """The progress of a file that is too small to show."""


def part_of(name: str) -> str:
    """Relative path of the file that holds the weight ``name``."""
    model, _, rest = name.partition(".")
    if rest.startswith("layers."):
        return f"weights/{model}-layer-{int(rest.split('.')[1]):03d}.safetensors"
    group = {"embed_tokens": "embed", "fc": "context", "hidden_norm": "context"}.get(rest, "head")
    return f"weights/{model}-{group}.safetensors"


def weight_format(weight: Weight) -> WeightFormat:
    """Name of the weight's format in a manifest."""
    if isinstance(weight, Nvfp4Weight):
        return "nvfp4"
    if isinstance(weight, Fp8Weight):
        return "fp8"
    return "bf16" if weight.data.dtype == np.uint16 else "f32"


def to_tensors(name: str, weight: Weight) -> dict[str, tuple[str, Array]]:
    """Tensors that store a weight: name -> (safetensors dtype, array)."""
    tensors: dict[str, tuple[str, Array]]
    if isinstance(weight, WideWeight):
        return {f"{name}.weight": ("BF16" if weight.data.dtype == np.uint16 else "F32", weight.data)}
    if isinstance(weight, Fp8Weight):
        tensors = {
            f"{name}.weight": ("F8_E4M3", weight.data),
            f"{name}.weight_scale": ("F32", weight.scale),
        }
    else:
        tensors = {
            f"{name}.weight": ("U8", weight.packed),
            f"{name}.weight_scale": ("F8_E4M3", weight.block_scale),
            f"{name}.weight_scale_2": ("F32", np.array(weight.global_scale, dtype=np.float32)),
        }
    if weight.input_scale is not None:
        tensors[f"{name}.input_scale"] = ("F32", np.array(weight.input_scale, dtype=np.float32))
    return tensors


def from_tensors(name: str, tensors: Mapping[str, tuple[str, Array]], shape: tuple[int, ...]) -> Weight:
    """Undo :func:`to_tensors`, with views of the same bytes.

    ``tensors`` are all tensors whose name starts with ``name.``; ``shape`` is the logical shape. Raises ValueError
    saying what was found and what is wanted.
    """
    found = {key.removeprefix(f"{name}."): value for key, value in tensors.items()}
    kind, data = found.pop("weight", ("nothing", np.empty(0)))
    input_scale = _scalar(found, "input_scale") if "input_scale" in found and kind in ("U8", "F8_E4M3") else None
    weight: Weight
    if kind in _WIDE:
        weight = WideWeight(data)
    elif kind == "F8_E4M3":
        scale = _take(found, "weight_scale", "F32", ((1,), (shape[0],)))
        weight = Fp8Weight(data, scale, input_scale)
    elif kind == "U8":
        blocks = _take(found, "weight_scale", "F8_E4M3", ((shape[0], shape[-1] // 16),))
        weight = Nvfp4Weight(data, blocks, _scalar(found, "weight_scale_2"), input_scale)
    else:
        raise ValueError(f"{name}.weight is {kind}, wanted BF16, F32, F8_E4M3 or U8")
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


def wide_first(tensor: Tensor) -> tuple[int, str]:
    """Order in a file: wide types first keep views aligned."""
    return -np.dtype(DTYPES[tensor.kind]).itemsize, tensor.name


def tensor_file(tensors: Sequence[Tensor]) -> Iterator[Piece]:
    """A safetensors file of tensors in the order given; its bytes depend on them alone."""
    header, end = {}, 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        size = 0
        for array in tensor.chunks():
            size += array.nbytes
            yield array
        if size != tensor.nbytes:
            raise ValueError(f"{tensor.name} came to {size} of {tensor.nbytes} bytes")


def write_file(path: Path, pieces: Iterable[Piece], advance: Advance = uncounted) -> FileEntry:
    """Write a file to the disk, hashed on the way and not kept in the page cache; its hash and size.

    The pages of mapped arrays are forgotten. Raises OSError; the caller removes what was begun.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for piece in pieces:
            flat = _flat(piece)
            for start in range(0, flat.size, CHUNK):
                chunk = flat[start : start + CHUNK]
                write_bytes(file, chunk.data)
                digest.update(chunk.data)
                size += chunk.size
                advance(chunk.size)
                forget_pages(chunk)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileEntry(digest.hexdigest(), size)


def write_bytes(file: BinaryIO, data: memoryview) -> None:
    """The one place where a build writes file contents."""
    file.write(data)


def hash_file(path: Path, advance: Advance = uncounted) -> FileEntry:
    """SHA-256 and size of a file, streamed. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            advance(count)
    return FileEntry(digest.hexdigest(), size)


def _take(found: dict[str, tuple[str, Array]], key: str, kind: str, shapes: tuple[tuple[int, ...], ...]) -> Array:
    got, array = found.pop(key, ("nothing", np.empty(0)))
    if got != kind or array.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{key} is {got} {list(array.shape)}, wanted {kind} {wanted}")
    return array


def _scalar(found: dict[str, tuple[str, Array]], key: str) -> float:
    return float(_take(found, key, "F32", ((),)))


def _once(array: Array) -> tuple[Array, ...]:
    return (array,)


def _flat(piece: Piece) -> Array:
    """Bytes of a piece, of an array in C order."""
    if isinstance(piece, np.ndarray):
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    return np.frombuffer(piece, np.uint8)


def building_path(output: Path) -> Path:
    """Where the build of ``output`` works."""
    return output.with_name(output.name + ".building")


def resume_command(path: Path) -> str | None:
    """The command that resumes the build of the bundle ``path``, or of which ``path`` is a working directory."""
    for root in (path, path.parent, building_path(path)):
        if root != path.parent or path.name == "bundle":
            header = read_journal(root / JOURNAL)[0]
            if header is not None:
                return str(header["resume"])
    return None


def read_journal(path: Path) -> tuple[dict[str, Any] | None, dict[str, FileEntry], int]:
    """Header, entries and length in bytes of the part before the first line that is not whole."""
    header: dict[str, Any] | None = None
    entries: dict[str, FileEntry] = {}
    whole = 0
    try:
        lines = read_bytes(path, LARGE).split(b"\n")[:-1]
    except OSError:
        lines = []
    for line in lines:
        try:
            record = json.loads(line)
            if header is not None:
                entries[record["file"]] = FileEntry(record["sha256"], record["size"])
            elif record["schema"] == JOURNAL_SCHEMA and isinstance(record["fingerprint"], dict):
                header = {"resume": record["resume"], "fingerprint": record["fingerprint"]}
            else:
                break
        except (ValueError, KeyError, TypeError, RecursionError):
            break
        whole += len(line) + 1
    return header, entries, whole
