"""The text of an answer as its tokens come: taken apart, and cut before a stop text.

Two walkers over the same tokens. :class:`StopFinder` is asked before tokens are committed, so that the last one is the
one that completes a stop text; :class:`AnswerText` gives the text to the caller and holds back what may become a stop
text. Stop texts are looked for in the answer, not in thinking or tool calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from edge_dflash.decode.loop import Step
from edge_dflash.errors import RequestCancelledError, RequestError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.ticket import Ticket
from edge_dflash.text.chat import Answer, AnswerStream, Markers, thinking_is_open
from edge_dflash.text.tokenizer import Detokenizer, Tokenizer
from edge_dflash.text.tool_calls import Tool

UNWANTED: ContextVar[Callable[[], bool]] = ContextVar("UNWANTED", default=lambda: False)
"""Whether who asks has gone: set around a call that prepares a request on another thread."""


class StopFinder:
    """Finds the token that completes a stop text. Called with all tokens of an answer, in order."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        markers = Markers.of(tokenizer)
        self._opens = {markers.think: markers.end_think, markers.tool_call: markers.end_tool_call}
        self._tokenizer = tokenizer
        self._stops = stops
        self._reach = max(map(len, stops)) - 1  # characters that may belong to a stop text's beginning
        self._until = markers.end_think if thinking_is_open(prompt, tokenizer) else None  # inside a span: its end
        self._begin(trim=False)

    def __call__(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens belong to the answer when it ends with them; None when it goes on."""
        for index, token in enumerate(tokens):
            if self._completes(token):
                return index + 1
        return None

    def _begin(self, *, trim: bool) -> None:
        self._detokenizer, self._tail, self._trim = Detokenizer(self._tokenizer.decode), "", trim

    def _completes(self, token: int) -> bool:
        if self._until is not None:
            if token == self._until:
                self._until = None
                self._begin(trim=True)  # newlines after a span belong to the template
            return False
        if (until := self._opens.get(token)) is not None:
            self._until = until
            return False
        text = self._detokenizer.add([token])
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        seen = self._tail + text
        self._tail = seen[-self._reach :] if self._reach else ""
        return any(stop in seen for stop in self._stops)


class AnswerText:
    """The pieces of an answer; joined, they are the whole. ``stops`` are cut off with what follows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop_token_ids: Sequence[int],
        tools: Sequence[Tool] | None,
        stops: Sequence[str],
    ) -> None:
        self._stream = AnswerStream(tokenizer, prompt, stop_token_ids=stop_token_ids, tools=tools)
        self._stops = stops
        self._held = ""  # the beginning of a stop text, perhaps
        self._cut = False

    @property
    def thinking(self) -> bool:
        """Whether the answer stands inside a thinking span."""
        return self._stream.thinking

    def add(self, tokens: Sequence[int]) -> Answer:
        """Take tokens and return what is certain now."""
        return self._before_stop(self._stream.add(tokens), last=False)

    def finish(self) -> Answer:
        """Return what is left when no more tokens come."""
        return self._before_stop(self._stream.finish(), last=True)

    def _before_stop(self, piece: Answer, *, last: bool) -> Answer:
        if self._cut or not self._stops:
            return replace(piece, content="") if self._cut else piece
        text = self._held + piece.content
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self._cut = bool(found)
        held = 0 if last or found else max(_overlap(text, stop) for stop in self._stops)
        certain = min(found) if found else len(text) - held
        self._held = "" if found else text[certain:]
        return replace(piece, content=text[:certain])


class Reader:
    """Increments of the steps of an answer, in order, and the answer that they make. ``text`` None: tokens only.

    Text is made where it is read, and at the end for the plan: a cycle does not wait for it.
    """

    def __init__(self, text: AnswerText | None) -> None:
        self._text = text
        self.answer = Answer()

    @property
    def thinking(self) -> bool:
        """Whether the answer stands inside a thinking span."""
        return self._text is not None and self._text.thinking

    def __call__(self, step: Step) -> Increment:
        """The increment of the next step."""
        if self._text is None:
            return Increment(None, step.tokens, logprobs=step.logprobs)
        piece = self._text.add(step.tokens)
        if step.finish_reason is not None:
            piece += self._text.finish()
        self.answer += piece
        return Increment(piece.content, step.tokens, piece.thinking, piece.tool_calls, step.logprobs)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StreamedRequest(Protocol):
    """The request behind a stream's ticket."""

    cancelled: bool  # set by any thread: end at the next commit

    def unstarted(self) -> Plan:
        """The plan of a request that ended before it began."""
        ...

    def reader(self) -> Callable[[Any], Increment]:
        """Makes increments of what the ticket gives, in order."""
        ...


