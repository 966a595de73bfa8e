"""A request that was handed in: its result, its increments as they come, and the way to cancel it.

Used from any thread and from any asyncio loop, and filled by one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from edge_dflash.errors import RequestCancelledError, RequestError

T_co = TypeVar("T_co", covariant=True)
R_co = TypeVar("R_co", covariant=True)

TicketState = Literal["queued", "running", "done", "failed", "cancelled"]


class Ticket(Generic[T_co, R_co]):
    """The handle of one request, filled by a worker.

    Blocking: :meth:`result`, ``for increment in ticket``. In asyncio: ``await ticket``, ``async for increment in
    ticket``; neither blocks the loop. Every loop over a ticket sees all increments from the first, and ends with the
    request's error if it has one. Cancelling a task that waits for a ticket cancels the ticket, as it does with tasks;
    ``asyncio.shield(ticket)`` prevents that.
    """

    def __init__(self, name: str = "the request", asked: Callable[[Ticket[Any, Any]], bool] | None = None) -> None:
        """``name`` is how messages call the request; ``asked`` is asked to cancel it, None while nobody has it."""
        self.asked = asked
        self.filled_by: threading.Thread | None = None
        self._name = name
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._ended = threading.Condition(lock)  # who waits for the end is not woken for every increment
        self.state: TicketState = "queued"  # where the request stands
        self._increments: list[T_co] = []
        self._result: R_co | None = None
        self._error: BaseException | None = None
        self._wakers: list[Callable[[], object]] = []

    @property
    def done(self) -> bool:
        """Whether it has ended: with a result, with an error, or cancelled."""
        return self.state not in ("queued", "running")

    def cancel(self) -> bool:
        """Ask the request to end: at once when it is queued, at the next commit when it runs. False: it had ended."""
        return self.asked is not None and self.asked(self)

    def result(self, timeout: float | None = None) -> R_co:
        """Wait for the end and return the result.

        Raises the request's error, RequestCancelledError when it was cancelled, TimeoutError after ``timeout``
        seconds (the request goes on), RequestError on the thread that runs it.
        """
        self.exception(timeout)
        return self._outcome()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the error that :meth:`result` would raise, or None."""
        self._refuse_own_thread()
        with self._ended:
            if not self._ended.wait_for(lambda: self.done, timeout):
                raise TimeoutError(f"{self._name} is {self.state} after {timeout} s; wait longer, or cancel it")
        return self._error

    def __iter__(self) -> Iterator[T_co]:
        seen = 0
        while True:
            self._refuse_own_thread()
            with self._changed:
                self._changed.wait_for(partial(self._beyond, seen))
                new = self._increments[seen:]
            yield from new
            seen += len(new)
            if not new:
                self._outcome()
                return

    def __await__(self) -> Generator[Any, None, R_co]:
        return self._finished().__await__()

    async def __aiter__(self) -> AsyncIterator[T_co]:
        seen = 0
        while True:
            await self._wait_beyond(seen)
            new = self._increments[seen:]
            for increment in new:
                yield increment
            seen += len(new)
            if not new:
                self._outcome()
                return

    @property
    def here(self) -> bool:
        """Whether this is the thread that fills it, on which nothing may wait for it."""
        return self.filled_by is threading.current_thread()

    def _refuse_own_thread(self) -> None:
        """Raise RequestError where who waits is who would have to go on."""
        if self.here and not self.done:
            raise RequestError(
                f"{self._name} is waited for on the engine's own thread, as by an observer; wait on another thread"
            )

    async def _finished(self) -> R_co:
        await self._wait_beyond(None)
        return self._outcome()

    async def _wait_beyond(self, seen: int | None) -> None:
        """Wait in the running loop for more than ``seen`` increments (None: however many) or the end."""
        self._refuse_own_thread()
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if self._beyond(seen):
                loop.call_soon_threadsafe(event.set)

        with self._changed:
            if self._beyond(seen):
                return
            self._wakers.append(wake)
        try:
            await event.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def _beyond(self, seen: int | None) -> bool:
        return self.done or (seen is not None and len(self._increments) > seen)

    def _outcome(self) -> R_co:
        """The result of a request that has ended, or its error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # R_co may itself be None

    # for the worker ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._change("running")

    def _add(self, increment: Any) -> None:
        with self._changed:
            self._increments.append(increment)
        self._change("running")

    def _succeed(self, result: Any) -> None:
        self._result = result
        self._change("done")

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._change("failed")

    def _give_up(self) -> None:
        self._error = RequestCancelledError(f"{self._name} was cancelled while it was {self.state}; send it again")
        self._change("cancelled")

    def _change(self, state: TicketState) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()
            if self.done:
                self._ended.notify_all()
            for wake in self._wakers:
                try:
                    wake()
                except RuntimeError:  # its loop was closed: nobody waits there any more
                    continue
