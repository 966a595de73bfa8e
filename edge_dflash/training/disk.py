"""What a training writes, and the one way in which it says that the disk refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from edge_dflash.errors import RequestError


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
