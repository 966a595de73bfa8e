"""A worker that fails: every request fails with it, at once and with the cause, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE

from edge_dflash.decode.delegate import Delegate
from edge_dflash.errors import BackendError, EngineFailedError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner.job import Observer, Work
from edge_dflash.runner.worker import Worker
from tests.runner.test_scheduler import PATIENT, Gate, Scheduler, count

PROMPT = (3, 1, 4)
FATAL = [MemoryError(), SystemExit(3), KeyboardInterrupt()]


def in_the_queue(scheduler, monkeypatch):
    def pop(above=None):
        raise TypeError("cannot compare")

    monkeypatch.setattr(scheduler._queue, "pop", pop)
    return "TypeError: cannot compare"


def in_a_callback(scheduler, monkeypatch):
    def wake():
        raise ValueError("a bad callback")

    next(iter(scheduler._tickets))._wakers.append(wake)
    return "ValueError: a bad callback"


@pytest.mark.parametrize("fault", [in_the_queue, in_a_callback])
def test_a_fault_outside_a_job_fails_all(monkeypatch, fault):
    scheduler, gate = Scheduler(), Gate()
    running = gate.hold(scheduler)
    cause = fault(scheduler, monkeypatch)
    waiting = [scheduler.submit(count(2), caller=name) for name in "abc"]
    gate.go.set()
    if fault is in_the_queue:
        assert running.result(PATIENT) == "gate"
    else:
        waiting.append(running)
    for ticket in waiting:
        with pytest.raises(
            EngineFailedError, match=rf"^the engine failed \({cause}\) and takes no more requests; close"
        ):
            ticket.result(PATIENT)
        assert ticket.state == "failed"
    check_that_it_is_closed(scheduler, cause)


def check_that_it_is_closed(scheduler, cause):
    assert scheduler.close(timeout=PATIENT)
    assert scheduler.close(drain=False, timeout=PATIENT)
    assert f"{type(scheduler.failure).__name__}: {scheduler.failure}".removesuffix(": ") == cause
    assert scheduler.waiting == 0
    with pytest.raises(EngineFailedError, match=r"takes no more requests") as raised:
        scheduler.submit(count(1))
    assert raised.value.__cause__ is scheduler.failure


@pytest.mark.parametrize("error", FATAL)
@pytest.mark.parametrize("when", ["at the call", "in a step", "at the close"])
def test_what_no_worker_survives_fails_all(error, when):
    scheduler, gate = Scheduler(), Gate()

    def job():
        if when == "at the call":
            gate.inside.set()
            assert gate.go.wait(PATIENT)
            raise error

        def steps():
            try:
                yield from gate() if when == "at the close" else [next(iter(gate()))]
                raise error
            finally:
                if when == "at the close":
                    raise error

        return steps()

    running = scheduler.submit(job)
    assert gate.inside.wait(PATIENT)
    waiting = [scheduler.submit(count(2)) for _ in range(3)]
    if when == "at the close":
        running.cancel()
    gate.go.set()
    for ticket in (running, *waiting):
        with pytest.raises(EngineFailedError) as raised:
            ticket.result(PATIENT)
        assert raised.value.__cause__ is error
    assert len({id(ticket.exception()) for ticket in (running, *waiting)}) == 4  # threads share no traceback
    check_that_it_is_closed(scheduler, f"{type(error).__name__}: {error}".removesuffix(": "))


def test_interrupted_jobs_fail_too():
    scheduler, inside, go = Scheduler(), threading.Event(), threading.Event()

    def long():
        inside.set()
        assert go.wait(PATIENT)
        yield None  # here the urgent one runs
        return "never"

    def urgent():
        raise MemoryError
        yield

    interrupted = scheduler.submit(long)
    assert inside.wait(PATIENT)
    other = scheduler.submit(urgent, priority=9)
    go.set()
    for ticket in (interrupted, other):
        with pytest.raises(EngineFailedError):
            ticket.result(PATIENT)


def test_whoever_watches_hears_that_interrupted_jobs_ended():
    class Watching(Observer):
        running = 0

        def started(self):
            self.running += 1

        def ended(self):
            self.running -= 1

    watching, inside, go, told = Watching(), threading.Event(), threading.Event(), []
    scheduler = Scheduler(observer=watching)

    class Long(Work):
        def end(self, value, error):
            told.append((error, self.ticket.done))

    def long():
        inside.set()
        assert go.wait(PATIENT)
        yield None  # here the urgent one runs
        return "never"

    def urgent():
        raise MemoryError
        yield

    interrupted = Long(long)
    Worker.submit(scheduler, interrupted)
    assert inside.wait(PATIENT)
    scheduler.submit(urgent, priority=9)
    go.set()
    with pytest.raises(EngineFailedError):
        interrupted.ticket.result(PATIENT)
    assert told == [(scheduler.failure, False)]  # before who waits hears of it
    assert watching.running == 0


def test_asyncio_hears_of_it():
    scheduler, gate = Scheduler(), Gate()

    def bad():
        yield from gate()
        raise MemoryError

    async def main():
        waiting = [asyncio.ensure_future(scheduler.submit(job)) for job in (bad, count(1))]
        await asyncio.sleep(0.01)
        gate.go.set()
        for one in waiting:
            with pytest.raises(EngineFailedError):
                await asyncio.wait_for(one, PATIENT)

    asyncio.run(main())


def test_a_priority_that_is_no_number_is_refused_by_the_queue():
    with Scheduler() as scheduler:
        for odd in ({"priority": "high"}, {"priority": None}, {"caller": [1]}):
            with pytest.raises(TypeError, match=r"wanted an int|unhashable"):
                scheduler.submit(count(1), **odd)
        assert scheduler.submit(count(1)).result(PATIENT) == "done"


# the planner ---------------------------------------------------------------------------------------------------------


class Failing(Delegate):
    """Raises ``error`` when a prompt of that many tokens comes; ``go`` lets it."""

    def __init__(self, error, tokens=7):
        super().__init__(FakeBackend(TEXT_SHAPE))
        self.error, self.tokens = error, tokens
        self.inside, self.go = threading.Event(), threading.Event()

    def prefill(self, ids, lane=0, sight=None):
        if len(ids) == self.tokens:
            self.inside.set()
            assert self.go.wait(PATIENT)
            raise self.error
        return super().prefill(ids, lane, sight)


def test_a_planner_whose_worker_failed_says_so_to_everybody():
    backend = Failing(MemoryError("no memory"))
    planner = Planner(backend, None)
    session = planner.session()
    session.plan(PROMPT, max_new_tokens=2)
    running = planner.stream([5] * 7)
    assert backend.inside.wait(PATIENT)
    waiting = [planner.stream(PROMPT, deadline=60.0), session.stream(PROMPT), planner.stream(PROMPT)]
    assert planner.failure is None
    backend.go.set()
    said = r"the engine failed \(MemoryError: no memory\) and takes no more requests"
    for stream in (running, *waiting):
        with pytest.raises(EngineFailedError, match=said):
            stream.result(PATIENT)
        with pytest.raises(EngineFailedError, match=said):
            next(stream)
        stream.close()
    for later in (
        lambda: planner.plan(PROMPT),
        lambda: session.plan(PROMPT),
        lambda: session.fork(),
        lambda: planner.backend,
        lambda: asyncio.run(planner.aplan(PROMPT)),
    ):
        with pytest.raises(EngineFailedError, match=said):
            later()
    assert isinstance(planner.failure, MemoryError)
    assert planner.waiting == 0
    session.close()
    planner.close()
    planner.close()
    with pytest.raises(EngineFailedError, match=said):
        planner.plan(PROMPT)


@pytest.mark.parametrize("error", [BackendError("the device is gone"), RequestError("bad"), RuntimeError("a bug")])
def test_an_error_of_one_request_stays_its_own(error):
    backend = Failing(error)
    backend.go.set()
    with Planner(backend, None) as planner:
        failing, other = planner.stream([5] * 7), planner.stream(PROMPT, max_new_tokens=2)
        with pytest.raises(type(error), match=str(error)):
            failing.result(PATIENT)
        assert other.result(PATIENT).finish_reason == "length"
        assert planner.plan(PROMPT, max_new_tokens=2).finish_reason == "length"
        assert planner.failure is None
