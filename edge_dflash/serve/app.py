"""The ASGI application: the routes of the service, each with what the document of the API says of it.

Whatever a client sends is answered in the form of the OpenAI API, errors too. Work that grows with a body or with an
answer is done on threads: the loop serves everybody.
"""

from __future__ import annotations

import time
from dataclasses import fields
from functools import partial
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from edge_dflash.common.rules import Schema
from edge_dflash.decode.shape import PairShape
from edge_dflash.serve import bodies, completions, replies
from edge_dflash.serve import openapi as api
from edge_dflash.serve.bodies import COUNT, NAME, STRING, exactly
from edge_dflash.serve.calls import encoded
from edge_dflash.serve.errors import Refusal, dump, json_response, refusal
from edge_dflash.serve.limits import Guard, Keys, held_if_large, read_body
from edge_dflash.serve.logs import RequestLog
from edge_dflash.serve.metrics import CONTENT_TYPE
from edge_dflash.serve.service import Service, State

_PIECE = 8192  # token ids that are written at once
_STARTED = int(time.time())
_SIZES = [one.name for one in fields(PairShape) if one.name not in ("lanes", "varying", "image_token_id", "patches")]
_SESSIONS = "/v1/edge_dflash/sessions"


def make_app(service: Service, keys: Keys | None = None) -> Starlette:
    """The ASGI application of a service. ``keys``: one of which TCP callers must send, if there are any."""
    paths = dict.fromkeys(one.path for one in OPERATIONS)
    app = Starlette(
        routes=[_route(service, path, [one for one in OPERATIONS if one.path == path]) for path in paths],
        exception_handlers={HTTPException: _http_error, Exception: _defect},
        middleware=[
            Middleware(RequestLog, which=service.config.service.log),
            Middleware(Guard, keys=keys or {}, header_bytes=service.config.limits.header_bytes),
        ],
    )
    app.router.redirect_slashes = False  # a path that does not exist is answered as such
    app.state.document = dump(api.document(OPERATIONS, SCHEMAS, service.config, key=bool(keys)))
    return app


def _route(service: Service, path: str, operations: list[api.Operation]) -> Route:
    """All methods of a path, so that a refusal of another names them all; errors raised on purpose become answers."""
    handlers = {one.method: one.handler for one in operations}

    async def answer(request: Request) -> ASGIApp:
        try:
            response: ASGIApp = await handlers["GET" if request.method == "HEAD" else request.method](service, request)
            return response
        except Exception as error:
            return service.refusal(error)

    return Route(path, answer, methods=list(handlers))


async def _http_error(request: Request, error: Exception) -> Any:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    method, path = request.method[:20], request.scope["path"][:80]
    if "Allow" in headers:  # 405
        message = f"the method of {path} is {method}; it takes {headers['Allow']}"
    else:
        message = f"no endpoint answers {method} {path}; GET /openapi.json lists them all"
    return Refusal(message, status=error.status_code, headers=headers)


async def _defect(request: Request, error: Exception) -> Any:
    return refusal(error)


# Texts and the model --------------------------------------------------------------------------------------------------


@api.operation(
    "POST", "/v1/edge_dflash/encode", "Token ids of messages or of a text.", "Tokens", api.WITH_BODY, body=bodies.ENCODE
)
async def encode(service: Service, request: Request) -> ASGIApp:
    """The token ids, written piece by piece: a million at once hold the interpreter for 100 ms."""
    planner, _ = service.loaded()
    task, thinking, raw = await read_body(service, request, encoded)

    def made() -> bytes:
        ids = planner.encode(task, thinking=thinking, raw=raw)
        parts = (dump(ids[at : at + _PIECE])[1:-1] for at in range(0, len(ids), _PIECE))
        return b'{"tokens":[' + b",".join(parts) + b"]}"

    async with held_if_large(request):
        return Response(await service.on_thread(made), media_type="application/json")


@api.operation("GET", "/v1/models", "The one model.", "ModelList")
async def models(service: Service, request: Request) -> ASGIApp:
    """A list of one."""
    return json_response({"object": "list", "data": [_card(service)]})


@api.operation("GET", "/v1/models/{name:path}", "The model, with its sizes.", "Model", {404: "There is no such model."})
async def model(service: Service, request: Request) -> ASGIApp:
    """The model of that name."""
    service.check_model(request.path_params["name"])
    return json_response(_card(service))


def _card(service: Service) -> dict[str, Any]:
    card = {"id": service.config.model, "object": "model", "created": _STARTED, "owned_by": "edge-dflash"}
    if (planner := service.planner) is not None:
        tokenizer = planner.tokenizer
        card["edge_dflash"] = {
            **{name: getattr(planner.shape, name) for name in _SIZES},
            "stop_token_ids": list(planner.stop_token_ids),
            "tokenizer": tokenizer is not None,
            "chat": tokenizer is not None and tokenizer.template is not None,
            "fingerprint": planner.fingerprint,
        }
    return card


# The service ----------------------------------------------------------------------------------------------------------


@api.operation("GET", "/health", "Whether the engine gets on.", "Health", unready=True)
async def health(service: Service, request: Request) -> ASGIApp:
    """200 while the engine gets on or has nothing to do."""
    said = service.health()
    return json_response(said, 200 if said["status"] == "ok" else 503)


