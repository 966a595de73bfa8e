"""What cannot be answered, in the OpenAI API's form; and JSON as it is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_dflash import errors
from edge_dflash.common.rules import FieldError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class Refusal(errors.RequestError):
    """A request that is refused, and its answer (ASGI). ``param`` names the part of the body that is at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request (ASGI); its state says why, for the log."""
        scope.setdefault("state", {})["refused"] = self
        await Response(dump(self.body), self.status, self.headers, "application/json")(scope, receive, send)


# Class of errors: status, code, whether the request may be sent again after a while. The first that fits.
_REFUSALS: tuple[tuple[type[Exception], int, str | None, bool], ...] = (
    (errors.QueueFullError, 429, "queue_full", True),
    (errors.ContextError, 400, "context_length_exceeded", False),
    (errors.EngineFailedError, 503, "engine_failed", True),
    (errors.RequestCancelledError, 503, "cancelled", True),
    (errors.StorageError, 503, "storage_failed", False),
    (errors.RequestError, 400, None, False),
    (errors.BundleError, 409, "session_mismatch", False),  # a saved session of another bundle
    (errors.EdgeDflashError, 503, "engine_failed", False),
)


def refusal(error: BaseException, *, retry_after: float = 1.0) -> Refusal:
    """The refusal that an error becomes. ``retry_after`` is for those that pass: a full queue, an engine that stops."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, FieldError):
        return Refusal(str(error), param=error.place, code="unknown_parameter" if error.unknown else None)
    if isinstance(error, errors.StorageError) and error.full:
        return Refusal(str(error), status=507, code="storage_full")
    for kind, status, code, passes in _REFUSALS:
        if isinstance(error, kind):
            return Refusal(str(error), status=status, code=code, retry_after=retry_after if passes else None)
    return Refusal(f"the service failed ({type(error).__name__}); its log says more", status=500, code="internal_error")


def dump(value: object, *, sharing: bool = False) -> bytes:
    """JSON as it is sent: ASCII, so that a lone surrogate that a client sent can be named.

    ``sharing`` lets other threads run meanwhile, for five times the work: an answer may have megabytes.
    """
    return ("".join(_JSON.iterencode(value)) if sharing else _JSON.encode(value)).encode("ascii")


def json_response(value: dict[str, Any], status: int = 200) -> Response:
    """A response with a JSON body."""
    return Response(dump(value), status, media_type="application/json")
