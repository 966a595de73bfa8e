"""The routes of the service: HTTP in, calls of the service, HTTP out.

Whatever a client sends is answered in the form of the OpenAI API, errors too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_dflash.serve.accounts import Keys
from edge_dflash.serve.limits import SMALL, authorise, bound_headers, parse_object, read_body
from edge_dflash.serve.metrics import CONTENT_TYPE
from edge_dflash.serve.names import checked_name, new_name, other_name
from edge_dflash.serve.openai import Call, chat_call, completion_call, encode_call
from edge_dflash.serve.openapi import OPERATIONS, document
from edge_dflash.serve.refusal import Refusal, dump, error_json, refusal
from edge_dflash.serve.service import Service
from edge_dflash.serve.stream import EventStream, watch_client

log = logging.getLogger("edge_dflash.serve")
_PIECE = 8192  # token ids that are written at once
_STARTED = int(time.time())
_Reader = Callable[..., Call]
_Read = TypeVar("_Read")
_Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def make_app(service: Service, keys: Keys | None = None) -> Starlette:
    """The ASGI application of a service. ``keys``: one of which TCP callers must send, if there are any."""
    routes = Routes(service, dump(document(service.config, key=bool(keys))))
    app = Starlette(
        routes=[_route(service, routes, path) for path in dict.fromkeys(one.path for one in OPERATIONS)],
        exception_handlers={HTTPException: _http_error, Exception: _defect},
        middleware=[Middleware(_Guard, keys=keys or {}, header_bytes=service.config.limits.header_bytes)],
    )
    app.router.redirect_slashes = False  # a path that does not exist is answered as such
    return app


def json_response(value: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(dump(value), status, headers, "application/json")


def error_response(refused: Refusal) -> Response:
    """The response to a request that is refused."""
    return json_response(error_json(refused), refused.status, refused.headers)


def _route(service: Service, routes: Routes, path: str) -> Route:
    """All methods of a path, so that a refusal of another names them all; errors raised on purpose become answers."""
    endpoints: dict[str, _Endpoint] = {
        one.method: getattr(routes, one.endpoint) for one in OPERATIONS if one.path == path
    }

    async def answer(request: Request) -> ASGIApp:
        try:
            return await endpoints["GET" if request.method == "HEAD" else request.method](request)
        except Exception as error:
            return error_response(_refused(service, error))

    return Route(path, answer, methods=list(endpoints))


def _refused(service: Service, error: Exception) -> Refusal:
    refused = refusal(error, retry_after=service.retry_after())
    if refused.status == 500:
        log.error("a request failed", exc_info=error)
    return refused


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    method, path = request.method[:20], request.scope["path"][:80]
    if "Allow" in headers:  # 405
        message = f"the method of {path} is {method}; it takes {headers['Allow']}"
    else:
        message = f"no endpoint answers {method} {path}; GET /openapi.json lists them all"
    return error_response(Refusal(message, status=error.status_code, headers=headers))


async def _defect(request: Request, error: Exception) -> Response:
    return error_response(refusal(error))


class _Guard:
    """Lets in who may come in."""

    def __init__(self, app: ASGIApp, keys: Keys, header_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._header_bytes = header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                bound_headers(scope, self._header_bytes)
                account = authorise(scope, Headers(scope=scope), self._keys)
                scope["state"] = {**scope.get("state", {}), "account": account}
            except Refusal as refused:
                await error_response(refused)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Routes:
    """The endpoints. Work that grows with a body or with an answer is done on threads: the loop serves everybody."""

    def __init__(self, service: Service, document: bytes) -> None:
        self._service = service
        self._document = document
        # large bodies are worked on two at a time, however many there are: the loop is one thread among those that run
        self._large = asyncio.Semaphore(2)

    async def chat(self, request: Request) -> ASGIApp:
        """``POST /v1/chat/completions``."""
        return await self._generate(request, chat_call, "chat")

    async def completions(self, request: Request) -> ASGIApp:
        """``POST /v1/completions``."""
        return await self._generate(request, completion_call, "completions")

    async def encode(self, request: Request) -> ASGIApp:
        """``POST /v1/edge_dflash/encode``: the token ids of messages or of a text."""
        planner, _ = self._service.loaded()
        task, thinking, raw = await self._body(request, encode_call)
        async with self._turn(request):
            body = await self._service.on_thread(lambda: _tokens(planner.encode(task, thinking=thinking, raw=raw)))
        return Response(body, media_type="application/json")

    async def models(self, request: Request) -> ASGIApp:
        """``GET /v1/models``."""
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> ASGIApp:
        """``GET /v1/models/NAME``."""
        name = request.path_params["name"]
        if name != self._service.config.model:
            message = f"there is no model {name[:60]!r}; this service has {self._service.config.model!r}"
            raise Refusal(message, status=404, code="model_not_found")
        return json_response(self._card())

    async def health(self, request: Request) -> ASGIApp:
        """``GET /health``: 200 while the engine gets on or has nothing to do."""
        good, said = self._service.health()
        return json_response(said, 200 if good else 503)

    async def ready(self, request: Request) -> ASGIApp:
        """``GET /ready``: 200 while requests are taken."""
        state = self._service.state
        return json_response({"status": state}, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> ASGIApp:
        """``GET /metrics``."""
        text = await self._service.on_thread(self._service.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> ASGIApp:
        """``GET /openapi.json``."""
        return Response(self._document, media_type="application/json")

    async def sessions(self, request: Request) -> ASGIApp:
        """``GET /v1/edge_dflash/sessions``."""
        _, sessions = self._service.loaded(request.state.account)
        return await self._made(lambda: {"object": "list", "data": sessions.entries()})

    async def session(self, request: Request) -> ASGIApp:
        """``GET /v1/edge_dflash/sessions/NAME``."""
        _, sessions = self._service.loaded(request.state.account)
        return await self._made(partial(sessions.info, _name(request)))

    async def delete_session(self, request: Request) -> ASGIApp:
        """``DELETE /v1/edge_dflash/sessions/NAME``."""
        _, sessions = self._service.loaded(request.state.account)
        name = _name(request)
        await self._service.on_thread(partial(sessions.delete, name))
        return json_response({"id": name, "object": "edge_dflash.session", "deleted": True})

    async def save_session(self, request: Request) -> ASGIApp:
        """``POST /v1/edge_dflash/sessions/NAME/save``, with ``to`` under another name."""
        _, sessions = self._service.loaded(request.state.account)
        name, to = _name(request), await self._body(request, other_name)
        size = await self._service.on_thread(partial(sessions.save, name, to))
        return json_response({"id": to or name, "object": "edge_dflash.session", "saved": True, "bytes": size})

    async def fork_session(self, request: Request) -> ASGIApp:
        """``POST /v1/edge_dflash/sessions/NAME/fork`` to the name ``to``."""
        _, sessions = self._service.loaded(request.state.account)
        name, to = _name(request), await self._body(request, new_name)
        await self._service.on_thread(partial(sessions.fork, name, to))
        return json_response({"id": to, "object": "edge_dflash.session"})

    async def _body(self, request: Request, read: Callable[[dict[str, Any]], _Read]) -> _Read:
        """The body, as ``read`` reads its JSON. Raises Refusal."""
        limits, timeouts = self._service.config.limits, self._service.config.timeouts
        body = await read_body(request, limit=limits.body_bytes, seconds=timeouts.body)
        if len(body) <= SMALL:
            return read(parse_object(body, limits.json_depth))
        request.state.turn = self._large
        async with self._large:
            made: _Read = await self._service.on_thread(lambda: read(parse_object(body, limits.json_depth)))
            return made

    def _turn(self, request: Request) -> AbstractAsyncContextManager[None]:
        """What is to be held while more is made of a request's body: its turn among the large ones."""
        return getattr(request.state, "turn", nullcontext())

    async def _made(self, make: Callable[[], dict[str, Any]]) -> Response:
        """The response that ``make`` gives, made and written on a thread."""
        body: bytes = await self._service.on_thread(lambda: dump(make(), sharing=True))
        return Response(body, media_type="application/json")

    def _card(self) -> dict[str, Any]:
        service = self._service
        card: dict[str, Any] = {"id": service.config.model, "object": "model", "created": _STARTED}
        card["owned_by"] = "edge-dflash"
        if service.planner is not None:
            planner = service.planner
            tokenizer = planner.tokenizer
            card["edge_dflash"] = {
                **asdict(planner.shape),
                "stop_token_ids": list(planner.stop_token_ids),
                "tokenizer": tokenizer is not None,
                "chat": tokenizer is not None and tokenizer.template is not None,
                "fingerprint": planner.fingerprint,
            }
        return card

    async def _generate(self, request: Request, read: _Reader, endpoint: str) -> ASGIApp:
        service, arrived = self._service, time.perf_counter()
        requests = service.metrics.requests

        def count(outcome: str) -> None:
            requests.labels(endpoint, outcome).inc()
            if outcome == "disconnected":
                service.metrics.disconnects.inc()

        try:
            service.loaded()
            limits, defaults = service.config.limits, service.config.defaults
            call = await self._body(request, lambda body: read(body, limits, defaults))
            running = service.start(call, arrived, request.state.account)
        except Exception as error:
            refused = _refused(service, error)
            count(_outcome(refused.status))
            return error_response(refused)
        watcher = asyncio.create_task(watch_client(request.receive, running))
        streams = False
        try:
            async with self._turn(request):
                if running.disconnected:
                    raise Refusal("the client went away", status=408, code="disconnected")
                await running.stream.__aenter__()  # admission: its errors have a status of their own
            if call.stream:
                streams = True
                return EventStream(service, running, count)
            plan = await service.finish(running)
            details = await service.details(running)
            count("disconnected" if running.disconnected else plan.finish_reason)
            made = partial(running.writer.whole, plan, details)
            return json_response(made()) if len(plan.tokens) < SMALL else await self._made(made)
        except Exception as error:
            refused = _refused(service, error)
            count("disconnected" if running.disconnected else _outcome(refused.status))
            return error_response(refused)
        finally:
            watcher.cancel()
            if not streams:
                await service.end(running)


def _tokens(ids: tuple[int, ...]) -> bytes:
    """The answer with token ids, written piece by piece: a million at once hold the interpreter for 100 ms."""
    parts = (dump(ids[at : at + _PIECE])[1:-1] for at in range(0, len(ids), _PIECE))
    return b'{"tokens":[' + b",".join(parts) + b"]}"


def _name(request: Request) -> str:
    return checked_name(request.path_params["name"], "session")


def _outcome(status: int) -> str:
    """The outcome of a request that was not run, for the metrics."""
    known = {429: "queue_full", 503: "unavailable", 507: "unavailable", 500: "failed"}
    return known.get(status, "refused")
