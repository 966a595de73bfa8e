"""The caller's end of a request: increments as they become final, then the plan. For threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from edge_dflash.errors import RequestCancelledError, RequestError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.prepare import UNWANTED
from edge_dflash.runner.ticket import Ticket


class Asked(Protocol):
    """What a stream must know of the request behind its ticket."""

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

    def __init__(self, job: Asked, ticket: Ticket[Any, Plan], owner: object) -> None:
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
        """Cancel what is left, wait for the engine to let go of it, and give no more increments."""
        self._closed = True
        self.cancel()
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
    def queued(self) -> bool:
        """Whether the request was prepared: it waits for the engine, runs, or has ended."""
        return self._stream is not None

    async def aclose(self) -> None:
        """Cancel what is left and wait for the engine to let go of it."""
        self.cancel()
        if self._stream is not None:
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
