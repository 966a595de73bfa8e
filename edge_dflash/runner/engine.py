"""One loaded pair behind one queue: the worker that owns it, its sessions, its measured pace.

Knows jobs, nothing of text or plans. Everything that touches the backend runs on the worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from edge_dflash.decode.backend import Backend
from edge_dflash.decode.controls import Pace
from edge_dflash.decode.loop import Step
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.result import Plan
from edge_dflash.runner.job import Job, Observer, Place, Unwatched
from edge_dflash.runner.prepare import Request
from edge_dflash.runner.ticket import Ticket
from edge_dflash.runner.worker import Scheduler

T = TypeVar("T")
_SOON = 1_000_000  # priority of the engine's own small works
_STEP = Step((), None, 0.0, 0.0)  # of a work
_CLOSE_SECONDS = 10.0  # wait for the worker of a planner that was left without being closed


class Tireless(Pace):
    """A pace that drafts whether it pays or not."""

    @property
    def drafting(self) -> bool:
        """Always."""
        return True


class Engine:
    """A backend, owned by a worker thread."""

    def __init__(
        self,
        backend: Backend,
        fingerprint: str,
        *,
        queue: int,
        prefix_bytes: int,
        fallback: bool,
        observer: Observer | None = None,
    ) -> None:
        """Take the backend over; ``fingerprint`` binds its sessions to a bundle. ``observer`` is told of every step."""
        self.backend = backend
        self.manager = SessionManager(backend, fingerprint, store=PrefixStore(prefix_bytes))
        self.pace = Pace() if fallback else Tireless()
        self._observer = observer or Unwatched()
        self._scheduler = Scheduler(queue_limit=queue)

    @property
    def waiting(self) -> int:
        """Requests in the queue, the running one not counted."""
        return self._scheduler.waiting

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker; None while it works, and when it was closed."""
        return self._scheduler.failure

    def submit(self, request: Request, place: Place) -> tuple[Job, Ticket[Step, Plan]]:
        """Queue a request. Raises QueueFullError, and RequestError after :meth:`close`."""
        job = Job(request, place, self.manager, self.pace, self._observer)
        timer: threading.Timer | None = None

        def cancel() -> None:
            job.cancelled = True

        def run() -> Generator[Step | None, Any, Plan]:
            if timer is not None:
                timer.cancel()
            return job()

        def expire() -> None:
            if ticket.state == "queued":
                job.expired = True
                ticket.cancel()

        def ends() -> bool:
            return request.deadline is not None and time.perf_counter() >= request.deadline

        options = request.options
        if request.deadline is not None:
            left = max(request.deadline - time.perf_counter(), 0.0)
            if left < threading.TIMEOUT_MAX:
                timer = threading.Timer(left, expire)
                timer.daemon = True
        ticket = self._scheduler.submit(
            run, priority=options.priority, caller=options.caller, on_cancel=cancel, ends=ends
        )
        if timer is not None and ticket.state == "queued":
            timer.start()
        return job, ticket

    def call(self, function: Callable[[], T]) -> T:
        """Run a small work on the worker, between two requests or two chunks of a prompt, and wait for it."""

        def steps() -> Generator[None, Any, T]:
            yield
            return function()

        return self.work(steps)

    def work(self, steps: Callable[[], Generator[None, Any, T]]) -> T:
        """:meth:`call` for a work of several steps."""

        def job() -> Generator[None, Any, T]:
            self._observer.started()  # it may hang in the driver as a request may
            try:
                work = steps()
                while True:
                    try:
                        next(work)
                    except StopIteration as end:
                        result: T = end.value
                        return result
                    self._observer.step(_STEP)
                    yield
            finally:
                self._observer.ended()

        return self._scheduler.submit(job, priority=_SOON, caller=None).result()

    def close(self) -> None:
        """Cancel everything, wait for the worker, release the backend. Closing twice does no harm."""
        self._scheduler.close(drain=False)
        self.backend.close()

    def abandon(self) -> None:
        """Cancel everything, for an owner that is gone."""
        self._scheduler.close(drain=False, timeout=_CLOSE_SECONDS)
