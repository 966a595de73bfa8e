"""Chats and completions: one request from its body to the last byte of its answer, whole or as server-sent events.

A client that leaves, or takes nothing for too long, ends its request at the next commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_dflash.board.state import BoardState
from edge_dflash.errors import ContextError, EdgeDflashError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.astream import AsyncPlanStream, Unwanted, apart
from edge_dflash.runner.stream import PlanStream
from edge_dflash.serve import bodies
from edge_dflash.serve.calls import Call, chat_call, check_results, completion_call
from edge_dflash.serve.errors import Refusal, dump, json_response
from edge_dflash.serve.limits import SMALL, Read, read_body, turn
from edge_dflash.serve.openapi import RUNS, STORED, WITH_BODY, Operations, ref
from edge_dflash.serve.replies import Writer
from edge_dflash.serve.service import Service, log

ALIVE = 10.0  # seconds without an event after which a comment is sent: a client that died is found
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_OUTCOMES = {429: "queue_full", 503: "unavailable", 507: "unavailable", 500: "failed"}  # of requests that did not run
operations = Operations()


class Running:
    """A request that was admitted. Called (ASGI), it sends its answer as events and ends."""

    def __init__(self, service: Service, call: Call, arrived: float, state: dict[str, Any]) -> None:
        """``arrived``: time.perf_counter() of its arrival; ``state``: the request's, which is told what becomes of it.

        Raises Refusal when it cannot be taken now.
        """
        self._state, account = state, str(state["account"])
        state["caller"] = call.options.get("caller")
        planner, self._sessions = service.loaded(account)
        service.check_model(call.model, "model")
        self.call = call
        self.disconnected = False
        self._service = service
        self._arrived = arrived
        self._account = account
        self._planner = planner
        self._held: str | None = None  # its session, while it has it
        self._session_error: str | None = None  # why its session was not saved
        self._counted = False
        self._began = 0.0  # time.perf_counter() of its call to the planner
        self.writer = Writer(call, service.config.model, planner.fingerprint[:16], state["id"])
        self.streams = apart(self._begin, call.distinct)
        service.streams.update(self.streams)

    def _begin(self, unwanted: Unwanted) -> tuple[PlanStream, ...]:
        """Hand the request to the planner. On a thread: opening a session may wait for the engine."""
        call, planner, session = self.call, self._planner, None
        if call.session is not None:
            session = self._sessions.acquire(call.session)
            self._held = call.session
        self._began = time.perf_counter()
        task: Any = call.task
        if isinstance(task, str):
            if (tokenizer := planner.tokenizer) is None:
                raise Refusal("this model has no tokenizer; give token ids as the prompt", param="prompt")
            task = tokenizer.encode(task) if call.options.get("raw") else tokenizer.encode_text(task)
        if call.chat and session is not None:
            check_results(task, session.messages)
        options = call.options.copy()
        caller = options.get("caller")
        options["caller"] = f"{self._account}/{caller}" if caller else self._account
        if (seconds := options.get("deadline", self._service.config.timeouts.deadline or None)) is not None:
            options["deadline"] = max(0.0, self._arrived + seconds - time.perf_counter())
        ask = partial(planner.streams, task, len(self.streams), session=session, unwanted=unwanted)
        try:
            return ask(**options)
        except ContextError:
            if not call.budget_is_default or options["max_new_tokens"] is None:
                raise
            options["max_new_tokens"] = None
            return ask(**options)

    async def watch(self, receive: Receive) -> None:
        """End the request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.disconnected = True
        for stream in self.streams:
            stream.cancel()

    async def finish(self) -> tuple[list[Plan], dict[str, Any]]:
        """A plan for each choice, counted, the session saved where that is wanted every turn; what is told beside."""
        service, plans = self._service, [await stream.result() for stream in self.streams]
        self._count(plans)
        if self.call.session is not None and plans[0].tokens and service.config.sessions.save == "turn":
            try:
                await service.on_thread(partial(self._sessions.save, self.call.session))
            except EdgeDflashError as error:  # the answer is there all the same
                log.error("session %s was not saved: %s", self.call.session, error)
                self._session_error = str(error)
        state: BoardState = await service.on_thread(service.board)
        joules = self._joules(plans)
        board = state.brief() if joules is None else {**state.brief(), "joules": joules}
        details = {"board": board, "session_error": self._session_error}
        plans *= self.call.n // len(plans)
        return plans, {name: value for name, value in details.items() if value}

    def _count(self, plans: Sequence[Plan]) -> None:
        if self._counted:
            return
        self._counted = True
        self._state["plans"] = plans
        for plan in plans:
            self._service.metrics.plan(plan, self._account, first=plan is plans[0])
        if (joules := self._joules(plans)) is not None:
            self._service.metrics.joules.labels(self._service.power.rail).observe(joules)
        if any(plan.tokens for plan in plans):
            queued, total = span(plans)
            self._service.seconds.append(total - queued)

    def _joules(self, plans: Sequence[Plan]) -> float | None:
        """Energy of the board while plans were made; None where it does not say its power."""
        queued, total = span(plans)
        return self._service.power.joules(self._began + queued, self._began + total)

    async def end(self) -> None:
        """The request is over, however: nothing of it stays on the engine."""
        try:
            for stream in self.streams:
                stream.cancel()
            plans = [plan for stream in self.streams if (plan := await _ended(stream)) is not None]
            if plans:  # of a client that left, or beside one that failed: its tokens were made anyway
                self._count(plans)
        finally:
            self._service.streams.difference_update(self.streams)
            if self._held is not None:
                await self._service.on_thread(partial(self._sessions.release, self._held))

    # Events -----------------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events (ASGI)."""
        watcher = asyncio.create_task(self.watch(receive))
        outcome = "disconnected"
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS})
            ended = await self._events(partial(self._data, send))
            outcome = outcome if self.disconnected else ended  # asked now: the end itself looks like leaving
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except _GoneError:
            self._leave()
        finally:
            self.ended(outcome)
            watcher.cancel()
            await self.end()

    def ended(self, outcome: str) -> None:
        """Count the request, and note what the log is to say."""
        self._service.metrics.ended("chat" if self.call.chat else "completions", outcome)
        self._state["outcome"] = outcome

    async def _events(self, data: Callable[[bytes], Awaitable[None]]) -> str:
        """Send them; returns the outcome."""
        try:
            for chunk in self.writer.opening():
                await data(_event(chunk))
            async with aclosing(merged(self.streams, ALIVE)) as parts:
                async for part in parts:
                    if part is None:
                        await data(b": working\n\n")
                        continue
                    for choice in range(part[0], self.call.n, len(self.streams)):  # all that are made of this stream
                        piece = self.writer.piece(part[1], choice)
                        if piece is not None and not self.disconnected:
                            await data(_event(piece))
            plans, details = await self.finish()
            for chunk in self.writer.closing(plans, details):
                await data(_event(chunk))
            outcome: str = plans[0].finish_reason
        except _GoneError:
            raise
        except Exception as error:
            self._state["refused"] = refused = self._service.refusal(error)
            await data(_event(refused.body))
            outcome = refused.code or "refused"
        await data(b"data: [DONE]\n\n")
        return outcome

    async def _data(self, send: Send, data: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        try:
            await asyncio.wait_for(send(message), self._service.config.timeouts.write)
        except (TimeoutError, OSError):
            raise _GoneError from None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dump(value) + b"\n\n"


async def _ended(stream: AsyncPlanStream) -> Plan | None:
    """The plan of a stream that was cancelled, when the engine has let go of it; None: it failed, or never began."""
    try:
        await stream.aclose()
        return stream.plan
    except Exception as error:
        log.debug("a request ended with %r", error)
        return None


async def merged(
    streams: Sequence[AsyncIterator[Increment]], patience: float
) -> AsyncGenerator[tuple[int, Increment] | None, None]:
    """Increments of all streams as they come, each with its stream's index; None when none came for a while.

    The error of any is raised.
    """
    increments = [aiter(stream) for stream in streams]
    following = {_next(one): index for index, one in enumerate(increments)}
    try:
        while following:
            done, _ = await asyncio.wait(following, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for future in sorted(done, key=following.__getitem__):
                try:
                    part = future.result()
                except StopAsyncIteration:
                    del following[future]
                    continue
                index = following.pop(future)
                following[_next(increments[index])] = index
                yield index, part
    finally:
        for future in following:
            future.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def _next(increments: AsyncIterator[Increment]) -> asyncio.Future[Increment]:
    return asyncio.ensure_future(anext(increments))


def span(plans: Sequence[Plan]) -> tuple[float, float]:
    """When the plans of one request began and ended, in seconds from its call."""
    timings = [plan.timings for plan in plans]
    return min(one.queue_seconds for one in timings), max(one.total_seconds for one in timings)


class _GoneError(Exception):
    """The client takes nothing, or is gone."""


# Routes ---------------------------------------------------------------------------------------------------------------

_REFUSALS = {**WITH_BODY, **RUNS, **STORED}


@operations(
    "POST", "/v1/chat/completions", "Messages in, an answer out.", ref("ChatCompletion"), _REFUSALS,
    event=ref("ChatCompletionChunk"), body=bodies.chat,
)  # fmt: skip
async def chat(service: Service, request: Request) -> ASGIApp:
    """Answer messages."""
    return await _generate(service, request, chat_call, "chat")


@operations(
    "POST", "/v1/completions", "A text or token ids, used as they are.", ref("Completion"), _REFUSALS,
    event=ref("CompletionChunk"), body=bodies.completion,
)  # fmt: skip
async def completions(service: Service, request: Request) -> ASGIApp:
    """Go on with a text."""
    return await _generate(service, request, completion_call, "completions")


async def _generate(service: Service, request: Request, read: Read, endpoint: str) -> ASGIApp:
    """The response to a request; a streaming one takes the request over, and ends it."""
    arrived = time.perf_counter()
    running = watcher = None
    try:
        service.loaded()
        call = await read_body(service, request, read)
        running = Running(service, call, arrived, request.scope["state"])
        watcher = asyncio.create_task(running.watch(request.receive))
        async with turn(request):
            if running.disconnected:
                raise Refusal("the client went away", status=408, code="disconnected")
            for stream in running.streams:  # the first begins all; its errors have statuses
                await stream.__aenter__()
        if call.stream:
            streaming, running = running, None
            return streaming
        plans, details = await running.finish()
        running.ended("disconnected" if running.disconnected else plans[0].finish_reason)
        made = partial(running.writer.whole, plans, details)
        small = sum(len(plan.tokens) for plan in plans) < SMALL
        return json_response(made()) if small else await service.written(made)
    except Exception as error:
        refused = service.refusal(error)
        gone = running is not None and running.disconnected
        outcome = "disconnected" if gone else _OUTCOMES.get(refused.status, "refused")
        service.metrics.ended(endpoint, outcome)
        request.scope["state"]["outcome"] = outcome
        return refused.response()
    finally:
        if watcher is not None:
            watcher.cancel()
        if running is not None:
            await running.end()
