"""The engine: one thread that owns a loaded pair, its lanes, and the queue in front of them.

A request runs step by step; between two steps it can be cancelled, end at its deadline, or be preempted. At most as
many run at a time as there are lanes, round by round: a round is one step of a prompt, and one cycle of all that
decode, together. Where a more urgent request waits for a lane, the least urgent one is preempted, between two steps,
and resumes when the other has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome
from edge_dflash.decode.controls import Pace
from edge_dflash.decode.drafts import draft_choice
from edge_dflash.decode.loop import NO_TOKENS, Step, resume
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.errors import EngineFailedError, QueueFullError, RequestError
from edge_dflash.runner.calls import EngineCall, is_fatal
from edge_dflash.runner.job import Job
from edge_dflash.runner.observer import Observer
from edge_dflash.runner.queue import Queue
from edge_dflash.runner.settings import EngineSettings
from edge_dflash.runner.stream import another

T = TypeVar("T")

log = logging.getLogger("edge_dflash.runner")


@dataclass(frozen=True)
class Round:
    """Jobs that do a step one by one, then those whose cycle is one pass."""

    first: Sequence[Job]
    together: Sequence[Job] = ()
    ending: bool = False  # whether these jobs end without a pass


class Engine:
    """The thread that owns a loaded pair: its sessions, its measured pace. Only it touches the backend.

    All methods may be called from any thread. Higher priorities go first, callers of one priority take turns
    (:mod:`edge_dflash.runner.queue`). An error of a request goes to its ticket; the engine goes on. Whatever else goes
    wrong on its thread (an error outside a request, no memory, a lost device, an exit) ends it: every ticket fails with
    EngineFailedError, and so does every later submission.
    """

    def __init__(
        self, backend: Backend, fingerprint: str, settings: EngineSettings, observer: Observer | None = None
    ) -> None:
        """Take the backend over; ``fingerprint`` binds its sessions to a bundle, ``observer`` is told of every step."""
        self.backend = backend
        self.manager = SessionManager(backend, fingerprint, PrefixStore(settings.prefix_bytes))
        self.pace = Pace(draft_choice(backend.shape.drafts, settings.drafts, measured=settings.fallback))
        self._cycles_per_prompt = 1.0 / settings.prompt_share - 1.0  # seconds of each, while some decode
        self._owed = 0.0  # to cycles, in seconds, before a prompt has its next step
        self._observer, self._told_error = observer, False
        self._changed = threading.Condition()
        self._queue: Queue[Job] = Queue(settings.queue)
        self._running: list[Job] = []  # in the order of their begin; more than there are lanes: some are preempted
        self._calls: deque[EngineCall[Any]] = deque()
        self._called = False  # whether the newest round was the last one of a call
        self._closed = self._cancels = False  # whether it takes no more; whether it drops what is there, too
        self.failure: BaseException | None = None  # what ended it
        self._last: Callable[[], None] | None = None  # what its thread does in the end
        self._thread = threading.Thread(target=self._work, name="edge-dflash engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, the running ones not counted."""
        with self._changed:
            return len(self._queue)

    @property
    def here(self) -> bool:
        """Whether this is the engine's own thread, on which nothing may wait for a request."""
        return threading.current_thread() is self._thread

    def check_room(self, priority: int, caller: str) -> None:
        """Raise what :meth:`submit` would raise now, before a request is prepared that takes time and memory."""
        with self._changed:
            self._check_open()
            self._queue.check(priority, caller)

    def submit(self, job: Job) -> None:
        """Queue a job, its siblings with it in one place.

        Raises QueueFullError when the queue or the caller's share of it is full and all that waits there is as urgent;
        else the job evicts a less urgent one, whose ticket raises it. RequestError after :meth:`close`,
        EngineFailedError when the engine has failed.
        """
        with self._changed:
            try:
                self._check_open()
                if (reason := job.request.ended) is not None:  # while it was prepared
                    for one in job.group:
                        one.end_unstarted(reason)
                    return
                evicted = self._queue.push(job)
            except RequestError as error:
                _fail(job, error)
                raise
            if evicted is not None:
                self._leave(evicted)
                of, to = evicted.priority, job.priority
                why = f"this request, of priority {of}, gave its place in the queue to one of priority {to}; "
                _fail(evicted, QueueFullError(why + "send it again, or with a higher priority"))
            for one in job.group:
                one.ticket.cancel, one.ticket.thread = partial(self.cancel, one), self._thread
            if job.deadline is not None and (left := job.deadline - time.perf_counter()) < threading.TIMEOUT_MAX:
                job.timer = threading.Timer(max(left, 0.0), self._expire, (job,))
                job.timer.daemon = True
                job.timer.start()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """Ask a job to end: at once unless it has a lane for its own answer, else at the next commit."""
        with self._changed:
            job.cancelled = True
            if job.answers or job.ticket.done:
                return
            job.end_unstarted("cancelled")
            for one in self._queue:
                if not one.wanted:
                    self._queue.remove(one)
                    self._leave(one)
                    return

    def call(self, function: Callable[[], T]) -> T:
        """:meth:`run` for a function."""

        def steps() -> Generator[None, None, T]:
            yield
            return function()

        return self.run(steps)

    def run(self, steps: Callable[[], Generator[None, None, T]]) -> T:
        """Run a small work between two rounds of the requests, and wait for it. Takes no place in the queue.

        Raises RequestError on the engine's own thread, RequestCancelledError when the engine is closed meanwhile.
        """
        if self.here:
            raise RequestError("the engine's own thread, as of an observer, cannot wait for it; call on another thread")
        call = EngineCall(steps)
        with self._changed:
            self._check_open()
            self._calls.append(call)
            self._changed.notify_all()
        return call.result()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> bool:
        """Take no more requests; run those that wait (``drain``) or cancel all; wait for the thread to end.

        Returns whether it has ended within ``timeout`` seconds. May be called again, and by an observer: then the
        engine ends after this step.
        """
        with self._changed:
            self._closed, self._cancels = True, self._cancels or not drain
            if not drain:
                for job in [one for first in (*self._queue, *self._running) for one in first.group]:
                    self.cancel(job)
            self._changed.notify_all()
        if not self.here:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def shut(self, let_go: Callable[[], None]) -> None:
        """Cancel all, then let go of what the requests use: called on the engine's own thread, after its last step."""
        self.close(drain=False)
        if self.here:
            self._last = let_go
        else:
            let_go()

    def _check_open(self) -> None:
        if self.failure is not None:
            raise _failed(self.failure)
        if self._closed:
            raise RequestError("the engine is closed and takes no more requests; open it again")

    def _expire(self, job: Job) -> None:
        """End a group whose deadline passes while it waits; one that runs looks at its deadline itself."""
        with self._changed:
            if self._queue.remove(job):
                for one in job.group:
                    if not one.ticket.done:
                        one.end_unstarted("deadline")

    def _leave(self, job: Job) -> None:
        """It waits in the queue no more."""
        if job.timer is not None:
            job.timer.cancel()

    # the engine's thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Round by round, a step of each job; those that ask for a cycle have it together."""
        try:
            while self._wait():
                if (current := self._next_round()) is None:
                    self._step(self._calls[0])
                    continue
                began, asked = time.perf_counter(), dict[Job, Asked]()
                self.pace.load = max(len(current.together), 1)
                for job in (*current.first, *current.together):
                    try:
                        step = next(job.steps or self._begin(job))
                    except StopIteration:  # of the prompt that it shares
                        self._split(job)
                    except BaseException as error:
                        self._end(job, error)
                    else:
                        if isinstance(step, Asked):
                            asked[job] = step
                        else:
                            self._take(job, step)
                if asked:
                    prompted, outcomes = time.perf_counter(), list[Outcome]()
                    try:
                        outcomes += self.backend.cycles(list(asked.values()))
                    except BaseException as error:  # it ends the cycles of all
                        outcomes += [error, *(another(error) for _ in range(len(asked) - 1))]
                    self._deliver(list(asked), outcomes)
                    self._owe(prompted - began if current.first else 0.0, time.perf_counter() - prompted)
                # nothing is held while it waits
                current = job = step = asked = outcomes = None  # type: ignore[assignment]
        except BaseException as error:  # nobody may wait for an engine that is gone
            self._fail_all(error)
        finally:
            self._let_go()

    def _begin(self, job: Job) -> Generator[Any, Any, None]:
        self._tell("started")
        job.steps = job.begin()
        return job.steps

    def _deliver(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> None:
        """Give each job what became of the cycle that it asked for."""
        self._tell("passed", len(jobs), sum(one.drafts + 1 for one in outcomes if isinstance(one, Cycle)))
        for job, outcome in zip(jobs, outcomes, strict=True):
            assert job.steps is not None
            try:
                step = resume(job.steps, outcome)
            except BaseException as error:
                self._end(job, error)
            else:
                assert isinstance(step, Step)
                self._take(job, step)

    def _split(self, job: Job) -> None:
        """The prompt that a job shares is computed: each of its group goes on alone."""
        self._tell("ended")
        with self._changed:
            parted = job.part()
            self._running = [one for each in self._running for one in (parted if each is job else [each])]
            for one in parted:
                self._start(one)

    def _take(self, job: Job, step: Step) -> None:
        """A job has done a step."""
        self._tell("step", step)
        job.take(step)
        if step.finish_reason is not None:
            self._end(job)

    def _end(self, job: Job, error: BaseException | None = None) -> None:
        """Settle a job that has ended. Its error goes to its ticket, or on where no engine survives it."""
        try:
            answer = job.settle()
            plan = None if error is not None else job.plan(answer)
            if plan is not None and job.request.record is not None:
                job.request.record(plan)
        except BaseException as failed:
            error = error or failed
        self._tell("ended")
        if error is None:
            assert plan is not None
            job.ticket.succeed(plan)
        elif is_fatal(error):
            raise error
        else:
            _fail(job, error)

    def _wait(self) -> bool:
        """Give lanes to what waits, once something does; False when the engine is closed and nothing is left."""
        with self._changed:
            self._drop()
            self._changed.wait_for(lambda: self._closed or self._running or self._calls or len(self._queue))
            self._admit()
            return bool(self._running or self._calls)

    def _drop(self) -> None:
        """Forget what nobody waits for any more: jobs that have ended, and all calls when the engine was shut."""
        for job in self._running:
            if not job.wanted and job.steps is not None:  # the shared prompt of candidates that were all cancelled
                job.steps.close()
                self._tell("ended")
        self._running = [job for job in self._running if job.wanted]
        while self._cancels and self._calls:
            self._calls.popleft().drop()

    def _admit(self) -> None:
        """Give lanes to what waits: free ones, and those of what is less urgent."""
        while len(self._queue):
            active = active_of(self._running, self.backend.shape.lanes)
            weakest = active[-1] if len(active) == self.backend.shape.lanes else None
            if (job := self._queue.pop() if weakest is None else self._queue.pop(above=weakest.priority)) is None:
                return
            self._leave(job)
            first, *others = [one for one in job.group if not one.ticket.done]
            first.siblings = others
            self._running.append(first)
            if others:
                first.served = time.perf_counter()
                first.ticket.state = "running"
            else:
                self._start(first)
            if weakest is not None:
                self._tell("aside")

    def _start(self, job: Job) -> None:
        """It has a lane for its own answer."""
        job.answers, job.served = True, time.perf_counter()
        job.ticket.state = "running"

    def _next_round(self) -> Round | None:
        """The next round of the requests; None: a call has a step instead.

        A call that has begun goes on to its end, and between two calls the requests have a round.
        """
        if all(job.prompting for job in self._running):
            self._owed = 0.0
        found = round_of(self._running, self.backend.shape.lanes, prompts=self._owed <= 0.0)
        if found.ending:
            return found
        if self._calls and not (self._called and self._running):
            return None
        self._called = False
        return found

    def _owe(self, prompt_seconds: float, cycle_seconds: float) -> None:
        """Note the seconds of a round with a cycle in it; 0 of a prompt where none had a step.

        An urgent prompt, which asks nobody, leaves no more than its last step to be made up for by others.
        """
        self._owed = max(0.0, self._owed - cycle_seconds, prompt_seconds * self._cycles_per_prompt)

    def _step(self, call: EngineCall[Any]) -> None:
        """Do one step of a call. Its error is its own, unless no engine survives it."""
        if not call.begun:
            self._tell("started")
        if not call.step():
            self._tell("step", NO_TOKENS)
            return
        self._tell("ended")
        self._called = True
        with self._changed:
            self._calls.remove(call)

    def _tell(self, name: str, *what: object) -> None:
        """Call the observer, if there is one. Whatever it raises ends nothing: the first time it is logged."""
        try:
            if self._observer is not None:
                getattr(self._observer, name)(*what)
        except BaseException:
            if not self._told_error:
                log.exception("an observer raised; requests go on, and it is told once")
            self._told_error = True

    def _fail_all(self, error: BaseException) -> None:
        """Close, settle what was interrupted, and fail every ticket that has not ended."""
        with self._changed:
            interrupted, waiting = self._running, list(self._queue)
            self.failure, self._closed, self._running, self._queue = error, True, [], Queue(1)
            calls, self._calls = self._calls, deque()
        left = [one for job in (*interrupted, *waiting) for one in job.group if not one.ticket.done]
        with contextlib.suppress(BaseException):  # there may be no memory for it
            log.critical("the engine's worker failed; %d requests fail with it", len(left) + len(calls), exc_info=error)
        for job in interrupted:
            with contextlib.suppress(BaseException):  # the next one is settled, too
                if job.steps is not None:
                    job.settle()
                    self._tell("ended")
        for job in waiting:
            self._leave(job)
        for one in (*(job.ticket.fail for job in left), *(call.set_exception for call in calls)):
            with contextlib.suppress(BaseException):  # the next one is waited for, too
                one(_failed(error))

    def _let_go(self) -> None:
        try:
            if self._last is not None:
                self._last()
        except Exception:
            log.exception("the engine was closed on its own thread, and could not let go of its backend")


def round_of(running: Sequence[Job], lanes: int, *, prompts: bool) -> Round:
    """The next round of the jobs. What would end without a pass, and decodes nothing now, ends before all else.

    Of several prompts the most urgent one has a step, of equal ones the one that waits longest; one that is more urgent
    than all that decode has all the time it needs. Others wait without ``prompts``, and while a deadline of one that
    decodes is near.
    """
    active = active_of(running, lanes)
    preempted = [job for job in running if job not in active]
    for job in preempted:
        job.rest()
    if ending := [job for job in running if (job.prompting or job in preempted) and job.would_end()]:
        return Round(ending, ending=True)
    prompting = sorted((job for job in active if job.prompting), key=lambda job: (-job.priority, job.served))[:1]
    together = [job for job in active if not job.prompting]
    if not prompts or any(job.hurried() for job in together):
        prompting = [job for job in prompting if all(job.priority > other.priority for other in together)]
    return Round(prompting, together)


def active_of(running: Sequence[Job], lanes: int) -> list[Job]:
    """Those of the jobs, the first begun first, that have the lanes: the most urgent."""
    return sorted(running, key=lambda job: -job.priority)[:lanes]


def _fail(job: Job, error: BaseException) -> None:
    """Fail a job and its siblings, each with another error object."""
    for one in job.group:
        if not one.ticket.done:
            one.ticket.fail(error if one is job else another(error))


def _failed(cause: BaseException) -> EngineFailedError:
    """The error of a request that the engine's failure ends."""
    reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
    failed = EngineFailedError(f"the engine failed ({reason}) and takes no more requests; close it and open it again")
    failed.__cause__ = cause
    return failed