@api.operation("GET", "/ready", "Whether requests are taken.", "Ready", unready=True)
async def ready(service: Service, request: Request) -> ASGIApp:
    """200 while requests are taken."""
    return json_response({"status": service.state}, 200 if service.state == "ready" else 503)


@api.operation("GET", "/metrics", "Figures for Prometheus.", None)
async def metrics(service: Service, request: Request) -> ASGIApp:
    """Text of Prometheus."""
    return Response(await service.on_thread(service.metrics.text), headers={"content-type": CONTENT_TYPE})


@api.operation("GET", "/openapi.json", "This document.", {"type": "object"})
async def openapi(service: Service, request: Request) -> ASGIApp:
    """The document, made when the service began."""
    return Response(request.app.state.document, media_type="application/json")


# Sessions -------------------------------------------------------------------------------------------------------------


@api.operation("GET", _SESSIONS, "All sessions, open and saved.", "SessionList")
async def sessions(service: Service, request: Request) -> ASGIApp:
    """Those of the caller's account."""
    _, found = service.loaded(request.state.account)
    return await service.written(lambda: {"object": "list", "data": found.entries()})


@api.operation("GET", _SESSIONS + "/{name}", "One session.", "Session", api.NAMED)
async def session(service: Service, request: Request) -> ASGIApp:
    """With its messages and token ids when it is open."""
    _, found = service.loaded(request.state.account)
    return await service.written(partial(found.info, _name(request)))


@api.operation(
    "DELETE", _SESSIONS + "/{name}", "Forget a session and its file.", "SessionDeleted", api.NAMED | api.STORED
)
async def delete_session(service: Service, request: Request) -> ASGIApp:
    """Forget it."""
    _, found = service.loaded(request.state.account)
    name = _name(request)
    await service.on_thread(partial(found.delete, name))
    return json_response({"id": name, "object": "edge_dflash.session", "deleted": True})


@api.operation(
    "POST", _SESSIONS + "/{name}/save", "Write a session.", "SessionSaved",
    api.WITH_BODY | api.NAMED | api.TAKEN | api.STORED, body=bodies.SAVE,
)  # fmt: skip
async def save_session(service: Service, request: Request) -> ASGIApp:
    """Write it, with ``to`` under another name."""
    _, found = service.loaded(request.state.account)
    name, given = _name(request), await read_body(service, request, lambda body, config: bodies.SAVE.read(body))
    to = given.get("to")
    size = await service.on_thread(partial(found.save, name, to, replace=given.get("replace", False)))
    return json_response({"id": to or name, "object": "edge_dflash.session", "saved": True, "bytes": size})


@api.operation(
    "POST", _SESSIONS + "/{name}/fork", "Another session that goes on from here.", "SessionForked",
    api.WITH_BODY | api.NAMED | api.RUNS | api.TAKEN | api.STORED, body=bodies.FORK,
)  # fmt: skip
async def fork_session(service: Service, request: Request) -> ASGIApp:
    """Let the session ``to`` go on from this one."""
    _, found = service.loaded(request.state.account)
    name, given = _name(request), await read_body(service, request, lambda body, config: bodies.FORK.read(body))
    to = given["to"]
    await service.on_thread(partial(found.fork, name, to))
    return json_response({"id": to, "object": "edge_dflash.session"})


def _name(request: Request) -> str:
    return str(NAME.read(request.path_params["name"], "session"))


def _session(optional: Schema | None = None, **more: Schema) -> Schema:
    return exactly(optional, id=STRING, object={"const": "edge_dflash.session"}, **more)


SCHEMAS: dict[str, Schema] = {
    **replies.SCHEMAS,
    "Session": _session(
        {"messages": api.list_of({"type": "object"}), "token_ids": api.IDS},
        open=api.BOOLEAN,
        tokens=api.or_null(COUNT),
        saved=api.BOOLEAN,
    ),
    "SessionList": exactly(object={"const": "list"}, data=api.list_of(api.ref("Session"))),
    "SessionForked": _session(),
    "SessionSaved": _session(saved={"const": True}, bytes=COUNT),
    "SessionDeleted": _session(deleted={"const": True}),
    "Tokens": exactly(tokens=api.IDS),
    "Model": exactly(
        {
            "edge_dflash": exactly(
                **dict.fromkeys(_SIZES, COUNT) | {"mask_token_id": api.or_null(COUNT), "stop_token_ids": api.IDS},
                **{"tokenizer": api.BOOLEAN, "chat": api.BOOLEAN, "fingerprint": STRING},
            )
        },
        id=STRING,
        object={"const": "model"},
        created=COUNT,
        owned_by=STRING,
    ),
    "ModelList": exactly(object={"const": "list"}, data=api.list_of(api.ref("Model"))),
    "Health": exactly(
        status={"enum": ["ok", "hung", "failed"]},
        state={"enum": list(get_args(State))},
        running=api.BOOLEAN,
        waiting=COUNT,
        stalled_seconds=api.NUMBER,
    ),
    "Ready": exactly(status={"enum": list(get_args(State))}),
}
OPERATIONS = (
    *(completions.chat, completions.completions, encode, models, model, health, ready, metrics, openapi),
    *(sessions, session, delete_session, save_session, fork_session),
)
