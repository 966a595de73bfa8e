"""The engine with fake jobs: nothing lost, nothing mixed, nobody starved, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.loop import Step
from edge_dflash.errors import (
    BackendError,
    DeviceLostError,
    EngineFailedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
)
from edge_dflash.planner import Planner
from edge_dflash.runner.astream import each, finished
from edge_dflash.runner.engine import Engine, round_of
from edge_dflash.runner.job import Job
from edge_dflash.runner.observer import Observer
from edge_dflash.runner.settings import EngineSettings

PATIENT = 10.0  # seconds after which a test that hangs fails
PROMPT = (3, 1, 4)
FATAL = [MemoryError(), SystemExit(3), KeyboardInterrupt(), DeviceLostError("illegal address")]


class Fake(Job):
    """A job whose steps are numbers, from a function that returns them; its plan is all of them."""

    def __init__(self, numbers=lambda: iter(range(1)), priority=0, caller="", deadline=None):
        options = SimpleNamespace(priority=priority, caller=caller)
        request = SimpleNamespace(options=options, deadline=deadline, record=None, ended=None, began=0.0)
        super().__init__(request, SimpleNamespace(open=SimpleNamespace), None)
        self.numbers, self.settled = numbers, []

    def begin(self):
        numbers = self.numbers()

        def steps():
            while not self.would_end() and (number := next(numbers, None)) is not None:
                yield Step((number,), None)
            yield Step((), "cancelled" if self.cancelled else "stop")

        return steps()

    def hurried(self):
        return False

    def settle(self):
        self.steps = None
        self.settled.append(self.ticket.done)

    def plan(self, answer, steps=None):
        return SimpleNamespace(finish_reason=(steps or self._made)[-1].finish_reason, numbers=numbers_of(self._made))


def numbers_of(steps):
    return [number for step in steps for number in step.tokens]


def count(n):
    return lambda: iter(range(n))


class Gate:
    """Numbers that wait inside each step until they are let go, so that a test can arrange things meanwhile."""

    def __init__(self, steps=3, error=None):
        self.steps, self.error = steps, error
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self):
        for number in range(self.steps):
            self.inside.set()
            assert self.go.wait(PATIENT)
            if self.error is not None:
                raise self.error
            yield number


class Running(Engine):
    """An engine, to which jobs are handed in as functions."""

    def __init__(self, queue=64, observer=None):
        super().__init__(FakeBackend(), "", EngineSettings(queue=queue), observer)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()
        assert not self._thread.is_alive()

    def add(self, numbers=lambda: iter(range(1)), **options):
        job = Fake(numbers, **options)
        self.submit(job)
        return job.ticket

    def held(self, steps=1, **options):
        """A gate in which the engine is, and its ticket."""
        gate = Gate(steps, options.pop("error", None))
        ticket = self.add(gate, **options)
        assert gate.inside.wait(PATIENT)
        return gate, ticket


@pytest.fixture
def engine():
    with Running() as made:
        yield made


# order ---------------------------------------------------------------------------------------------------------------


def test_ten_callers_lose_nothing_mix_nothing_and_none_starves():
    """Ten threads hand in jobs as fast as they can: one floods, nine want one at a time."""
    names = ["flood", *(f"caller {i}" for i in range(9))]
    served, inside, wrong = [], [], []  # who ran; who runs now; what must not be
    waits = {name: [] for name in names}  # jobs that were started between a job's submission and its start

    def job(caller, handed_in):
        def numbers():
            wrong.extend(inside)
            inside.append(caller)
            assert handed_in.wait(PATIENT)
            waits[caller].append(len(served) - handed_in.served)
            served.append(caller)
            for step in range(4):
                time.sleep(0)  # lets the callers run
                yield step
            inside.clear()

        return numbers

    def call(caller):
        jobs, outstanding = (400, 40) if caller == "flood" else (40, 1)
        tickets = []
        for number in range(jobs):
            if number >= outstanding:
                tickets[-outstanding].result(PATIENT)
            handed_in = threading.Event()
            tickets.append(engine.add(job(caller, handed_in), caller=caller))
            handed_in.served = len(served)
            handed_in.set()
        wrong.extend(one for one in tickets if numbers_of(one) != [*range(4)] or one.result().numbers != [*range(4)])

    with Running(queue=80) as engine:
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert {name: served.count(name) for name in names} == dict.fromkeys(names, 40) | {"flood": 400}
    assert max(max(waits[name]) for name in names[1:]) <= 20


def jobs(*asked):
    """Running jobs: (priority, whether it is prompting, served)."""
    made = []
    for priority, prompting, served in asked:
        job = Fake(priority=priority)
        job.prompting, job.served = prompting, served
        made.append(job)
    return made


def test_of_several_prompts_the_most_urgent_then_the_one_that_waits_longest():
    new, old, urgent = jobs((0, True, 2.0), (0, True, 1.0), (3, True, 3.0))
    assert round_of([new, old, urgent], 3, prompts=True).first == [urgent]
    assert round_of([new, old], 2, prompts=True).first == [old]
    old.served = 4.0
    assert round_of([new, old], 2, prompts=True).first == [new]


@pytest.mark.parametrize("ends", ["deadline", "cancelled"])
def test_what_waits_for_another_and_would_end_ends_before_anything_else(ends):
    decoding, first, second, preempted = running = jobs((1, False, 0), (0, True, 1.0), (0, True, 2.0), (-1, False, 0))
    assert round_of(running, 3, prompts=True).together == [decoding]
    for job in (second, preempted, decoding):
        job.cancelled = ends == "cancelled"
        job.deadline = time.perf_counter() - 1 if ends == "deadline" else None
    assert round_of(running, 3, prompts=True).first == [second, preempted]  # one that decodes asks before its cycle
    assert round_of([decoding, first], 3, prompts=True).together == [decoding]


def test_a_prompt_waits_for_its_share_and_where_a_deadline_is_near_unless_it_is_more_urgent():
    decoding, newcomer, urgent = jobs((0, False, 0), (0, True, 1.0), (1, True, 1.0))
    assert round_of([decoding, newcomer], 2, prompts=True).first == [newcomer]
    assert round_of([decoding, newcomer], 2, prompts=False).first == []
    assert round_of([decoding, urgent], 2, prompts=False).first == [urgent]
    decoding.hurried = lambda: True
    assert round_of([decoding, newcomer], 2, prompts=True).first == []
    assert round_of([decoding, urgent], 2, prompts=True).first == [urgent]


def test_prompts_have_their_share_of_the_time():
    def owed(share, *turns):
        engine = object.__new__(Engine)
        engine._owed, engine._cycles_per_prompt = 0.0, 1.0 / share - 1.0
        found = []
        for prompt_seconds, cycle_seconds in turns:
            engine._owe(prompt_seconds, cycle_seconds)
            found.append(engine._owed > 0.0)
        return found

    assert owed(0.25, (2.0, 1.0), *[(0.0, 1.0)] * 5, (0.0, 1.5), (0.0, 0.001)) == [True] * 6 + [False] * 2
    assert owed(1.0, (9.0, 0.1)) == [False]
    assert owed(0.5, *[(1.0, 0.01)] * 50, (0.0, 1.0))[-1] is False  # an urgent prompt leaves one step to be made up for


def test_what_is_owed_to_cycles_ends_with_the_last_that_decodes_and_calls_wait_for_what_ends():
    engine = object.__new__(Engine)
    engine.backend = SimpleNamespace(shape=SimpleNamespace(lanes=3))
    engine._calls, engine._called, engine._owed = [], False, 5.0
    decoding, first, second = jobs((0, False, 0), (0, True, 1.0), (0, True, 2.0))
    engine._running = [decoding, first, second]
    assert engine._next_round().first == []
    engine._running = [first, second]
    assert engine._next_round().first == [first]
    engine._running = [decoding, first, second]
    assert engine._next_round().first == [first]
    engine._calls, second.cancelled = ["one"], True
    assert engine._next_round().first == [second]
    engine._running = [decoding, first]
    assert engine._next_round() is None


# refusals and evictions ----------------------------------------------------------------------------------------------


def test_a_closed_engine_refuses():
    engine = Running()
    assert engine.close()
    assert engine.close()
    for ask in (engine.add, lambda: engine.check_room(0, ""), lambda: engine.call(lambda: 1)):
        with pytest.raises(RequestError, match="the engine is closed and takes no more requests; open it again"):
            ask()


# cancelling and deadlines --------------------------------------------------------------------------------------------


def test_what_leaves_the_queue_never_starts_and_leaves_no_timer_behind():
    def timers():
        return [one for one in threading.enumerate() if isinstance(one, threading.Timer)]

    with Running(queue=3) as engine:
        before, (gate, _), later, started = timers(), engine.held(), time.perf_counter() + 3600, []
        cancelled = engine.add(lambda: started.append(1), deadline=later)
        assert (cancelled.state, engine.waiting) == ("queued", 1)
        cancelled.cancel()
        assert (cancelled.result(0).finish_reason, list(cancelled), engine.waiting) == ("cancelled", [], 0)
        late = engine.add(lambda: started.append(2), deadline=time.perf_counter() + 0.05)
        assert late.result(PATIENT).finish_reason == "deadline"
        evicted = engine.add(deadline=later)
        urgent = engine.add(priority=1, deadline=later)
        with pytest.raises(QueueFullError):
            evicted.result(PATIENT)
        gate.go.set()
        assert urgent.result(PATIENT).finish_reason == "stop"
        for timer in timers():
            timer.join(PATIENT)
        assert timers() == before == []
        assert started == []


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RequestError("bad"), BackendError("worse"), ValueError("odd")])
@pytest.mark.parametrize("when", ["at the call", "in a step", "at the end"])
def test_an_error_reaches_its_ticket_and_the_engine_goes_on(engine, error, when):
    def numbers():
        if when == "at the call":
            raise error
        return steps()

    def steps():
        yield 0
        if when == "in a step":
            raise error

    def settle():
        raise error

    job, seen = Fake(numbers), []
    if when == "at the end":
        job.settle = settle
    engine.submit(job)
    with pytest.raises(type(error)) as raised:
        seen.extend(step for step in job.ticket if step.tokens)
    assert raised.value is error
    assert (job.ticket.state, numbers_of(seen)) == ("failed", [] if when == "at the call" else [0])
    assert engine.add(count(3)).result(PATIENT).numbers == [0, 1, 2]


def test_a_result_that_is_late_times_out_and_the_request_goes_on(engine):
    gate, ticket = engine.held(caller="arm")
    with pytest.raises(TimeoutError, match=r"the request of 'arm' is running after 0.01 s; wait longer, or cancel"):
        ticket.result(0.01)
    gate.go.set()
    assert ticket.result(PATIENT).numbers == [0]


def check_that_it_failed(engine, cause):
    assert engine.close(timeout=PATIENT)
    assert engine.close(drain=False, timeout=PATIENT)
    assert f"{type(engine.failure).__name__}: {engine.failure}".removesuffix(": ") == cause
    assert engine.waiting == 0
    for ask in (engine.add, lambda: engine.call(lambda: 1)):
        with pytest.raises(EngineFailedError, match=r"takes no more requests") as raised:
            ask()
        assert raised.value.__cause__ is engine.failure


@pytest.mark.parametrize("error", FATAL)
@pytest.mark.parametrize("where", ["job", "call"])
def test_what_no_engine_survives_fails_all(error, where):
    def call():
        with pytest.raises(EngineFailedError):
            engine.call(fail)

    def fail():
        raise error

    engine = Running()
    gate, running = engine.held(error=error if where == "job" else None)
    waiting = [running, *(engine.add(deadline=time.perf_counter() + 60) for _ in range(3))]
    thread = threading.Thread(target=call)
    thread.start()
    while not engine._calls:
        time.sleep(0.001)
    gate.go.set()
    thread.join(PATIENT)
    errors = []
    for ticket in waiting:
        with pytest.raises(EngineFailedError) as raised:
            ticket.result(PATIENT)
        assert raised.value.__cause__ is error
        errors.append(raised.value)
    assert len(set(map(id, errors))) == 4  # threads share no traceback
    check_that_it_failed(engine, f"{type(error).__name__}: {error}".removesuffix(": "))


@pytest.mark.parametrize("fault", ["queue", "waker"])
def test_a_fault_outside_a_job_fails_all(monkeypatch, fault):
    def broken(**given):
        raise TypeError("cannot compare")

    engine = Running()
    gate, running = engine.held()
    waiting = [engine.add(caller=name) for name in "abc"]
    if fault == "queue":
        monkeypatch.setattr(engine._queue, "pop", broken)
    else:
        running.wakers.append(broken)
        waiting.append(running)
    gate.go.set()
    for ticket in waiting:
        with pytest.raises(
            EngineFailedError, match=r"^the engine failed \(TypeError: .* and takes no more requests; close"
        ):
            ticket.result(PATIENT)
    check_that_it_failed(engine, f"TypeError: {engine.failure}")


class Counting(Observer):
    """Counts who runs."""

    running = 0

    def started(self):
        self.running += 1

    def ended(self):
        self.running -= 1


def test_whoever_watches_and_the_sessions_hear_that_preempted_jobs_ended():
    watching = Counting()
    engine, gate = Running(observer=watching), Gate()
    job = Fake(gate)
    engine.submit(job)
    assert gate.inside.wait(PATIENT)
    bad = Gate(error=MemoryError())
    bad.go.set()
    urgent = engine.add(bad, priority=9)
    gate.go.set()
    for ticket in (job.ticket, urgent):
        with pytest.raises(EngineFailedError):
            ticket.result(PATIENT)
    assert job.settled == [False]  # before who waits hears of it
    engine.close(timeout=PATIENT)
    assert watching.running == 0


# increments, closing, asyncio ----------------------------------------------------------------------------------------


def test_increments_come_as_they_are_made_to_every_thread(engine):
    steps, seen = [threading.Event() for _ in range(3)], []

    def numbers():
        for number, step in enumerate(steps):
            assert step.wait(PATIENT)
            yield number

    ticket = engine.add(numbers)
    threads = [threading.Thread(target=lambda: seen.append(numbers_of(ticket))) for _ in range(4)]
    for thread in threads:
        thread.start()
    increments = iter(ticket)
    for number, step in enumerate(steps):
        step.set()
        assert next(increments).tokens == (number,)
    for thread in threads:
        thread.join(PATIENT)
    assert seen == [[0, 1, 2]] * 4
    assert numbers_of(increments) == []


def test_closing_drains_or_cancels():
    for drain, reasons in ((True, ["stop"] * 6), (False, ["cancelled"] * 6)):
        engine = Running()
        gate, first = engine.held(3)
        tickets = [first, *(engine.add(count(2)) for _ in range(5))]
        assert not engine.close(drain=drain, timeout=0.01)
        assert [ticket.done for ticket in tickets] == [False, *[not drain] * 5]
        gate.go.set()
        assert engine.close(timeout=PATIENT)
        assert [ticket.result(0).finish_reason for ticket in tickets] == reasons


def test_a_call_ends_when_the_engine_is_shut(engine):
    steps, caught = threading.Event(), []

    def endless():
        while True:
            steps.set()
            yield

    def call():
        with pytest.raises(RequestCancelledError, match="closed meanwhile"):
            engine.run(endless)
        caught.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    assert steps.wait(PATIENT)
    assert engine.close(drain=False, timeout=PATIENT)
    thread.join(PATIENT)
    assert caught == [True]


def test_an_error_of_a_call_is_its_own_and_on_the_engines_thread_it_is_refused(engine):
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 / 0)
    with pytest.raises(RequestError, match="call on another thread"):
        engine.call(lambda: engine.call(lambda: 1))
    assert engine.call(lambda: engine.close(drain=True)) is False  # a call may close it: it ends after that
    assert engine.close(timeout=PATIENT)


def test_a_finished_job_is_not_kept(engine):
    job = Fake()
    seen = weakref.ref(job)
    engine.submit(job)
    job.ticket.result(PATIENT)
    del job
    end = time.perf_counter() + PATIENT
    while seen() is not None and time.perf_counter() < end:  # the engine lets go just after the result
        gc.collect()
    assert seen() is None


def test_errors_and_cancelling_reach_asyncio(engine):
    def bad():
        yield 1
        raise ValueError("bad")

    async def main():
        ticket = engine.add(bad)
        with pytest.raises(ValueError, match="bad"):
            async for _ in each(ticket):
                pass
        with pytest.raises(ValueError, match="bad"):
            await finished(ticket)

    async def cancel():
        gate, ticket = engine.held(3)
        with pytest.raises(TimeoutError):  # a cancelled task cancels what it waits for
            await asyncio.wait_for(finished(ticket), 0.01)
        gate.go.set()
        assert (plan := await finished(ticket)).finish_reason == "cancelled"
        assert plan.numbers == [0]
        assert ticket.wakers == []

    for one in (main(), cancel()):
        asyncio.run(one)


def test_a_loop_that_was_closed_does_not_disturb_the_engine(engine):
    gate, ticket = engine.held()
    loop = asyncio.new_event_loop()
    task = loop.create_task(finished(ticket))
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False
    loop.close()
    gate.go.set()
    assert ticket.result(PATIENT).finish_reason == "stop"
    assert engine.add().result(PATIENT).finish_reason == "stop"


# the planner ---------------------------------------------------------------------------------------------------------


class Failing(Delegate):
    """Raises ``error`` when a prompt of seven tokens comes; ``go`` lets it."""

    def __init__(self, error):
        super().__init__(FakeBackend(TEXT_SHAPE))
        self.error, self.inside, self.go = error, threading.Event(), threading.Event()

    def prefill(self, ids, lane=0, sight=None):
        if len(ids) == 7:
            self.inside.set()
            assert self.go.wait(PATIENT)
            raise self.error
        return super().prefill(ids, lane, sight)


def test_a_planner_whose_engine_failed_says_so_to_everybody():
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
        session.fork,
        lambda: planner.backend,
        lambda: asyncio.run(asyncio.wait_for(planner.aplan(PROMPT), PATIENT)),
    ):
        with pytest.raises(EngineFailedError, match=said):
            later()
    assert isinstance(planner.failure, MemoryError)
    assert planner.waiting == 0
    session.close()
    planner.close()
