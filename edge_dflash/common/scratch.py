"""Temporary directories that also go after a kill: the next one of the same name removes what nobody holds."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A directory in ``parent`` whose name begins with ``prefix``; removed at the end, however that comes."""
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError), locked(left):
            shutil.rmtree(left)
    with TemporaryDirectory(dir=parent, prefix=prefix) as made, locked(Path(made)):
        yield Path(made)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a directory.

    Raises BlockingIOError where it is locked already, FileNotFoundError where it was removed meanwhile, and OSError
    where it cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        yield
    finally:
        os.close(descriptor)
