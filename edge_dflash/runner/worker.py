"""One worker thread that owns an engine, and the queue in front of it.

A job is a function that returns a generator: each ``next`` does one step of work and yields what became final; the
value that the generator returns is the request's result. Where it yields None nothing did, and the job may be
interrupted: what waits with a higher priority runs there, whole. Else jobs run one after another on the worker thread;
a job's steps are the only places where it can be cancelled. Knows nothing of backends, sessions or plans.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from edge_dflash.errors import DeviceLostError, EngineFailedError, QueueFullError, RequestError
from edge_dflash.runner.queue import PATIENCE, FairQueue
from edge_dflash.runner.ticket import Ticket

log = logging.getLogger("edge_dflash.runner")
T = TypeVar("T")
R = TypeVar("R")
Job: TypeAlias = Callable[[], Generator[T | None, Any, R]]

QUEUE_LIMIT = 64


def shares(limit: int) -> tuple[int, int]:
    """Of a queue of this length, the places that one caller can take, and one account: a half, and three quarters."""
    caller = max(1, limit // 2)
    return caller, max(caller, limit - max(1, limit // 4))


@dataclass(eq=False)
class _Entry:
    job: Job[Any, Any]
    ticket: Ticket[Any, Any]
    tell: Callable[[], object] | None  # how a running job is asked to end; None: the worker closes it between steps
    priority: int
    ends: Callable[[], bool]  # whether an interrupted job would end now, without a pass
    steps: Generator[Any, Any, Any] | None = None  # of a running job
    cancelled: bool = False
    passed: int = 0  # times that it was interrupted


def _displaced(entry: _Entry, priority: int) -> QueueFullError:
    return QueueFullError(
        f"this request, of priority {entry.priority}, gave its place in the queue to one of priority {priority}; "
        "send it again, or with a higher priority"
    )


class Scheduler:
    """Runs jobs one at a time in a fair order. All methods may be called from any thread.

    Higher priorities go first, callers of one priority take turns, and who waits long enough rises
    (:mod:`edge_dflash.runner.queue`). An error of a job goes to its ticket; the worker goes on. Whatever else goes
    wrong on the worker (an error outside a job, no memory, an exit) ends it: every ticket fails with EngineFailedError,
    and so does every later submission.
    """

    def __init__(
        self,
        *,
        queue_limit: int = QUEUE_LIMIT,
        caller_limit: int | None = None,
        patience: int = PATIENCE,
        name: str = "edge-dflash engine",
    ) -> None:
        """Start the worker.

        At most ``queue_limit`` jobs wait, of one caller at most ``caller_limit`` (None: its share, and its account's,
        by :func:`shares`), so that none keeps the others out. After being passed over ``patience`` times, a job counts
        as one priority higher.
        """
        self._patience = patience
        caller, account = shares(queue_limit)
        self._queue: FairQueue[_Entry] = FairQueue(queue_limit, caller_limit or caller, patience, account)
        self._changed = threading.Condition()
        self._running: list[_Entry] = []  # the last one runs, the others were interrupted
        self._closed = False
        self._failure: BaseException | None = None
        self._tickets: WeakSet[Ticket[Any, Any]] = WeakSet()  # whoever waits for one keeps it
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

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker; None while it works, and when it was closed."""
        return self._failure

    def submit(
        self,
        job: Job[T, R],
        *,
        priority: int = 0,
        caller: str | None = "",
        on_cancel: Callable[[], object] | None = None,
        ends: Callable[[], bool] = lambda: False,
    ) -> Ticket[T, R]:
        """Queue a job; it is called and stepped on the worker thread.

        Cancelling a running job closes its generator before the next step, and the ticket raises
        RequestCancelledError. With ``on_cancel`` (called once, on the canceller's thread) the job is told instead and
        ends by itself with its own result. ``ends`` is asked while the job is interrupted: True lets it end,
        which must take no pass (it was cancelled, or its time is over). A job of the engine itself has no ``caller``
        and takes no place in the queue.

        Raises QueueFullError when the queue or the caller's share of it is full and all that waits there is as urgent;
        else the job displaces a less urgent one, whose ticket raises it. RequestError after :meth:`close`,
        EngineFailedError when the worker has failed.
        """
        ticket: Ticket[T, R] = Ticket(self._cancel, f"the request of {caller!r}" if caller else "the request")
        with self._changed:
            if self._failure is not None:
                raise self._failed(self._failure)
            if self._closed:
                raise RequestError("the engine is closed and takes no more requests; open it again")
            displaced = self._queue.push(_Entry(job, ticket, on_cancel, priority, ends), priority, caller)
            if displaced is not None:
                displaced.ticket._fail(_displaced(displaced, priority))
            self._tickets.add(ticket)
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
            return [*self._queue, *self._running]

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
        try:
            while (entry := self._next()) is not None:
                self._run(entry)
                del entry
        except BaseException as error:  # nobody may wait for a worker that is gone
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Close, and fail every ticket that has not ended, each with an error of its own."""
        with self._changed:
            self._failure, self._closed, self._running = error, True, []
            self._queue = FairQueue(1, 1)
            waiting = [ticket for ticket in self._tickets if not ticket.done]
        with contextlib.suppress(BaseException):  # there may be no memory for it
            log.critical("the engine's worker failed; %d requests fail with it", len(waiting), exc_info=error)
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

    def _next(self) -> _Entry | None:
        """The next job, once there is one; None when the scheduler is closed and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) > 0 or self._closed)
            return self._start(None) if len(self._queue) else None

    def _start(self, above: int | None) -> _Entry | None:
        """Take the next job of the queue, of a priority ``above`` that if it is given; None when there is none."""
        with self._changed:
            try:
                entry = self._queue.pop(above)
            except IndexError:
                return None
            self._running.append(entry)
            entry.ticket._start()
            return entry

    def _run(self, entry: _Entry) -> None:
        """Step through one job, and through more urgent ones where it may be interrupted."""
        while not entry.ticket.done:
            interruptible = self._step(entry)
            for other in self._running[:-1]:
                while not other.ticket.done and (other.cancelled or other.ends()):
                    self._step(other)
            while interruptible and not entry.ticket.done:
                if (urgent := self._start(entry.priority + entry.passed // self._patience)) is None:
                    break
                entry.passed += 1  # it rises as one that waits
                self._run(urgent)
        with self._changed:
            self._running.remove(entry)

    def _step(self, entry: _Entry) -> bool:
        """One step of a job; whether it may be interrupted behind it. Its error goes to its ticket."""
        try:
            if entry.cancelled and entry.tell is None:
                if entry.steps is not None:
                    entry.steps.close()
                entry.ticket._give_up()
                return False
            entry.steps = entry.steps or entry.job()
            increment = next(entry.steps)
        except StopIteration as end:
            entry.ticket._succeed(end.value)
        except (MemoryError, DeviceLostError):
            raise  # the worker's end, like all that is no Exception
        except Exception as error:
            entry.ticket._fail(error)
        else:
            if increment is None:
                return True
            entry.ticket._add(increment)
        return False
