"""The fields of a request's JSON, taken one by one, and the refusal of what cannot be taken, in the OpenAI API's form.

Each field has a type and a range, and none is left over unseen. What is asked for is also what ``/openapi.json`` says
of a field: ``facts`` are words of JSON Schema for what the reader checks itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Never

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_dflash.common.rules import FieldError
from edge_dflash.errors import (
    BundleError,
    ContextError,
    EdgeDflashError,
    EngineFailedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    StorageError,
    short,
)
from edge_dflash.serve.openapi import NAME, RECORD, Schema

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


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

    def response(self) -> Response:
        """The answer to the request."""
        return _RefusalResponse(self)


# Class of errors: status, code, whether the request may be sent again after a while. The first that fits.
_REFUSALS: tuple[tuple[type[Exception], int, str | None, bool], ...] = (
    (QueueFullError, 429, "queue_full", True),
    (ContextError, 400, "context_length_exceeded", False),
    (EngineFailedError, 503, "engine_failed", True),
    (RequestCancelledError, 503, "cancelled", True),
    (StorageError, 503, "storage_failed", False),
    (RequestError, 400, None, False),
    (BundleError, 409, "session_mismatch", False),  # a saved session of another bundle
    (EdgeDflashError, 503, "engine_failed", False),
)


def refusal(error: BaseException, *, retry_after: float = 1.0) -> Refusal:
    """The refusal that an error becomes. ``retry_after`` is for those that pass: a full queue, an engine that stops."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, FieldError):
        return Refusal(str(error), param=error.place, code="unknown_parameter" if error.unknown else None)
    if isinstance(error, StorageError) and error.full:
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


def json_response(value: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(dump(value), status, headers, "application/json")


class _RefusalResponse(Response):
    """The answer to a request that is refused; its state says why, for the log."""

    def __init__(self, refused: Refusal) -> None:
        super().__init__(dump(refused.body), refused.status, refused.headers, "application/json")
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it (ASGI)."""
        scope.setdefault("state", {})["refused"] = self._refused
        await super().__call__(scope, receive, send)


class BodyFields:
    """A JSON object whose fields are taken. A field that is null counts as absent, as in the OpenAI API.

    ``needed`` says what to give for a field that may not be absent.
    """

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        """``path`` is where the object stands in the body."""
        self._left = {key: item for key, item in value.items() if item is not None}
        self._path = path
        self._known: list[str] = []
        self._noted = record.object(path) if (record := RECORD.get()) is not None else None

    def name(self, key: str) -> str:
        """The field as messages name it."""
        return f"{self._path}.{key}" if self._path else key

    def fail(self, key: str, value: object, wanted: str) -> Never:
        """Refuse a value."""
        raise Refusal(f"{self.name(key)} is {short(value)}; {wanted}", param=self.name(key))

    def take(self, key: str, facts: Schema | None = None, *, needed: str = "") -> Any:
        """The field as it is; None when it is absent."""
        self._known.append(key)
        if self._noted is not None:
            self._noted.note(key, facts or {}, needed=bool(needed))
        value = self._left.pop(key, None)
        if value is None and needed:
            raise Refusal(f"{self.name(key)} is missing; {needed}", param=self.name(key))
        return value

    def also(self, facts: Schema, *, variant: str = "") -> None:
        """What holds of the fields together, checked by the reader; ``variant``: in an object of this kind."""
        if self._noted is not None:
            self._noted.also = facts
            self._noted.tag = ("", variant) if variant else self._noted.tag

    def text(self, key: str, *, needed: str = "", facts: Schema | None = None) -> str | None:
        """A text."""
        value = self.take(key, {"type": "string", **(facts or {})}, needed=needed)
        if value is not None and not isinstance(value, str):
            self.fail(key, value, "give a text")
        return value

    def kind(self, key: str, *accepted: str) -> str:
        """One of some texts; it decides which other fields the object has."""
        value = self.take(key, {"enum": list(accepted)}, needed=f"accepted are {', '.join(accepted)}")
        if not isinstance(value, str) or value not in accepted:
            self.fail(key, value, f"accepted are {', '.join(accepted)}")
        if self._noted is not None:
            self._noted.tag = (key, value)
        return value

    def flag(self, key: str) -> bool | None:
        """True or false."""
        value = self.take(key, {"type": "boolean"})
        if value is not None and not isinstance(value, bool):
            self.fail(key, value, "give true or false")
        return value

    def integer(self, key: str, low: int, high: int) -> int | None:
        """A whole number of a range; 3.0 is one."""
        value = self.take(key, {"type": "integer", "minimum": low, "maximum": high})
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (type(value) is not int or not low <= value <= high):
            self.fail(key, value, f"give a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float | None:
        """A number of a range."""
        value = self.take(key, {"type": "number", "minimum": low, "maximum": high})
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high:
            self.fail(key, value, f"give a number from {low:g} to {high:g}")
        return float(value)

    def mapping(self, key: str, *, needed: str = "") -> dict[str, Any] | None:
        """A JSON object."""
        value = self.take(key, {"type": "object"}, needed=needed)
        if value is not None and not isinstance(value, dict):
            self.fail(key, value, "give a JSON object")
        return value

    def array(self, key: str, *, facts: Schema | None = None, needed: str = "") -> list[Any] | None:
        """A JSON array."""
        value = self.take(key, {"type": "array", **(facts or {})}, needed=needed)
        if value is not None and not isinstance(value, list):
            self.fail(key, value, "give a JSON array")
        return value

    def inner(self, key: str, *, needed: str = "") -> BodyFields | None:
        """A JSON object, to be taken apart in turn."""
        value = self.mapping(key, needed=needed)
        return None if value is None else BodyFields(value, self.name(key))

    def only(self, key: str, *accepted: object, why: str) -> None:
        """A field that is understood and has one meaning here: everything else is refused, not dropped."""
        value = self.take(key, {"enum": list(accepted), "description": why} if accepted else {"type": "null"})
        if value is not None and not any(_same(value, one) for one in accepted):
            self.fail(key, value, why)

    def done(self) -> None:
        """Refuse what was not taken."""
        for key in self._left:
            name = self.name(key if len(key) <= 60 else key[:57] + "...")
            raise Refusal(
                f"{name} is unknown here; known are {', '.join(sorted(self._known))}",
                param=name,
                code="unknown_parameter",
            )


def _same(value: object, other: object) -> bool:
    """Whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def session_name(name: object, param: str) -> str:
    """The name of a session. Raises Refusal."""
    if not isinstance(name, str) or re.fullmatch(NAME["pattern"], name) is None:
        wanted = "give 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
        raise Refusal(f"{param} is {short(name)}; {wanted}", param=param)
    return name
