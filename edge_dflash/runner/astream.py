"""Streams for asyncio: a request is prepared on a thread, and may be given up meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

from edge_dflash.errors import RequestError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.stream import PlanStream, Ticket, another

T = TypeVar("T")
Unwanted: TypeAlias = Callable[[], bool]
"""Whether who asks has gone, asked while a request is prepared."""


class AsyncPlanStream(AsyncIterator[Increment]):
    """:class:`PlanStream` for asyncio: nothing here blocks the loop. The request begins with the first ``await``.

    Cancelling the task that waits cancels the request.
    """

    def __init__(self, begin: Callable[[], PlanStream]) -> None:
        """``begin`` prepares and queues the request, on another thread. Made by Planner.astream."""
        self._begin = begin
        self._stream: PlanStream | None = None
        self._increments: AsyncIterator[Increment] | None = None
        self._cancelled = False

    async def __anext__(self) -> Increment:
        if self._increments is None:
            stream = await self._started()
            read = stream._job.reader()
            self._increments = (read(given) async for given in each(stream._ticket))
        return await anext(self._increments)

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
        return await finished((await self._started())._ticket)

    @property
    def plan(self) -> Plan:
        """The finished plan. Raises RequestError when the request has not ended."""
        if self._stream is None or not self._stream._ticket.done:
            raise RequestError("the stream was not read to its end, so there is no plan yet; await result()")
        return self._stream.plan

    async def _started(self) -> PlanStream:
        if self._stream is None:
            try:
                return await asyncio.to_thread(self._begin)  # which attaches it
            except asyncio.CancelledError:
                self._cancelled = True
                raise
        return self._stream


async def each(ticket: Ticket[T]) -> AsyncIterator[T]:
    """Increments of a ticket, as a loop over it gives them."""
    seen = 0
    while True:
        await _wait_beyond(ticket, seen)
        new = ticket.increments[seen:]
        for increment in new:
            yield increment
        seen += len(new)
        if not new:
            ticket.outcome()
            return


async def finished(ticket: Ticket[Any]) -> Plan:
    """``ticket.result()``, awaited."""
    await _wait_beyond(ticket, None)
    return ticket.outcome()


async def _wait_beyond(ticket: Ticket[Any], seen: int | None) -> None:
    """Wait in the running loop for more than ``seen`` increments (None: however many) or the end.

    Nothing here blocks the loop, and cancelling a task that waits cancels the request.
    """
    ticket.refuse_own_thread()
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        if ticket.beyond(seen):
            loop.call_soon_threadsafe(event.set)

    with ticket.changed:
        if ticket.beyond(seen):
            return
        ticket.wakers.append(wake)
    try:
        await event.wait()
    except asyncio.CancelledError:
        ticket.cancel()
        raise
    finally:
        with ticket.changed:
            ticket.wakers.remove(wake)


def apart(begin: Callable[[Unwanted], Sequence[PlanStream]], count: int) -> tuple[AsyncPlanStream, ...]:
    """Streams for asyncio that begin together, on a thread, with the first ``await`` of one of them."""
    shared = _Shared(begin)
    shared.streams = tuple(AsyncPlanStream(partial(shared.take, index)) for index in range(count))
    return shared.streams


class _Shared:
    """One call that gives each of several streams what it reads."""

    def __init__(self, begin: Callable[[Unwanted], Sequence[PlanStream]]) -> None:
        self.streams: tuple[AsyncPlanStream, ...] = ()
        self._begin, self._lock = begin, threading.Lock()
        self._begun: Sequence[PlanStream] = ()
        self._error: Exception | None = None

    def take(self, index: int) -> PlanStream:
        """The stream of this index; the first call begins all."""
        with self._lock:
            if self._error is not None:
                raise another(self._error)
            if not self._begun:
                try:
                    self._begun = self._begin(lambda: all(stream.cancelled for stream in self.streams))
                except Exception as error:
                    self._error = error
                    raise
                for stream, begun in zip(self.streams, self._begun, strict=True):
                    stream._stream = begun
                    if stream.cancelled:
                        begun.cancel()
            return self._begun[index]