class PlanStream(Iterator[Increment]):
    """Increments of one request, each given as soon as its tokens are final.

    The engine does not wait for the reader. Joined, the texts and the tokens of the increments are those of the plan.
    Leaving the ``with`` block (or :meth:`close`) before the end cancels the request, and so does dropping the stream.
    """

    def __init__(self, job: StreamedRequest, ticket: Ticket[Any, Plan], owner: object) -> None:
        """Read the ticket of a job; ``owner`` is kept alive meanwhile. Made by Planner.stream."""
        self._job = job
        self._ticket = ticket
        self._owner = owner
        self._increments = map(job.reader(), ticket)
        self._closed = False

    def __next__(self) -> Increment:
        if self._closed:
            raise StopIteration
        try:
            return next(self._increments)
        except RequestCancelledError:  # it never ran
            raise StopIteration from None

    def __enter__(self) -> PlanStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._job.cancelled = True

    def cancel(self) -> None:
        """Ask the request to end, from any thread: at once if it waits, at the next commit if it runs.

        What was committed until then is the plan, with finish reason ``cancelled``. After the end it does nothing.
        """
        self._job.cancelled = True
        self._ticket.cancel()

    def close(self) -> None:
        """Cancel what is left, wait for the engine to let go of it, and give no more increments.

        Called by an observer, on the engine's own thread, it does not wait.
        """
        self._closed = True
        self.cancel()
        if not self._ticket.here:
            self._ticket.exception()

    @property
    def plan(self) -> Plan:
        """The whole plan; waits for its end. Raises the request's error if it has one."""
        return self.result()

    def result(self, timeout: float | None = None) -> Plan:
        """:attr:`plan`, waited for at most ``timeout`` seconds; then TimeoutError, and the request goes on."""
        try:
            return self._ticket.result(timeout)
        except RequestCancelledError:
            return self._job.unstarted()


class AsyncPlanStream(AsyncIterator[Increment]):
    """:class:`PlanStream` for asyncio: nothing here blocks the loop. The request begins with the first ``await``.

    Cancelling the task that waits cancels the request.
    """

    def __init__(self, begin: Callable[[], PlanStream]) -> None:
        """``begin`` prepares and queues the request, on another thread. Made by Planner.astream."""
        self._begin = begin
        self._stream: PlanStream | None = None
        self._read: Callable[[Any], Increment] | None = None
        self._cancelled = False

    async def __anext__(self) -> Increment:
        stream = await self._started()
        if self._read is None:
            self._read, self._given = stream._job.reader(), aiter(stream._ticket)
        try:
            return self._read(await anext(self._given))
        except RequestCancelledError:  # it never ran
            raise StopAsyncIteration from None

    async def __aenter__(self) -> AsyncPlanStream:
        await self._started()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def cancel(self) -> None:
        """See PlanStream. May be called from any thread."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether it was asked to end."""
        return self._cancelled

    @property
    def queued(self) -> bool:
        """Whether the request was prepared: it waits for the engine, runs, or has ended."""
        return self._stream is not None

    async def aclose(self) -> None:
        """Cancel what is left and wait for the engine to let go of it."""
        self.cancel()
        if self._stream is not None and not self._stream._ticket.here:
            await self.result()

    async def result(self) -> Plan:
        """The whole plan. Raises the request's error if it has one."""
        stream = await self._started()
        try:
            return await stream._ticket
        except RequestCancelledError:
            return stream._job.unstarted()

    @property
    def plan(self) -> Plan:
        """The finished plan. Raises RequestError when the request has not ended."""
        if self._stream is None or not self._stream._ticket.done:
            raise RequestError("the stream was not read to its end, so there is no plan yet; await result()")
        return self._stream.plan

    def _attach(self, stream: PlanStream) -> None:
        """Another one's ``await`` began it, too. Called on any thread."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()

    async def _started(self) -> PlanStream:
        if self._stream is None:
            context = UNWANTED.set(lambda: self._cancelled)
            try:
                self._stream = await asyncio.to_thread(self._begin)
            except asyncio.CancelledError:
                self._cancelled = True
                raise
            finally:
                UNWANTED.reset(context)
            if self._cancelled:
                self._stream.cancel()
        return self._stream
