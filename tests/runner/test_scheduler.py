"""The worker with fake jobs: nothing lost, nothing mixed, nobody starved, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from edge_dflash.errors import (
    BackendError,
    DeviceLostError,
    EngineFailedError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
)
from edge_dflash.runner.job import Work
from edge_dflash.runner.worker import Worker

PATIENT = 10.0  # seconds after which a test that hangs fails


class Scheduler(Worker):
    """A worker of jobs that are functions, which return their steps."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def submit(self, job, **options):
        work = Work(job, **options)
        super().submit(work)
        return work.ticket


def count(n, result="done"):
    def job():
        yield from range(n)
        return result

    return job


def drain(ticket, into):
    for increment in ticket:
        into.append(increment)


async def drain_async(ticket, into):
    async for increment in ticket:
        into.append(increment)


class Gate:
    """A job that waits inside its step until it is let go, so that a test can arrange things meanwhile."""

    def __init__(self, steps=3):
        self.steps = steps
        self.inside = threading.Event()
        self.go = threading.Event()
        self.closed = False

    def __call__(self):
        try:
            for step in range(self.steps):
                self.inside.set()
                assert self.go.wait(PATIENT)
                yield step
        finally:
            self.closed = True
        return "gate"

    def hold(self, scheduler, **options):
        """Submit it, and wait until the worker is inside."""
        ticket = scheduler.submit(self, **options)
        assert self.inside.wait(PATIENT)
        return ticket


@pytest.fixture
def scheduler():
    with Scheduler() as s:
        yield s
    assert not s._worker.is_alive()


# order ---------------------------------------------------------------------------------------------------------------


def run_in_order(scheduler, submissions):
    """Queue all (caller, priority) while a gate holds the worker; the order in which they ran."""
    order, gate = [], Gate(1)
    gate.hold(scheduler)

    def job(label):
        def run():
            order.append(label)
            return
            yield

        return run

    tickets = [scheduler.submit(job(s), caller=s[0], priority=s[1]) for s in submissions]
    gate.go.set()
    for ticket in tickets:
        ticket.result(PATIENT)
    return order


