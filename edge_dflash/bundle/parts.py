"""The files of a bundle: which weight lies in which, what its tensors are called, how they are written and hashed.

A weight ``target.layers.3.mlp.gate_proj`` is stored as tensors named by it and ModelOpt's suffixes: ``.weight`` (BF16,
F32, F8_E4M3, or U8 for packed E2M1 pairs), ``.weight_scale``, ``.weight_scale_2``, ``.input_scale``. A bundle that the
native backend reads holds its linears repacked as stacks instead, whatever other backend it has: each as the tensors
``KEY.data`` (bytes; NVFP4: ``KEY.words``, or ``KEY.pairs`` where words hold a pair a byte) and ``KEY.scale`` (FP32
factors of the rows' sums).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from edge_dflash.bundle.manifest import FileEntry
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.vision import TOWER
from edge_dflash.weights.formats import FORMATS, SCALAR, TIED, Array, Weight, WeightFormat
from edge_dflash.weights.layout import Repacked, Words
from edge_dflash.weights.safetensors import DTYPES, forget_pages, header_of
from edge_dflash.weights.stacks import Stack, pair_experts, pair_stacks, program_stacks

CHUNK = 8 << 20  # bytes read or written at once
# Tensors of a stack: one of these by its NVFP4 words ("data" for other formats),
DATA: Mapping[Words, str] = {"shared": "words", "bytes": "pairs"}
SCALE = "scale"  # and this
JOURNAL = "journal.jsonl"  # of a build, in its working directory
JOURNAL_SCHEMA = 1
Advance = Callable[[int], None]  # told the number of bytes done since the last call
Piece: TypeAlias = "bytes | memoryview | Array"  # of a file's content


def uncounted(count: int) -> None:
    """The progress of a file that is too small to show."""


@dataclass(frozen=True)
class Part:
    """Contents of one weight file."""

    names: tuple[str, ...] = ()  # weights that are stored by themselves
    stacks: tuple[Stack, ...] = ()


def part_of(name: str) -> str:
    """Relative path of the file that holds the weight ``name``."""
    model, _, rest = name.partition(".")
    if rest.startswith("layers."):
        return f"weights/{model}-layer-{int(rest.split('.')[1]):03d}.safetensors"
    if name.startswith(TOWER):
        return "weights/target-vision.safetensors"
    group = {"embed_tokens": "embed", "fc": "context", "hidden_norm": "context"}.get(rest, "head")
    return f"weights/{model}-{group}.safetensors"


def to_tensors(name: str, weight: Weight) -> dict[str, tuple[str, Array]]:
    """Tensors that store a weight in a bundle: name -> (safetensors dtype, array)."""
    parts = weight.parts()
    if weight.input_scale is not None:
        parts["input_scale"] = ("F32", np.array(weight.input_scale, dtype=np.float32))
    return {f"{name}.{suffix}": part for suffix, part in parts.items()}


def from_tensors(
    name: str, tensors: Mapping[str, tuple[str, Array]], shape: tuple[int, ...], form: WeightFormat
) -> Weight:
    """Undo :func:`to_tensors` of a weight of a format, with views of the same bytes.

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
    if kind != (wanted := FORMATS[form].dtype):
        raise ValueError(f"{name}.weight is {kind}, wanted {wanted} of {form}, as the manifest says")
    weight = FORMATS[form].weight.of(data, shape, take)
    if FORMATS[form].quantized and "input_scale" in found:
        weight = replace(weight, input_scale=float(take("input_scale", "F32", SCALAR)))  # type: ignore[type-var]
    if found:
        raise ValueError(f"{name}.{sorted(found)[0]} is not part of a weight stored as {form}")
    if weight.shape != shape:
        raise ValueError(f"{name} has shape {list(weight.shape)}, wanted {list(shape)}")
    return weight


