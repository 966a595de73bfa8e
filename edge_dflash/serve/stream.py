"""An answer as it is made: server-sent events in the form of the OpenAI API.

A client that leaves, or takes nothing for too long, ends its request at the next commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from edge_dflash.result import Increment
from edge_dflash.serve.refusal import dump, error_json, refusal
from edge_dflash.serve.running import Running
from edge_dflash.serve.service import Service, log

ALIVE = 10.0  # seconds without an event after which a comment is sent: a client that died is found
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def watch_client(receive: Receive, running: Running) -> None:
    """End the request when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    running.leave()


class _GoneError(Exception):
    """The client takes nothing, or is gone."""


class EventStream:
    """The response to a request that streams: takes it over and ends it. ``count`` is told the outcome."""

    def __init__(self, service: Service, running: Running, count: Callable[[str], None]) -> None:
        self._service = service
        self._running = running
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events (ASGI)."""
        running = self._running
        watcher = asyncio.create_task(watch_client(receive, running))
        outcome = "disconnected"
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS})
            ended = await self._events(send)
            outcome = outcome if running.disconnected else ended  # asked now: the end itself looks like leaving
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except _GoneError:
            running.leave()
        finally:
            self._count(outcome)
            watcher.cancel()
            await self._service.end(running)

    async def _events(self, send: Send) -> str:
        service, running = self._service, self._running
        writer, calls = running.writer, 0
        if (opening := writer.opening()) is not None:
            await self._event(send, opening)
        try:
            increments = aiter(running.stream)
            while (part := await self._next(increments, send)) is not None:
                piece = writer.piece(part, calls)
                calls += len(part.tool_calls)
                if piece is not None and not running.disconnected:
                    await self._event(send, piece)
            plan = await service.finish(running)
            details = await service.details(running)
            for chunk in writer.closing(plan, details):
                await self._event(send, chunk)
            outcome: str = plan.finish_reason
        except _GoneError:
            raise
        except Exception as error:
            refused = refusal(error)
            if refused.status == 500:
                log.error("a request failed", exc_info=error)
            await self._event(send, error_json(refused))
            outcome = refused.code or "refused"
        await self._data(send, b"data: [DONE]\n\n")
        return outcome

    async def _next(self, increments: AsyncIterator[Increment], send: Send) -> Increment | None:
        """The next increment, None at the end; a comment is sent whenever none came for a while."""
        following: asyncio.Future[Increment] = asyncio.ensure_future(anext(increments))
        try:
            while not following.done():
                done, _ = await asyncio.wait({following}, timeout=ALIVE)
                if not done:
                    await self._data(send, b": working\n\n")
            return following.result()
        except StopAsyncIteration:
            return None
        finally:
            following.cancel()

    async def _event(self, send: Send, value: dict[str, Any]) -> None:
        await self._data(send, b"data: " + dump(value) + b"\n\n")

    async def _data(self, send: Send, data: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._service.config.timeouts.write)
        except (TimeoutError, OSError):
            raise _GoneError from None
