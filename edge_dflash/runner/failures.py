"""Errors of requests that something else than their own steps ended."""

from __future__ import annotations

import copy
from contextlib import suppress

from edge_dflash.errors import EngineFailedError, QueueFullError


def engine_failed(cause: BaseException) -> EngineFailedError:
    """The error of a request that the worker's failure ends."""
    reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    failed = EngineFailedError(f"the engine failed ({reason}) and takes no more requests; close it and open it again")
    failed.__cause__ = cause
    return failed


def displaced(own: int, priority: int) -> QueueFullError:
    """The error of a request of priority ``own`` whose place another one has now."""
    return QueueFullError(
        f"this request, of priority {own}, gave its place in the queue to one of priority {priority}; "
        "send it again, or with a higher priority"
    )


def another(error: BaseException) -> BaseException:
    """An error like this one, for one more request that it ends."""
    with suppress(Exception):
        return copy.copy(error)
    return error
