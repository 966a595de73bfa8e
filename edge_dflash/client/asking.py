"""A request on its way to a server, as a ticket for each answer that it asks for."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from edge_dflash.client.reading import Reading, chunk_of
from edge_dflash.decode.accept import FinishReason
from edge_dflash.errors import EdgeDflashError, ServiceError
from edge_dflash.result import Increment, Plan
from edge_dflash.runner.ticket import Ticket


class Asking:
    """One request on its way: what a stream asks of it (``cancelled``, ``unstarted``)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reading: Reading, ended: Callable[[Plan], None]) -> None:
        self.reading = reading
        self.admitted: Future[None] = Future()
        self.ticket: Ticket[Increment, Plan] = Ticket(asked=lambda ticket: self._cancel())
        self.task: asyncio.Task[None] | None = None
        self.together: Sequence[Asking] = (self,)  # what the same request asks for
        self.reason: FinishReason | None = None  # why it was cut
        self._loop = loop
        self._ended = ended

    @property
    def cancelled(self) -> bool:
        """Whether it was cut; setting it cuts it."""
        return self.reason is not None

    @cancelled.setter
    def cancelled(self, wanted: bool) -> None:
        if wanted:
            self._cancel()

    def reader(self) -> Callable[[Increment], Increment]:
        """The server made the increments."""
        return lambda increment: increment

    def unstarted(self) -> Plan:
        """The plan of a request of which nothing came."""
        return self.reading.plan(self.reason or "cancelled")

    def cut(self, reason: FinishReason) -> None:
        """Stop reading; what came is the plan. Called on the loop."""
        if self.reason is None and not self.ticket.done:
            self.reason = reason
            if any(one.reason is None for one in open_of(self.together)):
                self.give_up()  # the request goes on without it
            elif self.task is not None:
                self.task.cancel()

    def _cancel(self) -> bool:
        if self.ticket.done:
            return False
        try:
            self._loop.call_soon_threadsafe(self.cut, "cancelled")
        except RuntimeError:  # the loop is closed, and so is the request
            return False
        return True

    def admit(self) -> None:
        """The server took it."""
        self.ticket._start()
        self.admitted.set_result(None)

    def settle(self, plan: Plan) -> None:
        """It has ended."""
        self._ended(plan)
        self.ticket._succeed(plan)
        if not self.admitted.done():
            self.admitted.set_result(None)

    def give_up(self) -> None:
        """It was cut: what came is the plan."""
        try:
            plan = self.reading.plan(self.reason or "cancelled")
        except Exception as error:
            self.fail(unreadable(error))
        else:
            self.settle(plan)

    def fail(self, error: EdgeDflashError) -> None:
        """It ended with an error: at the call if the server did not take it, else at the stream."""
        try:
            plan = self.reading.plan("cancelled")
        except Exception:  # what came is what cannot be read
            plan = Reading(self.reading.options, self.reading.began, self.reading.own).plan("cancelled")
        self._ended(plan)
        self.ticket._fail(error)
        if not self.admitted.done():
            self.admitted.set_exception(error)


def unreadable(error: Exception) -> ServiceError:
    """The error of an answer that is none of the API."""
    return ServiceError(f"the server's answer cannot be read ({type(error).__name__}: {error})")


def open_of(askings: Sequence[Asking]) -> list[Asking]:
    """Those that have not ended."""
    return [one for one in askings if not one.ticket.done]


def fail(askings: Sequence[Asking], error: EdgeDflashError) -> None:
    """End all of them with an error, each with another error object."""
    for index, one in enumerate(open_of(askings)):
        one.fail(error if index == 0 else copy.copy(error))


def take(askings: Sequence[Asking], line: bytes) -> bool:
    """Take a line of an event stream; returns whether it is the last one."""
    if not line.startswith(b"data:"):
        return False
    data = line.removeprefix(b"data:").strip()
    if data == b"[DONE]":
        return True
    chunk = chunk_of(data.decode("utf-8", "replace"))
    for one in open_of(askings):
        if (increment := one.reading.add(chunk)) is not None:
            one.ticket._add(increment)
    return False
