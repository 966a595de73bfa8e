"""Safetensors files, memory-mapped: names, dtypes, shapes and raw arrays.

The header is parsed here, not by the safetensors package, because BF16 and FP8 tensors are wanted as raw codes in
NumPy, and because every damage is to be named by file and tensor. Format: 8 bytes little-endian header length, a JSON
object {name: {dtype, shape, data_offsets}}, then the data; offsets count from the end of the header.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from edge_dflash.board.linux import drop_page_cache
from edge_dflash.common.files import LARGE, is_there, open_regular, parse_json
from edge_dflash.common.tables import read_json, unique_keys
from edge_dflash.errors import CheckpointError, short
from edge_dflash.weights.formats import Array

MAX_HEADER = 32 << 20  # bytes; the format's own reader takes 100 MB, published models have a tenth of one
MAX_NAME, MAX_DIMS = 512, 8  # characters of a tensor's name, dimensions of its shape
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_MAX_FILE_NAME = 255  # bytes, on every file system of Linux

DTYPES: Mapping[str, type[np.generic]] = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
"""Safetensors dtype -> NumPy type of the mapped array; BF16 and FP8 are raw codes."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


class TensorFiles:
    """The tensors of some safetensors files. Arrays are read-only views of the mapped files."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = entries
        self._maps: dict[Path, Array] = {}

    @classmethod
    def open(cls, source: Path | Sequence[Path]) -> TensorFiles:
        """Open a checkpoint directory (single or sharded) or the files given; reads headers only.

        Raises CheckpointError naming file and tensor for anything that is not exactly the format.
        """
        files, index = _locate(source) if isinstance(source, Path) else (tuple(source), None)
        entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in entries:
                    raise CheckpointError(f"{file}: tensor {name} is also in {entries[name].file.name}; remove one")
                entries[name] = entry
        if index is not None:
            for name, shard in index.items():
                if name not in entries or entries[name].file.name != shard:
                    raise CheckpointError(
                        f"{INDEX} says that {short(name)[1:-1]} is in {shard}, it is not; download it again"
                    )
        return cls(entries)

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""
        return tuple(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Where a tensor lies. Raises KeyError for an unknown name."""
        return self._entries[name]

    def array(self, name: str) -> tuple[str, Array]:
        """Return a tensor as (safetensors dtype, array). Raises KeyError for an unknown name."""
        entry = self._entries[name]
        if entry.file not in self._maps:
            self._maps[entry.file] = np.asarray(np.memmap(entry.file, np.uint8, mode="r"))  # views of it are made fast
        kind = np.dtype(DTYPES[entry.dtype])
        nbytes = prod(entry.shape) * kind.itemsize
        raw = self._maps[entry.file][entry.offset : entry.offset + nbytes]
        if entry.offset % kind.itemsize:  # a view would be misaligned: the format does not forbid it
            raw = raw.copy()
        return entry.dtype, raw.view(kind).reshape(entry.shape)

    def release(self) -> None:
        """Close the maps and drop the files from the page cache, which counts as used memory on a Jetson."""
        files, self._maps = tuple(self._maps), {}
        for file in files:
            drop_page_cache(file.resolve())


def _locate(directory: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """Shards of a checkpoint directory, and the index's tensor -> shard, if it has an index."""
    if not directory.is_dir():
        raise CheckpointError(f"no directory {directory}; give the directory of a checkpoint")
    single, index_file = directory / SINGLE, directory / INDEX
    if is_there(index_file):
        index = read_json(index_file, LARGE).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
            raise CheckpointError(f"{index_file} has no weight_map of names to files; download it again")
        shards = sorted(set(index.values()))
        for shard in shards:
            if Path(shard).name != shard or not shard.isprintable() or len(os.fsencode(shard)) > _MAX_FILE_NAME:
                raise CheckpointError(f"{index_file} names {short(shard)}, wanted a file of the same directory")
            if not is_there(directory / shard):
                raise CheckpointError(f"shard {shard} named by {INDEX} is missing in {directory}; download it")
        return tuple(directory / shard for shard in shards), index
    if is_there(single):
        return (single,), None
    raise CheckpointError(f"neither {SINGLE} nor {INDEX} in {directory}; give the directory of a checkpoint")


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and header of a file that has tensors (name, dtype, shape) in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read_header(file: Path) -> dict[str, Entry]:
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
                raise CheckpointError(
                    f"{file} is no safetensors file or is cut short: header of {length} bytes in a file of {size}; "
                    "download it again"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}; check that it exists and is readable") from None
    try:
        header = parse_json(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header ({type(error).__name__}); download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged header (no JSON object); download it again")
    header.pop("__metadata__", None)
    return _entries(file, header, 8 + length, size)


def _entries(file: Path, header: dict[str, Any], data: int, size: int) -> dict[str, Entry]:
    """Check every tensor's place: known dtype, bytes as the shape says; together they are the data, without gaps."""
    entries: dict[str, Entry] = {}
    spans: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        if len(name) > MAX_NAME or not name.isprintable():
            raise CheckpointError(f"{file}: a tensor is called {short(name)}, wanted a name; download the file again")
        try:
            dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
            numbers = (*shape, start, stop)
            valid = isinstance(dtype, str) and len(shape) <= MAX_DIMS
            valid = valid and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise CheckpointError(f"{file}: tensor {name} has a damaged header entry; download the file again")
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {short(dtype)[1:-1]}, wanted one of {', '.join(DTYPES)}"
            )
        wanted = prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if stop - start != wanted:
            raise CheckpointError(
                f"{file}: tensor {name} has {stop - start} bytes, wanted {wanted} for {dtype} {list(shape)}"
            )
        if data + stop > size:
            raise CheckpointError(
                f"{file} is cut short: tensor {name} ends at byte {data + stop}, the file has {size}; download it again"
            )
        entries[name] = Entry(file, dtype, shape, data + start)
        spans.append((start, stop, name))
    spans.sort()
    end, last = 0, "the header"
    for start, stop, name in spans:
        if start < end:
            raise CheckpointError(f"{file}: tensors {last} and {name} overlap; download the file again")
        if start > end:
            raise CheckpointError(f"{file}: {start - end} bytes between {last} and tensor {name}; download it again")
        end, last = stop, name
    if data + end != size:
        raise CheckpointError(f"{file}: {size - data - end} bytes after {last}, the last tensor; download it again")
    return entries


def forget_pages(array: Array) -> None:
    """Drop the whole pages under a C-contiguous view of a mapped file from this process; it stays readable.

    An array that is not mapped, or not contiguous, is left alone.
    """
    owner: object = array
    while getattr(owner, "base", None) is not None:
        parent = owner
        owner = parent.base  # type: ignore[attr-defined]
        if isinstance(owner, mmap.mmap) and array.flags.c_contiguous:
            offset = _address(array) - _address(parent) // mmap.PAGESIZE * mmap.PAGESIZE  # a map starts on a page
            start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = (offset + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                owner.madvise(mmap.MADV_DONTNEED, start, stop - start)


def _address(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]
