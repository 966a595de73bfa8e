"""Errors in the form of the OpenAI API: which status, type and code an error becomes, and its JSON.

Knows the error tree, nothing of requests or sockets.
"""

from __future__ import annotations

import json
import math
from typing import Any

from edge_dflash.errors import (
    BundleError,
    ContextError,
    EdgeDflashError,
    EngineFailedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    StorageError,
)

Headers = dict[str, str]


class Refusal(RequestError):
    """A request that is answered with an HTTP error. ``param`` names the part of the body that is at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Headers | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))


def refusal(error: BaseException, *, retry_after: float = 1.0) -> Refusal:
    """The refusal that an error becomes. ``retry_after`` is for those that pass: a full queue, an engine that stops."""
    if isinstance(error, Refusal):
        return error
    message = str(error)
    if isinstance(error, QueueFullError):
        return Refusal(message, status=429, code="queue_full", retry_after=retry_after)
    if isinstance(error, ContextError):
        return Refusal(message, code="context_length_exceeded")
    if isinstance(error, EngineFailedError):
        return Refusal(message, status=503, code="engine_failed", retry_after=retry_after)
    if isinstance(error, RequestCancelledError):
        return Refusal(message, status=503, code="cancelled", retry_after=retry_after)
    if isinstance(error, StorageError):
        return Refusal(
            message, status=507 if error.full else 503, code="storage_full" if error.full else "storage_failed"
        )
    if isinstance(error, RequestError):
        return Refusal(message)
    if isinstance(error, BundleError):  # a saved session of another bundle
        return Refusal(message, status=409, code="session_mismatch")
    if isinstance(error, EdgeDflashError):
        return Refusal(message, status=503, code="engine_failed")
    return Refusal(f"the service failed ({type(error).__name__}); its log says more", status=500, code="internal_error")


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_json(refused: Refusal) -> dict[str, Any]:
    """The body of an error."""
    kind = _TYPES.get(refused.status, "server_error" if refused.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}}


_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dump(value: object, *, sharing: bool = False) -> bytes:
    """JSON as it is sent: ASCII, so that a lone surrogate that a client sent can be named.

    ``sharing`` lets other threads run meanwhile, for five times the work: an answer may have megabytes.
    """
    return ("".join(_JSON.iterencode(value)) if sharing else _JSON.encode(value)).encode("ascii")