def bundle_parts(programs: PairPrograms, formats: Mapping[str, WeightFormat], *, stacked: bool) -> dict[str, Part]:
    """Weight files of a bundle, by path. A tied lm_head is in none: it is the embedding.

    Raises BackendError for a format that the native kernels do not take.
    """
    stacks = native_stacks(programs, formats) if stacked else {}
    inside = {name for stack in stacks.values() for name in stack.names}
    names: dict[str, list[str]] = {}
    held: dict[str, list[Stack]] = {}
    for name in (name for name, form in formats.items() if form != TIED and name not in inside):
        names.setdefault(part_of(name), []).append(name)
    for stack in stacks.values():
        held.setdefault(stack_part(stack), []).append(stack)
    return {path: Part(tuple(names.get(path, ())), tuple(held.get(path, ()))) for path in (names | held)}


def native_stacks(programs: PairPrograms, formats: Mapping[str, WeightFormat]) -> dict[str, Stack]:
    """Stacks that a native bundle stores, by key: all but that of a tied lm_head. Raises BackendError."""
    seeing = program_stacks(programs.see, formats) if programs.see else ()
    of_pair = {**pair_stacks(programs, formats), **pair_experts(programs, formats)}
    stacks = of_pair | {stack.key: stack for stack in seeing}
    return {key: stack for key, stack in stacks.items() if all(formats[name] != TIED for name in stack.names)}


def stack_part(stack: Stack) -> str:
    """File of a stack: that of its weights, or the model's context file when they are of several layers."""
    parts = {part_of(name) for name in stack.names}
    return parts.pop() if len(parts) == 1 else part_of(f"{stack.names[0].partition('.')[0]}.hidden_norm")


def data_name(stack: Stack, words: Words) -> str:
    """Suffix of the tensor of a stack's bytes."""
    return DATA[words] if stack.layout.format == "nvfp4" else "data"


def stack_bytes(stack: Stack) -> int:
    """Bytes of a stack in its file."""
    return stack.nbytes + 4 * stack.rows


def repacked_of(stack: Stack, tensors: Mapping[str, tuple[str, Array]]) -> Repacked:
    """A stack over the tensors of its file, as views. Raises ValueError saying what was found and what is wanted."""
    words: Words = next((words for words, name in DATA.items() if f"{stack.key}.{name}" in tensors), "shared")
    wanted = {
        f"{stack.key}.{data_name(stack, words)}": ("U8", (stack.nbytes,)),
        f"{stack.key}.{SCALE}": ("F32", (stack.rows,)),
    }
    for name, (kind, shape) in wanted.items():
        found, array = tensors.get(name, ("nothing", None))
        size = list(array.shape) if array is not None else []
        if (found, size) != (kind, list(shape)):
            raise ValueError(f"{name} is {found} {size}, wanted {kind} {list(shape)}")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise ValueError(f"{extra[0]} is not part of a stack")
    data, scale = (tensors[name][1] for name in wanted)
    return Repacked(stack.layout, data, scale, words)


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
    found = to_tensors(name, weight).items()
    return [Tensor(key, kind, array.shape, partial(iter, [array])) for key, (kind, array) in found]


def wide_first(tensor: Tensor) -> tuple[int, str]:
    """Order in a file: wide types first keep views aligned."""
    return -np.dtype(DTYPES[tensor.kind]).itemsize, tensor.name


def tensor_file(tensors: Sequence[Tensor]) -> Iterator[Piece]:
    """A safetensors file of tensors in the order given; its bytes depend on them alone."""
    yield header_of((tensor.name, tensor.kind, tensor.shape) for tensor in tensors)
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


def _flat(piece: Piece) -> Array:
    """Bytes of a piece, of an array in C order."""
    if isinstance(piece, np.ndarray):
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
    return np.frombuffer(piece, np.uint8)


def building_path(output: Path) -> Path:
    """Where the build of ``output`` works."""
    return output.parent / f"{output.name}.building"  # "." has no name


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
