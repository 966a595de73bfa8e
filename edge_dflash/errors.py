"""Every error that edge-dflash raises on purpose.

    EdgeDflashError
    ├── CheckpointError     a Hugging Face checkpoint is unreadable, incomplete or unsupported
    │   └── UnsupportedModelError   the architecture is known by name and not (yet) supported
    ├── RecipeError         a quantization recipe or a board profile is invalid
    ├── ConfigError         the configuration of the service is invalid
    ├── BuildError          a build could not finish (disk, interruption, calibration)
    ├── BundleError         an engine bundle is damaged, newer than this runtime, or does not match
    ├── BackendError        a backend cannot load or run here
    │   └── DeviceLostError         the device failed in a way that lasts until the process ends
    ├── RequestError        a request is invalid; the session is as it was
    │   ├── ContextError    the prompt and its budget do not fit the usable context
    │   ├── ImageError      an image of the request is none, is damaged, or is too large
    │   ├── QueueFullError  the engine has as many requests waiting as it takes; try again later
    │   ├── StorageError    the disk refuses a session's file; the session is as it was
    │   ├── EngineFailedError       the engine's worker failed, and every request with it
    │   └── RequestCancelledError   the request was cancelled before it gave a result
    ├── VerificationError   speculative output differs from plain output, or a golden differs
    └── ServiceError        a service cannot start or stop here, cannot be reached, or answers with its own failure

A message names the value that was found, what is accepted, and the remedy, in one line. The command line prints the
message and exits with the class's ``exit_code``; a traceback from edge-dflash is a defect.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class EdgeDflashError(Exception):
    """Base of the tree. ``exit_code`` is what the command line exits with."""

    exit_code = 1


class CheckpointError(EdgeDflashError):
    """A checkpoint is unreadable, incomplete or inconsistent."""

    exit_code = 3


class UnsupportedModelError(CheckpointError):
    """The checkpoint is of an architecture that this version does not run."""


class RecipeError(EdgeDflashError):
    """A recipe or board profile has an unknown key or a bad value."""

    exit_code = 4


class ConfigError(EdgeDflashError):
    """The service's configuration is unreadable, has an unknown key or a bad value."""

    exit_code = 4


class BuildError(EdgeDflashError):
    """A build stopped; what was finished is kept for the next try unless the message says otherwise."""

    exit_code = 5


class BundleError(EdgeDflashError):
    """A bundle is damaged or does not match this runtime."""

    exit_code = 6


class BackendError(EdgeDflashError):
    """A backend cannot be loaded or failed while running."""

    exit_code = 7


class DeviceLostError(BackendError):
    """The device failed, and every call after it will: only a new process can use it again."""


class RequestError(EdgeDflashError):
    """A request is invalid. Nothing was changed by it."""

    exit_code = 8


class ImageError(RequestError):
    """An image cannot be read, is damaged, of another format, or larger than the limits."""


class ContextError(RequestError):
    """The prompt and its token budget do not fit the usable context."""


class QueueFullError(RequestError):
    """As many requests wait as the engine takes. Nothing was queued."""


class StorageError(RequestError):
    """A session's file cannot be written, read, found or removed. The session in memory is as it was."""

    def __init__(self, message: str, *, full: bool = False) -> None:
        """``full``: nothing but space is missing."""
        super().__init__(message)
        self.full = full

    @classmethod
    def of(cls, error: OSError, what: str, remedy: str) -> StorageError:
        """``what`` failed with this error of the system."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "make room on the disk" if full else remedy
        return cls(f"{what}: {error.strerror or error}; {remedy}", full=full)


class EngineFailedError(RequestError):
    """The engine's worker failed: its requests failed with it, and the planner is closed. ``__cause__`` says why."""


class RequestCancelledError(RequestError):
    """The request was cancelled before it gave a result. What was committed until then stays committed."""


class VerificationError(EdgeDflashError):
    """A check of outputs against their reference failed."""

    exit_code = 9


class ServiceError(EdgeDflashError):
    """A service cannot be started here, or one elsewhere cannot be reached or failed."""

    exit_code = 10


def short(value: object) -> str:
    """A value as a message shows it, in at most 60 characters."""
    try:
        text = repr(value[:61] if type(value) is str else value)
    except Exception:  # a caller's own class
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def one_line(said: object) -> str:
    """A text, or what an error says, as a message quotes it: in one line of at most 300 characters."""
    text = " ".join(str(said)[:1000].split()) or type(said).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextmanager
def refused(kind: Callable[[str], EdgeDflashError], what: str, remedy: str) -> Iterator[None]:
    """Raise ``kind`` for a panic of a library in Rust, and for the bare Exception that it raises otherwise.

    A panic is no Exception of Python's, so that it would end whatever thread it meets.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what} ({one_line(error)}); {remedy}") from None