def test_higher_priorities_go_first_and_callers_take_turns(scheduler):
    wanted = [("c", 5), ("a", 0), ("b", 0), ("a", 0), ("a", 0), ("a", -1)]
    assert run_in_order(scheduler, [("a", -1), ("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 5)]) == wanted


def test_ten_callers_lose_nothing_mix_nothing_and_none_starves():
    """Ten threads hand in jobs as fast as they can: one floods, one has low priority, eight want one at a time."""
    names = ["flood", "low", *(f"caller {i}" for i in range(8))]
    served, inside, wrong = [], [], []  # who ran; who runs now; what must not be
    waits = {name: [] for name in names}  # jobs that were started between a job's submission and its start
    deepest = 0

    def job(caller, number, handed_in):
        def run():
            wrong.extend(("overlap", other) for other in inside)
            inside.append(caller)
            assert handed_in.wait(PATIENT)
            waits[caller].append(len(served) - handed_in.served)
            served.append(caller)
            for step in range(4):
                time.sleep(0)  # lets the callers run
                yield (caller, number, step)
            inside.clear()
            return (caller, number)

        return run

    def call(caller):
        nonlocal deepest
        jobs, outstanding, priority = (400, 40, 0) if caller == "flood" else (40, 1, -3 if caller == "low" else 0)
        tickets = []
        for number in range(jobs):
            if number >= outstanding:
                tickets[-outstanding].result(PATIENT)
            handed_in = threading.Event()
            tickets.append(scheduler.submit(job(caller, number, handed_in), caller=caller, priority=priority))
            handed_in.served = len(served)
            handed_in.set()
            deepest = max(deepest, scheduler.waiting)
        for number, ticket in enumerate(tickets):
            wanted = [(caller, number, step) for step in range(4)], (caller, number)
            wrong.extend([ticket] * ((list(ticket), ticket.result()) != wanted))

    with Scheduler(caller_limit=40, patience=4) as scheduler:
        threads = [threading.Thread(target=call, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []
    assert {name: served.count(name) for name in names} == dict.fromkeys(names, 40) | {"flood": 400}
    assert deepest >= 30  # first come, first served would make everybody wait for the flood
    assert max(max(waits[name]) for name in names[2:]) <= 20
    assert max(waits["low"]) <= 50


# refusals ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_says_how_to_go_on():
    with Scheduler(queue_limit=4, caller_limit=3) as scheduler:
        gate = Gate(1)
        gate.hold(scheduler)
        tickets = [scheduler.submit(count(1), caller="a") for _ in range(3)]
        with pytest.raises(QueueFullError, match=r"caller 'a' has 3 requests waiting, the limit .* is 3; wait for one"):
            scheduler.submit(count(1), caller="a")
        tickets.append(scheduler.submit(count(1), caller="b"))
        with pytest.raises(QueueFullError, match=r"4 requests are waiting, the limit is 4; send this again when some"):
            scheduler.submit(count(1), caller="c")
        assert scheduler.waiting == 4
        assert tickets[0].cancel()  # makes room at once
        tickets.append(scheduler.submit(count(1), caller="c"))
        gate.go.set()
        assert [ticket.exception(PATIENT) is None for ticket in tickets] == [False, True, True, True, True]


def test_one_callers_flood_leaves_places_and_gives_way_to_what_is_urgent():
    with Scheduler(queue_limit=16) as scheduler:
        gate, floods, refused = Gate(1), [], 0
        gate.hold(scheduler)
        for _ in range(18):
            try:
                floods.append(scheduler.submit(count(1), caller="flood"))
            except QueueFullError:
                refused += 1
        assert (len(floods), refused) == (8, 10)
        own = scheduler.submit(count(1), caller="flood", priority=100)
        with pytest.raises(QueueFullError, match=r"of priority 0, gave its place in the queue to one of .* 100"):
            floods[-1].result(PATIENT)
        others = [scheduler.submit(count(1), caller=f"other {n}") for n in range(8)]
        urgent = scheduler.submit(count(1), caller="robot", priority=100)
        assert isinstance(floods[-2].exception(PATIENT), QueueFullError)  # the flood's, which has most
        assert scheduler.waiting == 16
        gate.go.set()
        assert [ticket.result(PATIENT) for ticket in (own, urgent, *others, *floods[:-2])] == ["done"] * 16


def test_a_closed_scheduler_refuses():
    scheduler = Scheduler()
    assert scheduler.close()
    assert scheduler.close()
    with pytest.raises(RequestError, match="the engine is closed and takes no more requests; open it again"):
        scheduler.submit(count(1))


# cancelling ----------------------------------------------------------------------------------------------------------


def test_a_queued_job_is_cancelled_at_once_and_never_starts(scheduler):
    gate, started = Gate(1), []
    gate.hold(scheduler)
    ticket = scheduler.submit(lambda: started.append(1))
    assert (ticket.state, scheduler.waiting) == ("queued", 1)
    assert ticket.cancel()
    assert (ticket.state, ticket.done, scheduler.waiting) == ("cancelled", True, 0)
    with pytest.raises(RequestCancelledError, match="was cancelled while it was queued"):
        ticket.result()
    with pytest.raises(RequestCancelledError):
        list(ticket)
    assert not ticket.cancel()
    gate.go.set()
    assert scheduler.submit(count(1)).result(PATIENT) == "done"
    assert started == []


def test_what_leaves_the_queue_leaves_no_timer_behind():
    def timers():
        return [one for one in threading.enumerate() if isinstance(one, threading.Timer)]

    with Scheduler(queue_limit=2) as scheduler:
        before, gate, later = timers(), Gate(), time.perf_counter() + 3600
        gate.hold(scheduler)
        cancelled = scheduler.submit(count(1), deadline=later)
        cancelled.cancel()
        displaced = scheduler.submit(count(1), deadline=later)
        urgent = scheduler.submit(count(1), priority=1, deadline=later)
        assert isinstance(displaced.exception(PATIENT), QueueFullError)
        gate.go.set()
        assert urgent.result(PATIENT) == "done"
        for timer in timers():
            timer.join(PATIENT)
        assert timers() == before == []


def test_a_running_job_is_closed_before_its_next_step(scheduler):
    gate = Gate()
    ticket = gate.hold(scheduler)
    assert ticket.cancel()
    assert ticket.cancel()  # already asked
    assert not ticket.done
    gate.go.set()
    with pytest.raises(RequestCancelledError, match="while it was running"):
        ticket.result(PATIENT)
    assert gate.closed
    seen = []
    with pytest.raises(RequestCancelledError):
        drain(ticket, seen)
    assert seen == [0]  # the step that was under way is not lost


def test_a_job_that_looks_at_its_cancelling_ends_by_itself_with_its_result(scheduler):
    inside, go = threading.Event(), threading.Event()

    def job():
        yield "first"
        inside.set()
        assert go.wait(PATIENT)
        yield "second"
        return "cancelled in good order" if work.cancelled else "never told"

    work = Work(job)
    work.closes = False
    Worker.submit(scheduler, work)
    ticket = work.ticket
    assert inside.wait(PATIENT)
    assert ticket.cancel()
    assert ticket.cancel()
    go.set()
    assert ticket.result(PATIENT) == "cancelled in good order"
    assert list(ticket) == ["first", "second"]
    assert (ticket.state, ticket.cancel()) == ("done", False)


def test_cancelling_what_has_ended_changes_nothing(scheduler):
    ticket = scheduler.submit(count(2))
    assert ticket.result(PATIENT) == "done"
    assert not ticket.cancel()
    assert ticket.result() == "done"


# errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RequestError("bad"), BackendError("worse"), ValueError("odd")])
@pytest.mark.parametrize("when", ["at the call", "in a step", "at the close"])
def test_an_error_reaches_its_ticket_and_the_worker_goes_on(scheduler, error, when):
    gate = Gate()

    def job():
        if when == "at the call":
            raise error

        def steps():
            try:
                yield 0
                if when == "in a step":
                    raise error
                yield from gate()
            finally:
                if when == "at the close":
                    raise error

        return steps()

    ticket = scheduler.submit(job)
    if when == "at the close":
        assert gate.inside.wait(PATIENT)
        ticket.cancel()
        gate.go.set()
    with pytest.raises(type(error)) as raised:
        ticket.result(PATIENT)
    assert raised.value is error is ticket.exception()
    assert ticket.state == "failed"
    assert scheduler.submit(count(3)).result(PATIENT) == "done"


def test_increments_before_an_error_are_seen(scheduler):
    def job():
        yield 1
        yield 2
        raise ValueError("then")

    seen = []
    with pytest.raises(ValueError, match="then"):
        drain(scheduler.submit(job), seen)
    assert seen == [1, 2]


def test_a_result_that_is_late_times_out_and_the_request_goes_on(scheduler):
    gate = Gate(1)
    ticket = gate.hold(scheduler, caller="arm")
    for wait in (ticket.result, ticket.exception):
        with pytest.raises(TimeoutError, match=r"the request of 'arm' is running after 0.01 s; wait longer, or cancel"):
            wait(0.01)
    gate.go.set()
    assert ticket.result(PATIENT) == "gate"
    assert ticket.exception() is None


# increments ----------------------------------------------------------------------------------------------------------


def test_increments_come_as_they_are_made(scheduler):
    steps = [threading.Event() for _ in range(3)]

    def job():
        for number, step in enumerate(steps):
            assert step.wait(PATIENT)
            yield number

    ticket = scheduler.submit(job)
    increments = iter(ticket)
    for number, step in enumerate(steps):
        step.set()
        assert next(increments) == number
    assert list(increments) == []
    assert list(ticket) == list(ticket) == [0, 1, 2]
    assert ticket.result() is None


def test_several_threads_see_all_increments(scheduler):
    gate, seen = Gate(50), []
    ticket = gate.hold(scheduler)
    threads = [threading.Thread(target=lambda: seen.append(list(ticket))) for _ in range(4)]
    for thread in threads:
        thread.start()
    gate.go.set()
    for thread in threads:
        thread.join(PATIENT)
    assert seen == [list(range(50))] * 4


# closing -------------------------------------------------------------------------------------------------------------


def test_closing_drains(scheduler):
    gate = Gate(1)
    first = gate.hold(scheduler)
    tickets = [scheduler.submit(count(2)) for _ in range(5)]
    assert not scheduler.close(timeout=0.01)
    gate.go.set()
    assert scheduler.close(timeout=PATIENT)
    assert [ticket.result(0) for ticket in (first, *tickets)] == ["gate"] + ["done"] * 5


def test_closing_without_draining_cancels_all(scheduler):
    gate = Gate()
    tickets = [gate.hold(scheduler), *(scheduler.submit(count(2)) for _ in range(5))]
    assert not scheduler.close(drain=False, timeout=0.01)
    assert [ticket.state for ticket in tickets] == ["running"] + ["cancelled"] * 5
    gate.go.set()
    assert scheduler.close(timeout=PATIENT)
    assert tickets[0].state == "cancelled"


def test_a_job_may_close_its_scheduler():
    scheduler = Scheduler()

    def job():
        scheduler.close()
        yield 1
        return "closed from inside"

    assert scheduler.submit(job).result(PATIENT) == "closed from inside"
    assert scheduler.close(timeout=PATIENT)


def test_a_finished_job_is_not_kept(scheduler):
    class Big:
        pass

    big = Big()
    seen = weakref.ref(big)

    def job(big=big):
        yield 1

    ticket = scheduler.submit(job)
    del job, big
    ticket.result(PATIENT)
    end = time.perf_counter() + PATIENT
    while seen() is not None and time.perf_counter() < end:  # the worker lets go just after the result
        gc.collect()
    assert seen() is None


# asyncio -------------------------------------------------------------------------------------------------------------


def test_await_gives_the_result_without_blocking_the_loop(scheduler):
    gate = Gate(1)

    async def main():
        ticket = scheduler.submit(gate)
        ticks = 0
        waiting = asyncio.ensure_future(ticket)
        while not waiting.done():
            ticks += 1
            await asyncio.sleep(0.001)
            if ticks == 5:
                gate.go.set()
        assert ticks >= 5
        return await ticket  # again, after its end

    assert asyncio.run(main()) == "gate"


def test_async_for_sees_increments_as_they_are_made(scheduler):
    steps = [threading.Event() for _ in range(3)]

    def job():
        for number, step in enumerate(steps):
            assert step.wait(PATIENT)
            yield number

    async def main():
        steps[0].set()
        ticket, seen = scheduler.submit(job), []
        async for increment in ticket:
            seen.append(increment)
            if increment < 2:
                steps[increment + 1].set()
        assert [increment async for increment in ticket] == seen
        return seen

    assert asyncio.run(main()) == [0, 1, 2]


def test_errors_and_cancelling_reach_asyncio(scheduler):
    def bad():
        yield 1
        raise ValueError("bad")

    async def main():
        with pytest.raises(ValueError, match="bad"):
            await scheduler.submit(bad)
        seen = []
        with pytest.raises(ValueError, match="bad"):
            await drain_async(scheduler.submit(bad), seen)
        assert seen == [1]
        gate = Gate()
        ticket = gate.hold(scheduler)
        ticket.cancel()
        gate.go.set()
        with pytest.raises(RequestCancelledError):  # not asyncio.CancelledError: this task was not cancelled
            await ticket

    asyncio.run(main())


@pytest.mark.parametrize("form", ["await", "async for"])
def test_a_cancelled_task_cancels_what_it_waits_for(scheduler, form):
    async def consume(ticket):
        if form == "await":
            return await ticket
        return [increment async for increment in ticket]

    async def main():
        gate = Gate()
        ticket = gate.hold(scheduler)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(consume(ticket), 0.01)
        gate.go.set()
        with pytest.raises(RequestCancelledError):
            await ticket
        spared = Gate(1)
        ticket = spared.hold(scheduler)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ticket), 0.01)
        spared.go.set()
        assert await ticket == "gate"
        assert ticket._wakers == []

    asyncio.run(main())


def test_a_loop_that_was_closed_does_not_disturb_the_worker(scheduler):
    gate = Gate()
    ticket = gate.hold(scheduler)
    loop = asyncio.new_event_loop()
    task = loop.create_task(ticket._finished())
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False
    loop.close()
    gate.go.set()
    assert ticket.result(PATIENT) == "gate"
    assert scheduler.submit(count(1)).result(PATIENT) == "done"


def test_ten_coroutines_share_the_engine(scheduler):
    def job(caller, number):
        def run():
            for step in range(3):
                yield (caller, number, step)
            return (caller, number)

        return run

    async def call(caller):
        for number in range(20):
            ticket = scheduler.submit(job(caller, number), caller=str(caller), priority=number % 3)
            assert [increment async for increment in ticket] == [(caller, number, step) for step in range(3)]
            assert await ticket == (caller, number)

    async def main():
        await asyncio.gather(*(call(caller) for caller in range(10)))

    began = time.perf_counter()
    asyncio.run(main())
    assert time.perf_counter() - began < PATIENT


def test_a_lost_device_ends_the_worker_and_other_errors_of_a_backend_do_not():
    def failing(error):
        def job():
            yield 1
            raise error

        return job

    scheduler = Scheduler()
    with pytest.raises(BackendError, match="no room"):
        scheduler.submit(failing(BackendError("no room"))).result(PATIENT)
    with pytest.raises(EngineFailedError, match="illegal address"):
        scheduler.submit(failing(DeviceLostError("illegal address"))).result(PATIENT)
    with pytest.raises(EngineFailedError, match="illegal address"):
        scheduler.submit(failing(BackendError("no room")))
    assert scheduler.close(timeout=PATIENT)
