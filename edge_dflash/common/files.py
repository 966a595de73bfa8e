"""Files that others wrote, read whole: regular ones, no larger than a bound, named in one line when they are not.

A model directory may hold anything under a known name: a FIFO that nobody writes to, a device without end, a link to
itself. Nothing here waits, and nothing is read before its kind and size are known. What is wrong is an OSError whose
``strerror`` says it, so that a caller adds file and remedy as it does for any other file that cannot be read.

Also where the data folders of edge-dflash lie: ``calib``, ``deploy``, ``engines`` and ``jetson``, at the root of a
checkout and part of the package once installed.

Temporary directories that also go after a kill: the next one of the same name removes what nobody holds.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from edge_dflash.errors import EdgeDflashError, RequestError


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


SMALL = 16 << 20  # bytes of a config, an index or a template: those of published models have at most a tenth of it
LARGE = 64 << 20  # bytes of a set of prompts, a manifest or a journal
MOST_LISTS = 1 << 20  # and objects of a JSON text
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Whether the directory has an entry of this name, of whatever kind: what is not a file is refused when read."""
    try:
        return os.path.lexists(path)
    except ValueError:  # a name with a NUL, which no file has
        return False


def is_file(path: Path) -> bool:
    """Whether this is a regular file, or a link to one; False also for a path that no file system can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises OSError for anything else, at once."""
    try:  # O_NONBLOCK: a FIFO opens at once, and is refused below; regular files ignore it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a NUL", str(path)) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise OSError(errno.EINVAL, f"it is {kind}, wanted a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def head_of(path: Path) -> tuple[int, int, str]:
    """Bytes of a regular file, when it was written (ns), SHA-256 of its first MiB: all of a config, a shard's header.

    Raises OSError.
    """
    with open_regular(path) as file:
        state = os.fstat(file.fileno())
        return state.st_size, state.st_mtime_ns, hashlib.sha256(file.read(1 << 20)).hexdigest()


def read_bytes(path: Path, most: int = SMALL) -> bytes:
    """All bytes of a regular file. Raises OSError; also when there are more than ``most``."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, wanted at most {most}", str(path))
        return file.read(most)


def read_text(path: Path, most: int = SMALL) -> str:
    """The text of a regular UTF-8 file, every line end as one newline. Raises OSError, and UnicodeDecodeError."""
    return read_bytes(path, most).decode().replace("\r\n", "\n").replace("\r", "\n")


def check_writable(path: Path, option: str) -> None:
    """Raise RequestError, before any work, unless :func:`write_whole` can write ``path``: tried, as rights are many.

    What lies there stays as it is. ``option``: the flag that names the file.
    """
    try:
        path = path.resolve()
        if path.is_dir() or not path.parent.is_dir():
            raise RequestError(f"{option} {path} is no file in a directory that exists; give another name")
        if is_there(path):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY))
        if path.is_file() or not is_there(path):
            _check_directory(path.parent)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"{option} {path} cannot be written: {what}; give another name") from None


def check_place(path: Path, option: str) -> None:
    """Raise RequestError, before any work, unless a directory can be made at ``path``, its parents included."""
    try:
        _check_directory(next(parent for parent in path.absolute().parents if is_there(parent)))
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise RequestError(f"{option} {path} cannot be made: {what}; give another name") from None


def _check_directory(folder: Path) -> None:
    """Raise OSError unless a directory takes a new file."""
    os.close(os.open(fresh := _beside(folder), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    fresh.unlink()


def _beside(folder: Path) -> Path:
    return folder / f".edge-dflash-{os.getpid()}-{threading.get_ident()}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all. A link stays one; what is no regular file is written to. Raises OSError."""
    path = path.resolve()
    if is_there(path) and not path.is_file():
        path.write_bytes(data)
        return
    fresh = _beside(path.parent)
    with replacing(path, fresh):
        fresh.write_bytes(data)
        with suppress(FileNotFoundError):
            shutil.copymode(path, fresh)


@contextmanager
def replacing(path: Path, fresh: Path) -> Iterator[None]:
    """What is written at ``fresh`` takes the name ``path`` at the end, and goes when that fails."""
    try:
        yield
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


def sync_path(path: Path) -> None:
    """Bring a file, or a directory's names, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def parse_json(data: bytes, **options: Any) -> Any:
    """The JSON value of UTF-8 text; ``options`` are those of :func:`json.loads`. Raises ValueError, RecursionError.

    Empty lists take twenty times their text in memory: more lists and objects than any model's file has are refused.
    """
    if (count := data.count(b"[") + data.count(b"{")) > MOST_LISTS:
        raise ValueError(f"it holds {count} lists and objects, wanted at most {MOST_LISTS}")
    return json.loads(data, **options)


FOLDERS = ("calib", "deploy", "engines", "jetson")


def directory(name: str) -> Path:
    """Return the data folder ``name``, from the installed package or, in a checkout, from its root.

    Raises EdgeDflashError when the folder is not one of ``FOLDERS`` or was lost from the installation.
    """
    return find(name, Path(__file__).resolve().parents[1])


def find(name: str, package: Path) -> Path:
    """Like :func:`directory`, for a package that lies at ``package``."""
    if name not in FOLDERS:
        raise EdgeDflashError(f"no data folder is called {name!r}; there are {', '.join(FOLDERS)}")
    for candidate in (package / "_data" / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise EdgeDflashError(f"data folder {name!r} is missing from {package}; install edge-dflash again")
