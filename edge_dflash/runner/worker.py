"""One worker thread that owns an engine, and the queue in front of it.

A work is run step by step; its steps are the only places where it can be cancelled. Works run one after another; where
a step made nothing final, what waits with a higher priority runs in between, whole.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar
from weakref import WeakSet

from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Pace
from edge_dflash.decode.drafts import draft_choice
from edge_dflash.decode.loop import Step
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.errors import DeviceLostError, EngineFailedError, QueueFullError, RequestError
from edge_dflash.runner.job import Observer, Unwatched, Work
from edge_dflash.runner.queue import PATIENCE, FairQueue
from edge_dflash.runner.ticket import Ticket

log = logging.getLogger("edge_dflash.runner")
T = TypeVar("T")

QUEUE_LIMIT = 64
_SOON = 1_000_000  # priority of the engine's own small works
_NOTHING = Step((), None)  # of a work that decodes nothing


def shares(limit: int) -> tuple[int, int]:
    """Of a queue of this length, the places that one caller can take, and one account: a half, and three quarters."""
    caller = max(1, limit // 2)
    return caller, max(caller, limit - max(1, limit // 4))


class Worker:
    """Runs works one at a time in a fair order. All methods may be called from any thread.

    Higher priorities go first, callers of one priority take turns, and who waits long enough rises
    (:mod:`edge_dflash.runner.queue`). An error of a work goes to its ticket; the worker goes on. Whatever else goes
    wrong on the worker (an error outside a work, no memory, an exit) ends it: every ticket fails with
    EngineFailedError, and so does every later submission.
    """

    def __init__(
        self,
        *,
        queue_limit: int = QUEUE_LIMIT,
        caller_limit: int | None = None,
        patience: int = PATIENCE,
        observer: Observer | None = None,
    ) -> None:
        """Start the worker.

        At most ``queue_limit`` works wait, of one caller at most ``caller_limit`` (None: its share, and its account's,
        by :func:`shares`), so that none keeps the others out. After being passed over ``patience`` times, a work counts
        as one priority higher. ``observer`` is told of every step.
        """
        self._patience = patience
        caller, account = shares(queue_limit)
        self._queue: FairQueue[Work[Any, Any]] = FairQueue(queue_limit, caller_limit or caller, patience, account)
        self._observer = observer or Unwatched()
        self._changed = threading.Condition()
        self._running: list[Work[Any, Any]] = []  # the last one runs, the others were interrupted
        self._closed = False
        self._failure: BaseException | None = None
        self._tickets: WeakSet[Ticket[Any, Any]] = WeakSet()  # whoever waits for one keeps it
        self._worker = threading.Thread(target=self._work, name="edge-dflash engine", daemon=True)
        self._worker.start()

    @property
    def waiting(self) -> int:
        """Number of works in the queue, the running one not counted."""
        with self._changed:
            return len(self._queue)

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker; None while it works, and when it was closed."""
        return self._failure

    def submit(self, work: Work[Any, Any]) -> None:
        """Queue a work.

        Raises QueueFullError when the queue or the caller's share of it is full and all that waits there is as urgent;
        else the work displaces a less urgent one, whose ticket raises it. RequestError after :meth:`close`,
        EngineFailedError when the worker has failed.
        """
        with self._changed:
            try:
                if self._failure is not None:
                    raise self._failed(self._failure)
                if self._closed:
                    raise RequestError("the engine is closed and takes no more requests; open it again")
                displaced = self._queue.push(work, work.priority, work.caller)
            except BaseException as error:
                work.ticket._fail(error)
                raise
            if displaced is not None:
                displaced.leave()
                displaced.ticket._fail(_displaced(displaced, work.priority))
            work.ticket.asked = self.cancel
            self._tickets.add(work.ticket)
            if work.deadline is not None and (left := work.deadline - time.perf_counter()) < threading.TIMEOUT_MAX:
                work.timer = threading.Timer(max(left, 0.0), work.expire)
                work.timer.daemon = True
                work.timer.start()
            self._changed.notify_all()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more works; run those that wait (``drain``) or cancel all; wait for the worker to end.

        Returns whether the worker has ended within ``timeout`` seconds. May be called again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            known = [] if drain else [*self._queue, *self._running]
        for work in known:
            self.cancel(work.ticket)
        if threading.current_thread() is not self._worker:  # a work may close the engine: it ends after that work
            self._worker.join(timeout)
        return not self._worker.is_alive()

    def cancel(self, ticket: Ticket[Any, Any]) -> bool:
        """Ask a work to end; False when it has ended. See Ticket.cancel."""
        with self._changed:
            works = (*self._queue, *self._running)
            work = next((work for work in works if work.ticket is ticket), None)
            if work is None or ticket.done:
                return False
            if self._queue.remove(work):
                work.leave()
                ticket._give_up()
            else:
                work.cancelled = True
            return True

    def _work(self) -> None:
        try:
            while (work := self._next()) is not None:
                try:
                    step = next(work.steps or self._begin(work))
                    self._observer.step(step or _NOTHING)
                    final = work.take(step)
                except StopIteration as end:
                    self._end(work, end.value)
                except BaseException as error:
                    self._end(work, None, error)
                else:
                    work.interruptible = final is None
                    if final is not None:
                        work.ticket._add(final)
                del work
        except BaseException as error:  # nobody may wait for a worker that is gone
            self._fail_all(error)

    def _next(self) -> Work[Any, Any] | None:
        """The work whose step comes next, once there is one; None when the worker is closed and nothing waits."""
        with self._changed:
            while True:
                running = self._running = [work for work in self._running if not work.ticket.done]
                ending = next((work for work in running[:-1] if work.would_end()), None)
                if ending is None and running and running[-1].interruptible:
                    if urgent := self._start(running[-1].priority + running[-1].passed // self._patience):
                        running[-1].passed += 1  # it rises as one that waits
                        running.append(urgent)
                elif not running:
                    self._changed.wait_for(lambda: len(self._queue) > 0 or self._closed)
                    if (first := self._start(None)) is None:
                        return None
                    running.append(first)
                work = ending or running[-1]
                if not (work.cancelled and work.closes):
                    return work
                self._close(work)

    def _start(self, above: int | None) -> Work[Any, Any] | None:
        """Take the next work of the queue, of a priority ``above`` that if it is given; None: nothing waits."""
        try:
            work = self._queue.pop(above)
        except IndexError:
            return None
        work.leave()
        work.ticket._start()
        return work

    def _begin(self, work: Work[T, Any]) -> Iterator[T | None]:
        self._observer.started()
        work.steps = work.begin()
        return work.steps

    def _close(self, work: Work[Any, Any]) -> None:
        """End a work that was cancelled before its next step."""
        try:
            if isinstance(work.steps, Generator):
                work.steps.close()
        except BaseException as error:
            self._end(work, None, error)
        else:
            if work.steps is not None:
                self._observer.ended()
            work.ticket._give_up()

    def _end(self, work: Work[Any, Any], value: Any, error: BaseException | None = None) -> None:
        """Settle a work whose steps are over. Its error goes to its ticket, or on where no worker survives it."""
        work.steps = None
        try:
            try:
                result = work.end(value, error)
            finally:
                self._observer.ended()
        except BaseException as failed:
            error = error or failed
        if error is None:
            work.ticket._succeed(result)
        elif isinstance(error, MemoryError | DeviceLostError) or not isinstance(error, Exception):
            raise error
        else:
            work.ticket._fail(error)

    def _fail_all(self, error: BaseException) -> None:
        """Close, end what was interrupted, and fail every ticket that has not ended, each with another error object."""
        with self._changed:
            interrupted = [work for work in self._running if work.steps is not None]
            self._failure, self._closed, self._running = error, True, []
            for work in self._queue:
                work.leave()
            self._queue = FairQueue(1, 1)
            waiting = [ticket for ticket in self._tickets if not ticket.done]
        with contextlib.suppress(BaseException):  # there may be no memory for it
            log.critical("the engine's worker failed; %d requests fail with it", len(waiting), exc_info=error)
        for work in interrupted:
            with contextlib.suppress(BaseException):  # it raises what ended it
                self._end(work, None, error)
        for ticket in waiting:
            with contextlib.suppress(BaseException):  # the next one is waited for, too
                ticket._fail(self._failed(error))

    @staticmethod
    def _failed(cause: BaseException) -> EngineFailedError:
        """The error of a request that the worker's failure ends."""
        reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
        failed = EngineFailedError(
            f"the engine failed ({reason}) and takes no more requests; close it and open it again"
        )
        failed.__cause__ = cause
        return failed


def _displaced(work: Work[Any, Any], priority: int) -> QueueFullError:
    return QueueFullError(
        f"this request, of priority {work.priority}, gave its place in the queue to one of priority {priority}; "
        "send it again, or with a higher priority"
    )


class Engine(Worker):
    """The worker that owns a loaded pair: its sessions, its measured pace. Only it touches the backend."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        *,
        queue: int,
        prefix_bytes: int,
        fallback: bool,
        drafts: int | None,
        observer: Observer | None = None,
    ) -> None:
        """Take the backend over; ``fingerprint`` binds its sessions to a bundle.

        ``drafts`` and ``fallback`` as in :meth:`~edge_dflash.planner.Planner.open`.
        """
        self.backend = backend
        self.manager = SessionManager(backend, fingerprint, PrefixStore(prefix_bytes))
        self.pace = Pace(draft_choice(backend.shape.drafts, drafts, measured=fallback))
        super().__init__(queue_limit=queue, observer=observer)

    def run(self, steps: Callable[[], Generator[None, None, T]]) -> T:
        """Run a small work between two requests or two chunks of a prompt, and wait for it."""
        work: Work[None, T] = Work(steps, priority=_SOON, caller=None)
        self.submit(work)
        return work.ticket.result()

    def call(self, function: Callable[[], T]) -> T:
        """:meth:`run` for a function."""

        def steps() -> Generator[None, None, T]:
            yield
            return function()

        return self.run(steps)
