"""What a training writes, and the one way in which it says that the disk refused."""

from __future__ import annotations

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
