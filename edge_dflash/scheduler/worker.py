"""One worker thread that owns an engine, and the queue in front of it.

A job is a function that returns a generator: each ``next`` does one step of work and yields what became final; the
value that the generator returns is the request's result. Jobs run one after another on the worker thread, whole; a
job's steps are the only places where it can be cancelled. Knows nothing of backends, sessions or plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from edge_dflash.errors import RequestError
from edge_dflash.scheduler.queue import PATIENCE, FairQueue
from edge_dflash.scheduler.ticket import Ticket

T = TypeVar("T")
R = TypeVar("R")
Job: TypeAlias = Callable[[], Generator[T, Any, R]]

QUEUE_LIMIT = 64
CALLER_LIMIT = 16


@dataclass(eq=False)
class _Entry:
    job: Job[Any, Any]
    ticket: Ticket[Any, Any]
    tell: Callable[[], object] | None  # how a running job is asked to end; None: the worker closes it between steps
    cancelled: bool = False


class Scheduler:
    """Runs jobs one at a time in a fair order. All methods may be called from any thread.

    Higher priorities go first, callers of one priority take turns, and who waits long enough rises
    (:mod:`edge_dflash.scheduler.queue`). An error of a job goes to its ticket; the worker goes on.
    """

    def __init__(
        self,
        *,
        queue_limit: int = QUEUE_LIMIT,
        caller_limit: int = CALLER_LIMIT,
        patience: int = PATIENCE,
        name: str = "edge-dflash engine",
    ) -> None:
        """Start the worker.

        At most ``queue_limit`` jobs wait, of one caller at most ``caller_limit``, so that no caller can keep the
        others out; after being passed over ``patience`` times, a job counts as one priority higher.
        """
        self._queue: FairQueue[_Entry] = FairQueue(queue_limit, min(queue_limit, caller_limit), patience)
        self._changed = threading.Condition()
        self._running: _Entry | None = None
        self._closed = False
        self._worker = threading.Thread(target=self._work, name=name, daemon=True)
        self._worker.start()

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Number of queued jobs, the running one not counted."""
        with self._changed:
            return len(self._queue)

    def submit(
        self,
        job: Job[T, R],
        *,
        priority: int = 0,
        caller: str = "",
        on_cancel: Callable[[], object] | None = None,
    ) -> Ticket[T, R]:
        """Queue a job; it is called and stepped on the worker thread.

        Cancelling a running job closes its generator before the next step, and the ticket raises
        RequestCancelledError. With ``on_cancel`` (called once, on the canceller's thread) the job is told instead and
        ends by itself with its own result. Raises QueueFullError when the queue or the caller's share of it is full,
        RequestError after :meth:`close`.
        """
        ticket: Ticket[T, R] = Ticket(self._cancel, f"the request of {caller!r}" if caller else "the request")
        with self._changed:
            if self._closed:
                raise RequestError("the engine is closed and takes no more requests; open it again")
            self._queue.push(_Entry(job, ticket, on_cancel), priority, caller)
            self._changed.notify_all()
        return ticket

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more jobs; run those that wait (``drain``) or cancel all; wait for the worker to end.

        Returns whether the worker has ended within ``timeout`` seconds. May be called again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not drain:
            for entry in self._known():
                self._cancel(entry.ticket)
        if threading.current_thread() is not self._worker:  # a job may close the engine: it ends after that job
            self._worker.join(timeout)
        return not self._worker.is_alive()

    def _known(self) -> list[_Entry]:
        with self._changed:
            return [*self._queue, *([self._running] if self._running else [])]

    def _cancel(self, ticket: Ticket[Any, Any]) -> bool:
        with self._changed:
            entry = next((known for known in self._known() if known.ticket is ticket), None)
            if entry is None or ticket.done:
                return False
            if self._queue.remove(entry):
                ticket._give_up()
                return True
            first, entry.cancelled = not entry.cancelled, True
        if first and entry.tell is not None:
            entry.tell()
        return True

    def _work(self) -> None:
        while (entry := self._next()) is not None:
            try:
                self._run(entry)
            except BaseException as error:
                entry.ticket._fail(error)
            with self._changed:
                self._running = None
            del entry

    def _next(self) -> _Entry | None:
        """The next job, once there is one; None when the scheduler is closed and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) > 0 or self._closed)
            self._running = self._queue.pop() if len(self._queue) else None
            if self._running is not None:
                self._running.ticket._start()
            return self._running

    def _run(self, entry: _Entry) -> None:
        """Step through one job."""
        steps = entry.job()
        while True:
            if entry.cancelled and entry.tell is None:
                steps.close()
                entry.ticket._give_up()
                return
            try:
                increment = next(steps)
            except StopIteration as end:
                entry.ticket._succeed(end.value)
                return
            entry.ticket._add(increment)
