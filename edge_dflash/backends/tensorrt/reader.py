"""A plan's file as TensorRT reads it: in the pieces that it asks for, and without leaving pages behind."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


class PlanFile:
    """An open plan. The pages that were read are given back when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes from where it stands; fewer only at the end."""
        parts = []
        while count > 0 and (part := self._file.read(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def seek(self, offset: int, whence: int) -> bool:
        """Move; ``whence`` as in :mod:`os`. False when there is no such place."""
        try:
            self._file.seek(offset, whence)
        except (OSError, ValueError):
            return False
        return True

    def close(self) -> None:
        """Give the pages back: the weights are on the device now, which on a Jetson is the same memory."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._file.close()


def read_plan(trt: Any, path: Path, make: Callable[[Any], Made]) -> Made:
    """What ``make`` makes of a stream reader over ``path``. Raises OSError."""
    places = {int(getattr(trt.SeekPosition, name)): w for name, w in _WHENCE.items()}

    class Reader(trt.IStreamReaderV2):  # type: ignore[misc]
        def __init__(self, file: PlanFile) -> None:
            trt.IStreamReaderV2.__init__(self)
            self._file = file

        def read(self, num_bytes: int, stream: int) -> bytes:
            return self._file.read(num_bytes)

        def seek(self, offset: int, where: Any) -> bool:
            return self._file.seek(offset, places[int(where)])

    file = PlanFile(path)
    try:
        return make(Reader(file))
    finally:
        file.close()


_WHENCE = {"SET": io.SEEK_SET, "CUR": io.SEEK_CUR, "END": io.SEEK_END}
