"""A request for whoever waits for it: its increments as they come, its plan, and the way to cancel it.

Used from any thread and from any asyncio loop, and filled by one thread.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

from edge_dflash.errors import RequestError
from edge_dflash.result import Increment, Plan

T = TypeVar("T")


class Ticket(Generic[T]):
    """What a request gives: its increments, then its plan or its error.

    Every loop over a ticket sees all increments from the first, and ends with the request's error if it has one.
    :mod:`edge_dflash.runner.astream` waits for it in asyncio.
    """

    def __init__(self, name: str = "the request", cancel: Callable[[], object] = lambda: None) -> None:
        """``name`` is how messages call the request; ``cancel`` asks it to end."""
        self.cancel = cancel
        self.thread: threading.Thread | None = None  # that fills it, on which nothing may wait for it
        self.state: Literal["queued", "running", "done", "failed"] = "queued"
        self._name = name
        self.changed = threading.Condition()  # guards the next two
        self._ended = threading.Event()  # who waits for the end is not woken for every increment
        self.increments: list[T] = []
        self.wakers: list[Callable[[], object]] = []  # called at every change
        self._plan: Plan | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, with a plan or with an error."""
        return self._ended.is_set()

    @property
    def here(self) -> bool:
        """Whether this is the thread that fills it."""
        return self.thread is threading.current_thread()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises TimeoutError after ``timeout`` seconds, RequestError on the thread that fills it."""
        self.refuse_own_thread()
        if not self._ended.wait(timeout):
            raise TimeoutError(f"{self._name} is {self.state} after {timeout} s; wait longer, or cancel it")

    def result(self, timeout: float | None = None) -> Plan:
        """Wait for the end and return the plan; raises the request's error, and as :meth:`wait` does."""
        self.wait(timeout)
        return self.outcome()

    def __iter__(self) -> Iterator[T]:
        seen = 0
        while True:
            self.refuse_own_thread()
            with self.changed:
                self.changed.wait_for(partial(self.beyond, seen))
                new = self.increments[seen:]
            yield from new
            seen += len(new)
            if not new:
                self.outcome()
                return

    def refuse_own_thread(self) -> None:
        """Raise RequestError where who waits is who would have to go on."""
        if self.here and not self.done:
            raise RequestError(
                f"{self._name} is waited for on the engine's own thread, as by an observer; wait on another thread"
            )

    def beyond(self, seen: int | None) -> bool:
        """Whether there are more than ``seen`` increments (None: however many), or it has ended."""
        return self.done or (seen is not None and len(self.increments) > seen)

    def outcome(self) -> Plan:
        """The plan of a request that has ended. Raises its error."""
        if self._error is not None:
            raise self._error
        assert self._plan is not None
        return self._plan

    # for who fills it -------------------------------------------------------------------------------------------------

    def add(self, increment: T) -> None:
        """More of it is final."""
        with self.changed:
            self.increments.append(increment)
            self._wake()

    def succeed(self, plan: Plan) -> None:
        """It has ended."""
        self._end("done", plan, None)

    def fail(self, error: BaseException) -> None:
        """An error ended it."""
        self._end("failed", None, error)

    def _end(self, state: Literal["done", "failed"], plan: Plan | None, error: BaseException | None) -> None:
        with self.changed:
            self.state, self._plan, self._error = state, plan, error
            self._ended.set()
            self._wake()

    def _wake(self) -> None:
        self.changed.notify_all()
        for wake in self.wakers:
            try:
                wake()
            except RuntimeError:  # its loop was closed: nobody waits there any more
                continue


class Streamed(Protocol):
    """The request of a stream."""

    cancelled: bool  # set by any thread: end at the next commit
    ticket: Ticket[Any]  # what it gives

    def reader(self) -> Callable[[Any], Increment]:
        """Makes increments of what the ticket gives, in order."""


class PlanStream(Iterator[Increment]):
    """Increments of one request, each given as soon as its tokens are final.

    The engine does not wait for the reader. Joined, the texts and the tokens of the increments are those of the plan.
    Leaving the ``with`` block (or :meth:`close`) before the end cancels the request, and so does dropping the stream.
    """

    def __init__(self, job: Streamed, owner: object) -> None:
        """Read what a job gives; ``owner`` is kept alive meanwhile. Made by Planner.stream."""
        self._job, self._ticket, self._owner = job, job.ticket, owner
        self.increments: Iterator[Increment] | None = None  # made when they are read
        self._closed = False

    def __next__(self) -> Increment:
        if self._closed:
            raise StopIteration
        if self.increments is None:
            self.increments = map(self._job.reader(), self._ticket)
        return next(self.increments)

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
            self._ticket.wait()

    @property
    def plan(self) -> Plan:
        """The whole plan; waits for its end. Raises the request's error if it has one."""
        return self._ticket.result()

    def result(self, timeout: float | None = None) -> Plan:
        """:attr:`plan`, waited for at most ``timeout`` seconds; then TimeoutError, and the request goes on."""
        return self._ticket.result(timeout)


def another(error: BaseException) -> BaseException:
    """An error like this one, for one more request that it ends: threads share no traceback."""
    with suppress(Exception):
        return copy.copy(error)
    return error
