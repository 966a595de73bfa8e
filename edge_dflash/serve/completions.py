"""Chats and completions: one request from its body to the last byte of its answer, whole or as server-sent events.

A client that leaves, or takes nothing for too long (its connection is cut), ends its request at the next commit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_dflash.errors import ContextError, EdgeDflashError
from edge_dflash.result import Increment, Plan, Score
from edge_dflash.runner.astream import AsyncPlanStream, Unwanted, apart
from edge_dflash.runner.stream import PlanStream
from edge_dflash.serve import bodies
from edge_dflash.serve.calls import Call, chat_call, check_results, completion_call
from edge_dflash.serve.errors import Refusal, dump, json_response
from edge_dflash.serve.limits import SMALL, Read, held_if_large, read_body
from edge_dflash.serve.openapi import RUNS, STORED, WITH_BODY, operation
from edge_dflash.serve.replies import Writer
from edge_dflash.serve.service import Service, log

ALIVE = 10.0  # seconds without an event after which a comment is sent: a client that died is found
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_OUTCOMES = {429: "queue_full", 503: "unavailable", 507: "unavailable", 500: "failed"}  # of requests that did not run
_REFUSALS = {**WITH_BODY, **RUNS, **STORED}


@operation(
    "POST", "/v1/chat/completions", "Messages in, an answer out.", "ChatCompletion", _REFUSALS,
    event="ChatCompletionChunk", body=bodies.chat,
)  # fmt: skip
async def chat(service: Service, request: Request) -> ASGIApp:
    """Answer messages."""
    return await _admitted(service, request, chat_call, "chat")


@operation(
    "POST", "/v1/completions", "A text or token ids, used as they are.", "Completion", _REFUSALS,
    event="CompletionChunk", body=bodies.completion,
)  # fmt: skip
async def completions(service: Service, request: Request) -> ASGIApp:
    """Go on with a text."""
    return await _admitted(service, request, completion_call, "completions")


async def _admitted(service: Service, request: Request, read: Read, endpoint: str) -> ASGIApp:
    """The request, which answers and ends itself, or its refusal."""
    arrived = time.perf_counter()
    try:
        service.loaded()
        return Running(service, await read_body(service, request, read), request, endpoint, arrived).answer
    except Exception as error:
        return _refused(service, request, endpoint, error)


def _refused(service: Service, request: Request, endpoint: str, error: Exception, *, left: bool = False) -> Refusal:
    """The refusal of a request, which is counted. ``left``: its client did."""
    refused = service.refusal(error)
    _ended(service, request, endpoint, "disconnected" if left else _OUTCOMES.get(refused.status, "refused"))
    return refused


def _ended(service: Service, request: Request, endpoint: str, outcome: str) -> None:
    """Count a request, and note for the log what became of it."""
    service.metrics.ended(endpoint, outcome)
    request.state.outcome = outcome


class Running:
    """A request that was admitted. Made to be answered, once; what it holds is given back then."""

    def __init__(self, service: Service, call: Call, request: Request, endpoint: str, arrived: float) -> None:
        """``arrived``: time.perf_counter() of its arrival. Raises Refusal when it cannot be taken now."""
        self._service, self._call, self._request, self._endpoint = service, call, request, endpoint
        self._account = str(request.state.account)
        request.state.caller = call.options.get("caller")
        self._planner, self._sessions = service.loaded(self._account)
        service.check_model(call.model, "model")
        self._arrived = arrived
        self._began = 0.0  # time.perf_counter() of its call to the planner
        self._held: str | None = None  # its session, while it has it
        self._left = False  # its client did
        self._counted = False
        self._writer = Writer(call, service.config.model, self._planner.fingerprint[:16], request.state.id)
        self._streams = apart(self._begin, call.distinct)
        service.streams.update(self._streams)

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run, send what came of it, and end (ASGI)."""
        watcher = asyncio.create_task(self._watch(receive))
        answer: ASGIApp | None = None
        try:
            async with held_if_large(self._request):
                if self._left:
                    raise Refusal("the client went away", status=408, code="disconnected")
                for stream in self._streams:  # the first begins all; its errors have statuses
                    await stream.__aenter__()
            if self._call.stream:
                await self._events(send)
            else:
                answer = await self._whole()
        except Exception as error:
            answer = _refused(self._service, self._request, self._endpoint, error, left=self._left)
        finally:
            watcher.cancel()
            await self._end()
        if answer is not None:
            await answer(scope, receive, send)

    def _begin(self, unwanted: Unwanted) -> tuple[PlanStream, ...]:
        """Hand the request to the planner. On a thread: opening a session may wait for the engine."""
        call, planner, session = self._call, self._planner, None
        if call.session is not None:
            session = self._sessions.acquire(call.session)
            self._held = call.session
        self._began = time.perf_counter()
        task: Any = call.task
        if isinstance(task, str):
            if (tokenizer := planner.tokenizer) is None:
                raise Refusal("this model has no tokenizer; give token ids as the prompt", param="prompt")
            task = tokenizer.encode(task) if call.options.get("raw") else tokenizer.encode_text(task)
        if call.echo and (tokenizer := planner.tokenizer) is not None:
            spelled = b"".join(tokenizer.token_bytes(one) or b"" for one in task)
            self._writer.echo = call.task if isinstance(call.task, str) else spelled.decode(errors="replace")
        if call.chat and session is not None:
            check_results(task, session.messages)
        options = call.options.copy()
        caller = options.get("caller")
        options["caller"] = f"{self._account}/{caller}" if caller else self._account
        if (seconds := options.get("deadline", self._service.config.timeouts.deadline or None)) is not None:
            options["deadline"] = max(0.0, self._arrived + seconds - time.perf_counter())
        ask = partial(planner.streams, task, len(self._streams), session=session, unwanted=unwanted)
        try:
            return ask(**options)
        except ContextError:
            if not call.budget_is_default or options["max_new_tokens"] is None:
                raise
            options["max_new_tokens"] = None
            return ask(**options)

    async def _watch(self, receive: Receive) -> None:
        """End the request when its client leaves."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        for stream in self._streams:
            stream.cancel()

    async def _whole(self) -> ASGIApp:
        plans, details = await self._finish()
        self._note(plans[0].finish_reason)
        made = partial(self._writer.whole, plans, details)
        said = 1 + (self._call.options.get("logprobs") or 0)  # of each token
        small = said * sum(len(plan.tokens) + len(plan.prompt_logprobs) for plan in plans) < SMALL
        return json_response(made()) if small else await self._service.written(made)

    async def _events(self, send: Send) -> None:
        """Send the answer as events; an error is one of them."""

        async def say(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            for chunk in self._writer.opening():
                await say(_event(chunk))
            async with aclosing(merged(self._streams, ALIVE)) as parts:
                async for part in parts:
                    if part is None:
                        await say(b": working\n\n")
                        continue
                    for choice in range(part[0], self._call.n, len(self._streams)):  # all that are made of this stream
                        made = partial(self._piece, part[1], choice)
                        long = len(part[1].prompt_logprobs) > 0  # of megabytes, perhaps
                        if (data := await self._service.on_thread(made) if long else made()) and not self._left:
                            await say(data)
            plans, details = await self._finish()
            for chunk in self._writer.closing(plans, details):
                await say(_event(chunk))
            outcome: str = plans[0].finish_reason
        except Exception as error:
            self._request.state.refused = refused = self._service.refusal(error)
            await say(_event(refused.body))
            outcome = refused.code or "refused"
        await say(b"data: [DONE]\n\n")
        self._note(outcome)  # now: the end itself looks like leaving
        await say(b"", False)

    def _piece(self, part: Increment, choice: int) -> bytes:
        piece = self._writer.piece(part, choice)
        return b"" if piece is None else _event(piece, sharing=len(part.prompt_logprobs) > 0)

    def _note(self, outcome: str) -> None:
        _ended(self._service, self._request, self._endpoint, "disconnected" if self._left else outcome)

    async def _finish(self) -> tuple[list[Plan], dict[str, Any]]:
        """A plan for each choice, counted, the session saved where that is wanted every turn; what is told of it."""
        service, plans = self._service, [await stream.result() for stream in self._streams]
        joules, session_error = self._count(plans), None
        if self._call.options.get("prompt_logprobs"):
            _ = [Score.of(plan) for plan in plans]  # half a prompt's would be read as a whole one's
        if self._call.session is not None and plans[0].tokens and service.config.sessions.save == "turn":
            try:
                await service.on_thread(partial(self._sessions.save, self._call.session))
            except EdgeDflashError as error:  # the answer is there all the same
                log.error("session %s was not saved: %s", self._call.session, error)
                session_error = str(error)
        board = (await service.on_thread(service.board)).brief() | ({} if joules is None else {"joules": joules})
        details = {"board": board, "session_error": session_error}
        return plans * (self._call.n // len(plans)), {name: value for name, value in details.items() if value}

    def _count(self, plans: Sequence[Plan]) -> float | None:
        """Count plans, once; the board's energy while they were made, None where it does not say its power."""
        service, timings = self._service, [plan.timings for plan in plans]
        queued, total = min(one.queue_seconds for one in timings), max(one.total_seconds for one in timings)
        joules = service.power.joules(self._began + queued, self._began + total)
        if not self._counted:
            self._counted = True
            self._request.state.plans = plans
            for plan in plans:
                service.metrics.plan(plan, self._account, first=plan is plans[0])
            if joules is not None:
                service.metrics.joules.labels(service.power.rail).observe(joules)
            if any(plan.tokens for plan in plans):
                service.seconds.append(total - queued)
        return joules

    async def _end(self) -> None:
        """The request is over, however: nothing of it stays on the engine."""
        try:
            for stream in self._streams:
                stream.cancel()
            plans = [plan for stream in self._streams if (plan := await _let_go(stream)) is not None]
            if plans:  # of a client that left, or next to one that failed: its tokens were made anyway
                self._count(plans)
        finally:
            self._service.streams.difference_update(self._streams)
            if self._held is not None:
                await self._service.on_thread(partial(self._sessions.release, self._held))


def _event(value: dict[str, Any], *, sharing: bool = False) -> bytes:
    return b"data: " + dump(value, sharing=sharing) + b"\n\n"


async def _let_go(stream: AsyncPlanStream) -> Plan | None:
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
    following = {_next(stream): index for index, stream in enumerate(streams)}
    try:
        while following:
            done, _ = await asyncio.wait(following, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for future in sorted(done, key=following.__getitem__):
                index = following.pop(future)
                try:
                    part = future.result()
                except StopAsyncIteration:
                    continue
                following[_next(streams[index])] = index
                yield index, part
    finally:
        for future in following:
            future.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def _next(increments: AsyncIterator[Increment]) -> asyncio.Future[Increment]:
    return asyncio.ensure_future(anext(increments))
