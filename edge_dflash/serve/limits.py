"""What comes in is bounded here, before anything is made of it: who, bytes, seconds, nesting, numbers.

An account owns its sessions and has a share of the queue. At the Unix socket it is the user at the other end, over TCP
a key of the key file. Callers over TCP without a key cannot be told apart: they count as the service's own user.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import re
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_dflash.common.nested import is_deeper
from edge_dflash.common.rules import FieldError, refuse_surrogates
from edge_dflash.errors import ConfigError
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.errors import Refusal

if TYPE_CHECKING:
    from edge_dflash.serve.service import Service

Keys: TypeAlias = Mapping[str, str]  # account by API key
Read: TypeAlias = Callable[[dict[str, Any], ServeConfig], Any]  # what a body says. Raises RequestError
SMALL = 8192  # bytes of a body that is read on the loop: a millisecond or two
CONTAINERS = 65536  # objects and arrays of a body. Parsing holds the interpreter: 25 ms for so many, 250 ms for a MB
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1", "[::1]"))
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def own() -> str:
    """The account of the service's own user."""
    return f"uid-{os.geteuid()}"


def peer(one: socket.socket | None) -> str:
    """The account at the other end of a connection: its user where that is known, else :func:`own`."""
    if one is None or one.family != socket.AF_UNIX:
        return own()
    credentials = struct.Struct("iII")  # pid, uid, gid
    _, uid, _ = credentials.unpack(one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return f"uid-{uid}"


def read_keys(path: str) -> Keys:
    """The keys in a file: one alone, or a line ``NAME KEY`` for each account. Two keys of a name are one account's.

    Raises ConfigError when it cannot be read, holds a key that is too short, or everybody could read it.
    """
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the API key {path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the API key {path} is not ASCII; write a new one") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"everybody can read the API key {path}; chmod o-rwx it")
    keys: dict[str, str] = {}
    lines = [line.split() for line in text.splitlines() if line.strip()] or [[""]]
    for number, words in enumerate(lines, 1):
        *names, key = words
        if len(names) > 1 or (len(lines) > 1 and not names) or not all(map(_NAME.fullmatch, names)):
            raise ConfigError(f"the API key {path}, line {number}: give one key alone, or lines of NAME KEY")
        if len(key) < 16 or not key.isprintable():
            raise ConfigError(f"the API key {path} has {len(key)} characters; give at least 16, without blanks")
        if key in keys:
            raise ConfigError(f"the API key {path}, line {number}: the key is there twice; give each account its own")
        keys[key] = f"key-{names[0]}" if names else "key"
    return keys


class Guard:
    """Lets in who may come in (ASGI); puts the account into the request's state."""

    def __init__(self, app: ASGIApp, keys: Keys, header_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._header_bytes = header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or go on (ASGI)."""
        if scope["type"] == "http":
            try:
                _bound_headers(scope, self._header_bytes)
                account = _authorise(scope, Headers(scope=scope), self._keys)
                scope["state"] = {**scope.get("state", {}), "account": account}
            except Refusal as refused:
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _bound_headers(scope: Scope, limit: int) -> None:
    """Refuse a request whose line and headers are too long; the connection bounds only what it has to wait for."""
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) for name, value in scope["headers"])
    if size > limit:
        raise Refusal(f"the headers have {size} bytes, the limit is {limit} bytes; send less", status=431)


def _authorise(scope: Scope, headers: Mapping[str, str], keys: Keys) -> str:
    """The account of a caller. Raises Refusal for who may not come in. Whoever could open the Unix socket may.

    Over TCP with a key: the key. Without a key only loopback is listened on, and the request must name it as its host:
    a web page that a browser on this machine shows must not reach the service under another name.
    """
    server = scope.get("server")
    if server is None or server[1] is None:
        return str(scope.get("state", {}).get("peer") or own())
    if keys:
        kind, _, text = headers.get("authorization", "").partition(" ")
        given = text.strip().encode("utf-8", "replace")
        found = [account for key, account in keys.items() if hmac.compare_digest(given, key.encode())]
        if not found or kind.lower() != "bearer":
            why = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            raise _closing(why, "invalid_api_key", {"www-authenticate": "Bearer"}, status=401)
        return found[0]
    host = headers.get("host", "")
    if (host.rpartition(":")[0] or host) not in _LOCAL_NAMES and host not in _LOCAL_NAMES:
        raise Refusal(f"host {host[:60]!r} is not this machine; call it as 127.0.0.1", status=403, code="host")
    return own()


async def read_body(service: Service, request: Request, read: Read) -> Any:
    """The body of a request, which says that it is JSON, as ``read`` takes it. Raises Refusal for everything else."""
    limits, seconds = service.config.limits, service.config.timeouts.body
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(f"content-type is {kind[:60]!r}; send application/json", status=415, code="content_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal("the body is compressed; send it as it is", status=415, code="content_encoding")
    try:
        body = await asyncio.wait_for(_bytes(request, limits.body_bytes), seconds)
    except TimeoutError:
        raise _closing(f"the body did not end within {seconds:g} s; send it faster", "timeout", status=408) from None
    except ClientDisconnect:
        raise Refusal("the client went away", status=408, code="disconnected") from None
    if len(body) <= SMALL:
        return read(parse_object(body, limits.json_depth), service.config)
    request.state.large = service.large
    async with service.large:
        return await service.on_thread(lambda: read(parse_object(body, limits.json_depth), service.config))


def _closing(message: str, code: str, headers: Mapping[str, str] = {}, *, status: int) -> Refusal:
    """A refusal that ends the connection: nothing more of the request is read."""
    return Refusal(message, status=status, code=code, headers={**headers, "connection": "close"})


def held_if_large(request: Request) -> AbstractAsyncContextManager[None]:
    """What is to be held while more is made of a request's body: the semaphore of large ones, if it is one."""
    return getattr(request.state, "large", nullcontext())


async def _bytes(request: Request, limit: int) -> bytes:
    body = bytearray()
    too_large = _closing(
        f"the body has more than {limit} bytes, which is the limit; send less", "too_large", status=413
    )
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise too_large
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def parse_object(body: bytes, depth: int) -> dict[str, Any]:
    """Strict JSON: UTF-8, finite numbers, whole numbers of 64 bits, at most ``depth`` levels and ``CONTAINERS``.

    Its time grows with the body: one of more than ``SMALL`` bytes is parsed on a thread.
    """
    if body.count(b"[") + body.count(b"{") > CONTAINERS and _containers(body) > CONTAINERS:
        raise Refusal(f"the body has more than {CONTAINERS} objects and arrays; send fewer", code="json")
    try:
        value = json.loads(body.decode(), parse_constant=_constant, parse_float=_float, parse_int=_int)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is not UTF-8 (byte {error.start}); send JSON in UTF-8", code="json") from None
    except json.JSONDecodeError as error:
        raise Refusal(f"the body is no JSON: {error}", code="json") from None
    except RecursionError:
        raise _too_deep(depth) from None
    if not isinstance(value, dict):
        raise Refusal(f"the body is of type {type(value).__name__}; send a JSON object", code="json")
    if b"\\ud" in body.lower():  # in UTF-8 only by an escape
        try:
            refuse_surrogates(value, "")
        except FieldError as error:
            raise Refusal(str(error), param=error.place, code="json") from None
    if is_deeper(value, depth):
        raise _too_deep(depth)
    return value


def _containers(body: bytes) -> int:
    """Objects and arrays of a JSON text: brackets outside strings."""
    outside = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2]
    return sum(part.count(b"[") + part.count(b"{") for part in outside)


def _too_deep(depth: int) -> Refusal:
    return Refusal(f"the body is nested more than {depth} levels deep; send less", code="json")


def _constant(name: str) -> float:
    raise Refusal(f"{name} is no JSON number", code="json")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refusal(f"the number {text[:40]} is too large", code="json")
    return value


def _int(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > 2**64 - 1:
        raise Refusal(f"the number {text[:40]} is too large; whole numbers have at most 64 bits", code="json")
    return value
