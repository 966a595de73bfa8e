"""One line of the log for each request: who asked for what, what came of it and what it cost. Never what was said.

A line holds no prompt, no answer, no key and no query. What comes from a client (path, caller, a field's name) is
percent-encoded and cut, so nobody can write a line.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_dflash.result import Plan
from edge_dflash.serve.fields import Refusal

log = logging.getLogger("edge_dflash.requests")
_POLLS = ("/health", "/ready", "/metrics")  # asked every few seconds: logged when they are refused
_STRANGERS = 20  # lines a second of requests that nobody in particular made, or that ask for nothing that is there
_LONGEST = 100  # characters of what a client chose
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]]{1,60}")


class RequestLog:
    """Gives each request an id, told as ``x-request-id``, and logs its end (ASGI).

    What others put into the request's ``state`` is told: account, caller, plans, outcome, refused.
    """

    def __init__(self, app: ASGIApp, which: str) -> None:
        """``which``: service.log of the configuration."""
        self._app = app
        self._which = which
        self._second = self._lines = self._left_out = 0  # of strangers' requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Go on, and log what came of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        scope["state"] = {**scope.get("state", {}), "id": (request_id := secrets.token_hex(12))}

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = status or 500
            raise
        finally:
            self._log(scope, status, time.perf_counter() - began)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        state, refused = scope["state"], scope["state"].get("refused")
        worst = max(status, refused.status if refused is not None else 0)
        if self._which == "none" or (self._which == "errors" and worst < 400):
            return
        if scope["path"] in _POLLS and refused is None:
            return
        if self._is_left_out(stranger="account" not in state or status in (404, 405)):
            return
        level = logging.ERROR if worst >= 500 else logging.WARNING if worst >= 400 else logging.INFO
        path = (scope.get("raw_path") or scope["path"].encode("utf-8", "replace")).decode("latin-1").partition("?")[0]
        words = {
            "id": state["id"],
            "caller": _caller(state),
            **_figures(state.get("plans", ())),
            "seconds": f"{seconds:.3f}",
            **({"outcome": "disconnected"} if state.get("outcome") == "disconnected" else {}),
            **(_why(refused) if refused is not None else {}),
        }
        said = " ".join(f"{name}={value}" for name, value in words.items())
        log.log(level, "%s %s %s %s", _safe(scope["method"]), _safe(path, "/%"), status or "-", said)

    def _is_left_out(self, *, stranger: bool) -> bool:
        """Whether a request of a flood has no line; the first one of a later second says how many had none."""
        if (now := int(time.monotonic())) != self._second:
            if self._left_out:
                log.warning("%d more requests were refused, too many for a line each", self._left_out)
            self._second, self._lines, self._left_out = now, 0, 0
        self._lines += stranger
        left_out = stranger and self._lines > _STRANGERS
        self._left_out += left_out
        return left_out


def _caller(state: Mapping[str, Any]) -> str:
    account, caller = state.get("account", "-"), state.get("caller")
    return f"{account}/{_safe(caller)}" if caller else account


def _figures(plans: Sequence[Plan]) -> dict[str, object]:
    """What the plans of a request cost."""
    if not plans:
        return {}
    first = plans[0]
    figures: dict[str, object] = {
        "prompt": first.prompt_tokens,
        "reused": first.reused_tokens,
        "generated": sum(len(plan.tokens) for plan in plans),
    }
    if first.timings.first_token_seconds:
        figures["first_ms"] = f"{1000 * first.timings.first_token_seconds:.0f}"
    if first.speculative and first.accept_lengths:
        figures["accept"] = f"{first.accept_length:.2f}"
    return {**figures, "finish": first.finish_reason}


def _why(refused: Refusal) -> dict[str, object]:
    """Why a request was refused, without what it held: a message may quote it."""
    kind = refused.body["error"]["type"]
    param = refused.param if refused.param and _FIELD.fullmatch(refused.param) else None
    return {"refused": refused.code or kind, **({"param": param} if param else {})}


def _safe(text: str, more: str = "") -> str:
    return quote(text[:_LONGEST].encode("utf-8", "replace"), safe="._-:@+[]" + more)[: 3 * _LONGEST]
