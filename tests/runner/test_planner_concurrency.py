"""Many callers, threads and asyncio tasks, one engine: nothing lost, nothing mixed, nobody kept out."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fakes import SHAPE, FakeBackend
from planner_support import Gate, Slow

from calib.demo.evaluate import heldout_tasks
from edge_dflash.errors import QueueFullError, RequestError
from edge_dflash.planner import Planner

PROMPT = (3, 1, 4)
CALLERS = 6


def prompt_of(caller, turn):
    return (caller + 1, turn % 60, 5)


def wanted(caller, turn):
    return Planner(FakeBackend(), None).plan(prompt_of(caller, turn), max_new_tokens=12).tokens


def test_concurrent_callers_get_their_own_plans():
    turns = 12
    truth = {(c, t): wanted(c, t) for c in range(CALLERS) for t in range(turns)}
    planner = Planner(Slow(FakeBackend(), 0.001), None)
    wrong, served = [], []

    def caller(number):
        session = planner.session()
        for turn in range(turns):
            task, options = prompt_of(number, turn), {"max_new_tokens": 12, "caller": f"robot {number}"}
            if turn % 3 == 0:
                stream = planner.stream(task, **options)
                joined = tuple(token for part in stream for token in part.tokens)
                good = joined == stream.plan.tokens == truth[number, turn]
            elif turn % 3 == 1:
                good = planner.plan(task, temperature=0.0, **options).tokens == truth[number, turn]
            else:
                stream = planner.stream(task, **options)
                next(stream)
                stream.cancel()
                good = stream.plan.tokens == truth[number, turn][: len(stream.plan.tokens)]
                if turn == 2:
                    good &= session.plan(task, **options).tokens == truth[number, turn]
            served.append((number, turn))
            if not good:
                wrong.append((number, turn))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert sorted(served) == sorted(truth)


def test_callers_take_turns_and_priorities_go_first():
    gate = Gate()
    planner, order = Planner(gate, None, queue=8), []
    running = planner.stream(PROMPT, max_new_tokens=2)
    assert gate.reached.wait(60)
    asked = [("a", 0), ("a", 0), ("a", 0), ("b", 0), ("c", 5)]
    streams = [planner.stream(PROMPT, max_new_tokens=2, caller=name, priority=rank) for name, rank in asked]
    gate.open.set()
    ends = [
        (stream.plan.timings.queue_seconds + stream._job.request.began, index) for index, stream in enumerate(streams)
    ]
    order = [index for _, index in sorted(ends)]
    assert running.plan.finish_reason == "length"
    assert order == [4, 0, 3, 1, 2]


def test_a_full_queue_is_refused_with_the_limit():
    gate = Gate()
    planner = Planner(gate, None, queue=4)
    first = planner.stream(PROMPT, max_new_tokens=2)
    assert gate.reached.wait(60)
    waiting = [planner.stream(PROMPT, max_new_tokens=2) for _ in range(2)]
    with pytest.raises(QueueFullError, match="the limit for one caller is 2"):
        planner.plan(PROMPT)
    gate.open.set()
    assert {stream.plan.finish_reason for stream in (first, *waiting)} == {"length"}
    assert planner.plan(PROMPT, max_new_tokens=2).finish_reason == "length"


def test_real_plans_do_not_mix(demo_bundle):
    tasks = [task.messages for task in heldout_tasks()[:3]]
    with Planner.open(demo_bundle) as planner:
        alone = [planner.plan(task, max_new_tokens=16) for task in tasks]
        streams = [planner.stream(task, max_new_tokens=16) for task in tasks for _ in range(2)]
        assert [stream.plan.tokens for stream in streams] == [plan.tokens for plan in alone for _ in range(2)]


# asyncio -------------------------------------------------------------------------------------------------------------


def test_async_plans_do_not_block_the_loop():
    planner = Planner(Slow(FakeBackend(right=lambda position: 0), 0.01), None, fallback=False)

    async def work():
        ticks, plans = 0, [asyncio.ensure_future(planner.aplan(PROMPT, max_new_tokens=12)) for _ in range(3)]
        longest, last = 0.0, time.perf_counter()
        while not all(plan.done() for plan in plans):
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last, ticks = max(longest, now - last), now, ticks + 1
        return [plan.result().tokens for plan in plans], ticks

    tokens, ticks = asyncio.run(work())
    assert tokens == [Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=12).tokens] * 3
    assert ticks > 20


def test_async_streams():
    planner = Planner(FakeBackend(), None)
    plan = planner.plan(PROMPT, max_new_tokens=12)

    async def work():
        stream = planner.astream(PROMPT, max_new_tokens=12)
        with pytest.raises(RequestError, match="await result"):
            _ = stream.plan
        tokens = [token async for part in stream for token in part.tokens]
        assert tuple(tokens) == stream.plan.tokens == (await stream.result()).tokens == plan.tokens
        with pytest.raises(RequestError, match="vocabulary"):
            await planner.aplan([1, 64])
        session = planner.session()
        first = await session.aplan(PROMPT, max_new_tokens=3)
        second = [part async for part in session.astream((9,), max_new_tokens=3)]
        assert session.tokens[-1] == second[-1].tokens[-1]
        assert first.tokens == plan.tokens[:3]

    asyncio.run(work())


@pytest.mark.parametrize("how", ["cancel", "aclose", "task", "leave"])
def test_async_cancelling(how):
    gate = Gate(free=2)
    planner = Planner(gate, None, fallback=False)

    async def work():
        async with planner.astream(PROMPT) as stream:
            parts = [await anext(stream), await anext(stream)]
            if how == "cancel":
                stream.cancel()
            elif how == "task":
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            threading.Timer(0.05, gate.open.set).start()
            if how == "aclose":
                await stream.aclose()
            if how != "leave":
                parts += [part async for part in stream]
        return parts, await stream.result()

    parts, plan = asyncio.run(work())
    assert plan.finish_reason == "cancelled"
    assert gate.backend.passes.count("verify") == 2
    assert sum(len(part.tokens) for part in parts) <= len(plan.tokens) == 1 + 2 * SHAPE.block_size


def test_async_deadlines_while_waiting():
    gate = Gate()
    planner = Planner(gate, None)
    running = planner.stream(PROMPT, max_new_tokens=2)
    assert gate.reached.wait(60)

    async def work():
        assert (await planner.aplan(PROMPT, deadline=0.05)).finish_reason == "deadline"
        stream = planner.astream(PROMPT, deadline=0.05)
        assert [part async for part in stream] == []
        assert stream.plan.finish_reason == "deadline"

    asyncio.run(work())
    gate.open.set()
    assert running.plan.finish_reason == "length"
