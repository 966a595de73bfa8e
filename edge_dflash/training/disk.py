"""What a training writes: whole or not at all, with a hash by which it knows it again, or a line that says why not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from edge_dflash.bundle.parts import hash_file
from edge_dflash.errors import CheckpointError, RequestError
from edge_dflash.weights.safetensors import TensorFiles

SUM = "sha256"  # name of a tensor: the hash of the others of its file
_SUMS = "sha256.json"  # of the files of a folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise RequestError where what is done inside cannot write: torch and safetensors raise other errors."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"cannot write {path}: {said}; make room on the disk, or see to its rights") from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A place to write; what lies there at the end is then ``path``, whole and on the disk. Raises RequestError."""
    half = path.with_suffix(".part")
    with writing(path):
        try:
            yield half
            with half.open("rb") as file:
                os.fsync(file.fileno())
            half.replace(path)
        except BaseException:
            half.unlink(missing_ok=True)
            raise


def tensors_sum(tensors: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """The hash of some tensors: their names, shapes and bytes. A file holds it as the tensor :data:`SUM`."""
    found = sha256()
    for name in sorted(tensors):
        found.update(f"{name}{list(tensors[name].shape)}".encode())
        found.update(np.ascontiguousarray(tensors[name]).data.cast("B"))
    return np.frombuffer(found.digest(), np.uint8)


def read_whole(path: Path) -> TensorFiles:
    """A file of tensors that are what was written, or of an older version: without a hash.

    Raises CheckpointError where they are not.
    """
    files = TensorFiles.open([path])
    tensors = {name: files.array(name)[1] for name in files.names() if name != SUM}
    if SUM in files and files.array(SUM)[1].tobytes() != tensors_sum(tensors).tobytes():
        raise CheckpointError(f"{path} is damaged: its tensors do not have the hash that they were written with")
    return files


def write_sums(folder: Path) -> None:
    """Leave the hashes of the files of a folder in it."""
    (folder / _SUMS).write_text(json.dumps(_sums(folder)), encoding="utf-8")


def damaged_file(folder: Path) -> Path | None:
    """The first file of a folder that is not what :func:`write_sums` saw; None: all are, or it saw none."""
    if not (folder / _SUMS).exists():
        return None
    try:
        wanted = json.loads((folder / _SUMS).read_bytes())
    except (ValueError, RecursionError):
        wanted = None
    if not isinstance(wanted, dict):
        return folder / _SUMS
    found = _sums(folder)
    return next((folder / name for name in {**wanted, **found} if found.get(name) != wanted.get(name)), None)


def _sums(folder: Path) -> dict[str, str]:
    return {path.name: hash_file(path).sha256 for path in sorted(folder.iterdir()) if path.name != _SUMS}
