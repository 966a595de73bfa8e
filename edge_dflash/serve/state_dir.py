"""The state directory: one server's at a time, with a file for each saved session.

The disk may be full, read-only, failing or closed to this user at any time: all that is done here raises StorageError.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from edge_dflash.common.files import locked, read_text
from edge_dflash.decode.saved import partial_of
from edge_dflash.errors import ServiceError, StorageError
from edge_dflash.runner.recording import Recording
from edge_dflash.serve.errors import Refusal

log = logging.getLogger("edge_dflash.serve")
SUFFIX = ".session"
ANSWERS = "answers.jsonl"
_HEAD = 4096  # first bytes of a session's file: they hold the checksum of all of it
Mark: TypeAlias = bytes | int  # of a file: its first bytes; of anything else its inode
LOCK = "lock"  # file in the state directory that a running server holds; it says its process


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other servers from this state directory. The kernel lets it go when the process ends, however it does.

    Raises ServiceError while another has it. Where the disk gives no lock file, a warning says so: sessions live in
    memory, and nothing can be saved there either.
    """
    made = not directory.exists()
    with ExitStack() as itself:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                itself.enter_context(locked(directory))  # a lock that stays when somebody removes the file
            except BlockingIOError:
                raise _taken(directory / LOCK) from None
            except OSError:
                pass  # such as NFS, which has no locks of directories
            descriptor = _locked(directory / LOCK)
        except OSError as error:
            log.warning(
                "cannot lock the state directory %s: %s; sessions may not be saved, another --state-dir may do",
                directory, error.strerror,
            )  # fmt: skip
            yield
            return
        try:
            with suppress(OSError):  # a full disk: the lock holds all the same
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
            yield
        finally:
            with suppress(OSError):
                (directory / LOCK).unlink()
                if made:
                    directory.rmdir()  # if nothing was saved
            os.close(descriptor)


def recording_in(directory: Path, limit: int) -> Recording | None:
    """The file of finished answers in this state directory, of ``limit`` bytes; None where it cannot be made.

    A disk that refuses does not keep the service from its requests: the log says so.
    """
    path = directory / ANSWERS
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        log.error("answers are not recorded in %s: %s; requests go on", path, error.strerror)
        return None
    return Recording(path, limit)


def _locked(path: Path) -> int:
    """A descriptor that holds the lock file. Raises ServiceError while another process does, OSError."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise _taken(path) from None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its holder ended meanwhile and took the file away


def _taken(path: Path) -> ServiceError:
    """The error of a state directory whose lock another process has."""
    owner = ""
    with suppress(OSError, UnicodeDecodeError):
        owner = read_text(path, 32).strip()
    return ServiceError(
        f"another server, process {owner or 'unknown'}, has the state directory {path.parent}; "
        "stop it, or give another service.state_dir or --state-dir"
    )


class SessionFiles:
    """Files of one owner's sessions, at most ``limit``. A name that may be used names one file and no path."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    def path(self, name: str) -> Path:
        """Where a session is saved."""
        return self._directory / (name + SUFFIX)

    def has(self, name: str) -> bool:
        """Whether it is saved."""
        path = self.path(name)
        with _told(f"cannot read {path}"), suppress(FileNotFoundError, NotADirectoryError):
            return stat.S_ISREG(path.stat().st_mode)
        return False

    def mark(self, name: str) -> Mark | None:
        """Which file is there, of whatever kind; None: none."""
        path = self.path(name)
        with _told(f"cannot read {path}"), suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISREG((found := path.lstat()).st_mode):
                return found.st_ino
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                return file.read(_HEAD)
        return None

    def names(self) -> list[str]:
        """All that are saved."""
        absent = suppress(FileNotFoundError, NotADirectoryError)
        with _told(f"cannot list {self._directory}"), absent, os.scandir(self._directory) as entries:
            return [entry.name.removesuffix(SUFFIX) for entry in entries if entry.name.endswith(SUFFIX)]
        return []

    def make_room(self, name: str) -> None:
        """The directory is there and may hold this file. Raises Refusal where there are too many."""
        names = self.names()
        if name not in names and len(names) >= self._limit:
            raise Refusal(
                f"{len(names)} sessions are saved, the limit is {self._limit}; delete one",
                status=409,
                code="session_limit",
            )
        with _told(f"cannot make the state directory {self._directory}"):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove(self, name: str) -> bool:
        """Delete a file, and what a kill left of a later one; False when nothing is saved."""
        path = self.path(name)
        absent = suppress(FileNotFoundError, NotADirectoryError)
        with _told(f"cannot delete {partial_of(path)}"), absent:
            partial_of(path).unlink()
        with _told(f"cannot delete {path}"), absent:
            path.unlink()
            return True
        return False


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise StorageError for what the disk refuses in the block."""
    try:
        yield
    except OSError as error:
        raise StorageError.of(error, what, "check the disk and its permissions") from None
