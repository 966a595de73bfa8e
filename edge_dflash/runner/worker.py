"""One worker thread that owns an engine, and the queue in front of it.

A work is run step by step; its steps are the only places where it can be cancelled. At most as many works as there are
lanes run at a time, turn by turn: in a turn one step of a prompt, and one cycle of all that decode, together. Where a
more urgent work waits for a lane, the least urgent one is set aside, between two steps, until the other has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

from edge_dflash.decode.backend import Asked, Backend, Cycle, Outcome
from edge_dflash.decode.loop import Step, given
from edge_dflash.errors import DeviceLostError, RequestError
from edge_dflash.runner.failures import another, displaced, engine_failed
from edge_dflash.runner.job import Ending, Observer, Work
from edge_dflash.runner.queue import PATIENCE, FairQueue, shares
from edge_dflash.runner.ticket import Ticket
from edge_dflash.runner.turns import Share, Turn, active_of, turn_of

log = logging.getLogger("edge_dflash.runner")

QUEUE_LIMIT = 64
_NOTHING = Step((), None)  # of a work that decodes nothing


class Worker:
    """Runs works in a fair order. All methods may be called from any thread.

    Higher priorities go first, callers of one priority take turns, and who waits long enough rises
    (:mod:`edge_dflash.runner.queue`). An error of a work goes to its ticket; the worker goes on. Whatever else goes
    wrong on the worker (an error outside a work, no memory, an exit) ends it: every ticket fails with
    EngineFailedError, and so does every later submission.
    """

    backend: Backend  # runs the cycles that works ask for

    def __init__(
        self,
        *,
        queue_limit: int = QUEUE_LIMIT,
        caller_limit: int | None = None,
        patience: int = PATIENCE,
        observer: Observer | None = None,
        lanes: int = 1,
        share: float = 1.0,
    ) -> None:
        """Start the worker.

        ``lanes`` works run at a time. While some of them decode, the prompts of others have at most ``share`` of the
        time, and at most one step between two cycles.

        At most ``queue_limit`` works wait, of one caller at most ``caller_limit`` (None: its share, and its account's,
        by :func:`shares`), so that none keeps the others out. After being passed over ``patience`` times, a work counts
        as one priority higher. ``observer`` is told of every step.
        """
        self._patience = patience
        caller, account = shares(queue_limit)
        self._queue: FairQueue[Work[Any, Any]] = FairQueue(queue_limit, caller_limit or caller, patience, account)
        self._observer, self._told_error = observer, False
        self._changed = threading.Condition()
        self._lanes, self._share = lanes, Share(share)
        self._running: list[Work[Any, Any]] = []  # begun in this order; more than there are lanes: some are set aside
        self._own = False  # whether the last turn was of a work of the engine itself
        self._closed = False
        self._failure: BaseException | None = None
        self._tickets: WeakSet[Ticket[Any, Any]] = WeakSet()  # whoever waits for one keeps it
        self._last: Callable[[], None] | None = None  # what its thread does in the end
        self._worker = threading.Thread(target=self._work, name="edge-dflash engine", daemon=True)
        self._worker.start()

    @property
    def waiting(self) -> int:
        """Number of works in the queue, the running ones not counted."""
        with self._changed:
            return len(self._queue)

    @property
    def failure(self) -> BaseException | None:
        """What ended the worker; None while it works, and when it was closed."""
        return self._failure

    def check_room(self, priority: int, caller: str | None) -> None:
        """Raise what :meth:`submit` would raise now, before a work is made that takes time and memory."""
        with self._changed:
            self._check_open()
            self._queue.check(priority, caller)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise engine_failed(self._failure)
        if self._closed:
            raise RequestError("the engine is closed and takes no more requests; open it again")

    def submit(self, work: Work[Any, Any]) -> None:
        """Queue a work.

        Raises QueueFullError when the queue or the caller's share of it is full and all that waits there is as urgent;
        else the work displaces a less urgent one, whose ticket raises it. RequestError after :meth:`close`,
        EngineFailedError when the worker has failed.
        """
        with self._changed:
            try:
                self._check_open()
                gave_way = self._queue.push(work, work.priority, work.caller)
            except BaseException as error:
                work.fail(error)
                raise
            if gave_way is not None:
                gave_way.leave()
                gave_way.fail(displaced(gave_way.priority, work.priority))
            for ticket in work.tickets:
                ticket.asked, ticket.filled_by = self.cancel, self._worker
                self._tickets.add(ticket)
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
        for ticket in [ticket for work in known for ticket in work.tickets]:
            self.cancel(ticket)
        if not self.here:  # a work may close the engine: it ends after that work
            self._worker.join(timeout)
        return not self._worker.is_alive()

    def shut(self, let_go: Callable[[], None]) -> None:
        """Cancel all, then let go of what the works use: called on the worker's own thread, after its last step."""
        self.close(drain=False)
        if self.here:
            self._last = let_go
        else:
            let_go()

    @property
    def here(self) -> bool:
        """Whether this is the worker's own thread, on which nothing may wait for a work."""
        return threading.current_thread() is self._worker

    def cancel(self, ticket: Ticket[Any, Any]) -> bool:
        """Ask a work to end; False when it has ended. See Ticket.cancel."""
        with self._changed:
            works = (*self._queue, *self._running)
            work = next((work for work in works if ticket in work.tickets), None)
            if work is None or ticket.done:
                return False
            if ticket is not work.ticket and work.goes_on_without(ticket):
                return True
            if self._queue.remove(work):
                work.leave()
                work.give_up()
            else:
                work.cancelled = True
            return True

    def _work(self) -> None:
        """Turn by turn, a step of each work; those that ask for a cycle have it together."""
        try:
            while (turn := self._next()) is not None:
                began, waiting = time.perf_counter(), list[tuple[Work[Any, Any], Asked]]()
                self._loaded(len(turn.together))
                for work in turn.works:
                    step = final = None
                    with Ending(partial(self._end, work)):
                        step = next(work.steps or self._begin(work))
                        final = self._final(work, step)
                    work.served = time.perf_counter()
                    if isinstance(step, Asked):
                        waiting.append((work, step))
                    elif final is not None:
                        work.ticket._add(final)
                    if work.over and work.steps is not None:  # now, not behind the cycle of the others
                        with Ending(partial(self._end, work)):
                            next(work.steps)
                if waiting:
                    prompted, asked = time.perf_counter(), [one for _, one in waiting]
                    outcomes: Sequence[Outcome]
                    try:
                        outcomes = self.backend.cycles(asked)
                    except BaseException as error:  # it ends the cycles of all: each has another error object
                        outcomes = [error, *(another(error) for _ in asked[1:])]
                    self._commit(waiting, outcomes)
                    self._share.took(prompted - began if turn.first else 0.0, time.perf_counter() - prompted)
                # nothing is held while it waits
                turn = work = waiting = asked = outcomes = step = final = None  # type: ignore[assignment]
        except BaseException as error:  # nobody may wait for a worker that is gone
            self._fail_all(error)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        try:
            if self._last is not None:
                self._last()
        except Exception:
            log.exception("the engine was closed on its own thread, and could not let go of its backend")

    def _commit(self, waiting: Sequence[tuple[Work[Any, Any], Asked]], outcomes: Sequence[Outcome]) -> None:
        """Give each work what became of the cycle that it asked for."""
        self._tell("passed", len(waiting), sum(one.drafts + 1 for one in outcomes if isinstance(one, Cycle)))
        for (work, _), outcome in zip(waiting, outcomes, strict=True):
            final = None
            with Ending(partial(self._end, work)):
                assert isinstance(work.steps, Generator)
                final = self._final(work, given(work.steps, outcome))
            if final is not None:
                work.ticket._add(final)

    def _final(self, work: Work[Any, Any], step: Any) -> Any:
        """What a step made final; None for one that asks for a cycle."""
        if isinstance(step, Asked):
            return None
        self._tell("step", step or _NOTHING)
        final = work.take(step)
        work.interruptible = final is None or not work.alone
        return final

    def _tell(self, name: str, *what: object) -> None:
        """Call the observer, if there is one. Whatever it raises ends nothing: the first time it is logged."""
        try:
            if self._observer is not None:
                getattr(self._observer, name)(*what)
        except BaseException:
            if not self._told_error:
                log.exception("an observer raised; requests go on, and it is told once")
            self._told_error = True

    def _loaded(self, lanes: int) -> None:
        """So many works decode in this turn."""

    def _next(self) -> Turn | None:
        """What comes next, once there is something; None when the worker is closed and nothing waits."""
        with self._changed:
            while True:
                self._running = [one for work in self._running for one in work.left()]
                if not self._running:
                    self._changed.wait_for(lambda: len(self._queue) > 0 or self._closed)
                    if not len(self._queue):
                        return None
                self._admit()
                turn = turn_of(self._due(), self._lanes, self._patience, self._share)
                if not (given_up := [work for work in turn.works if work.cancelled and work.closes]):
                    self._own = any(work.caller is None for work in turn.works)
                    return turn
                for work in given_up:
                    self._close(work)

    def _due(self) -> Sequence[Work[Any, Any]]:
        """Whose turn it may be: behind a work of the engine itself that of others, before its next one begins."""
        others = [work for work in self._running if work.caller is not None or work.steps is not None]
        return others if self._own and others else self._running

    def _admit(self) -> None:
        """Start what waits, on free lanes and in the place of what is less urgent."""
        while len(self._queue):
            active = active_of(self._running, self._lanes, self._patience)
            weakest = None
            if len(active) == self._lanes and (weakest := active[-1]) and not weakest.interruptible:
                return
            if (started := self._start(weakest.rank(self._patience) if weakest else None)) is None:
                return
            self._running.append(started)
            if weakest and started.caller is not None:  # the engine's own works are short
                weakest.passed += 1  # it rises as one that waits
                self._tell("aside")

    def _start(self, above: int | None) -> Work[Any, Any] | None:
        """Take the next work of the queue, of a priority ``above`` that if it is given; None: nothing waits."""
        try:
            work = self._queue.pop(above)
        except IndexError:
            return None
        work.leave()
        work.served = time.perf_counter()
        work.ticket._start()
        return work

    def _begin(self, work: Work[Any, Any]) -> Iterator[Any]:
        self._tell("started")
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
                self._tell("ended")
            work.give_up()

    def _end(self, work: Work[Any, Any], value: Any, error: BaseException | None = None) -> None:
        """Settle a work whose steps are over. Its error goes to its ticket, or on where no worker survives it."""
        work.steps = None
        try:
            try:
                result = work.end(value, error)
            finally:
                self._tell("ended")
        except BaseException as failed:
            error = error or failed
        if error is None:
            work.ticket._succeed(result)
        elif isinstance(error, MemoryError | DeviceLostError) or not isinstance(error, Exception):
            raise error
        else:
            work.fail(error)

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
                ticket._fail(engine_failed(error))
