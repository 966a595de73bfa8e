"""Streams: deadlines are promises, cancelling takes effect within a cycle, both leave what was committed; asyncio."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest
from fakes import SHAPE, FakeBackend
from planner_support import Gate, Slow

from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

PROMPT = (3, 1, 4)
CYCLE = 0.02


def wanted(**options):
    return Planner(FakeBackend(), None).plan(PROMPT, **options).tokens


def held(free=0, **settings):
    """A planner whose passes but the first ones wait for its gate, the gate, and a stream that is inside."""
    gate = Gate(FakeBackend(right=lambda position: 0), free=free)
    planner = Planner(gate, None, fallback=False, **settings)
    stream = planner.stream(PROMPT, max_new_tokens=20)
    assert gate.reached.wait(60)
    return planner, gate, stream


# deadlines -----------------------------------------------------------------------------------------------------------


def test_an_expired_request_never_touches_the_engine():
    for deadline in (0.0, -1.0, -math.inf, 1e-9):
        backend = FakeBackend()
        plan = Planner(backend, None).plan(PROMPT, deadline=deadline)
        assert (plan.finish_reason, plan.tokens, plan.accept_lengths) == ("deadline", (), ())
        assert plan.timings.first_token_seconds == 0.0
        assert plan.prompt_tokens == 3
        assert backend.passes == []


def test_what_was_committed_until_the_deadline_is_the_plan():
    planner = Planner(Slow(FakeBackend(right=lambda position: 0), CYCLE), None, fallback=False)
    whole = planner.plan(PROMPT, max_new_tokens=20)
    assert whole.finish_reason == "length"
    for share in (0.3, 0.6, 0.9):
        plan = planner.plan(PROMPT, max_new_tokens=20, deadline=share * whole.timings.total_seconds)
        assert plan.finish_reason == "deadline"
        assert 0 < len(plan.tokens) < 20
        assert plan.tokens == whole.tokens[: len(plan.tokens)]
        assert plan.timings.total_seconds < share * whole.timings.total_seconds + CYCLE


def test_time_in_the_queue_counts():
    planner, gate, running = held()
    began = time.perf_counter()
    plan = planner.plan(PROMPT, deadline=0.1)  # returns although the engine is not free
    assert 0.09 < time.perf_counter() - began < 50.0  # the gate gives up after 60 s
    assert (plan.finish_reason, plan.tokens) == ("deadline", ())
    assert plan.timings.queue_seconds >= 0.09

    async def ask():
        assert (await planner.aplan(PROMPT, deadline=0.05)).finish_reason == "deadline"
        stream = planner.astream(PROMPT, deadline=0.05)
        assert [part async for part in stream] == []
        return stream.plan

    stream = planner.stream(PROMPT, deadline=0.05)
    assert list(stream) == []
    assert stream.plan.finish_reason == asyncio.run(ask()).finish_reason == "deadline"
    gate.open.set()
    assert running.plan.tokens == wanted(max_new_tokens=20)
    for deadline in (60.0, 1e12, math.inf):  # far ones change nothing
        assert planner.plan(PROMPT, max_new_tokens=9, deadline=deadline).tokens == running.plan.tokens[:9]


# cancelling ----------------------------------------------------------------------------------------------------------


def test_cancelling_takes_effect_within_a_cycle():
    planner, gate, stream = held(free=3)  # prefill and two cycles pass; it is inside the third
    waiting = planner.stream(PROMPT)
    waiting.cancel()
    assert (waiting.plan.finish_reason, waiting.plan.tokens, list(waiting)) == ("cancelled", (), [])  # at once
    threading.Thread(target=stream.cancel).start()
    while not stream._job.cancelled:
        time.sleep(0.001)
    gate.open.set()
    plan = stream.plan
    assert (plan.finish_reason, plan.tokens) == ("cancelled", wanted(max_new_tokens=20)[:4])
    assert gate.backend.passes.count("verify") == 3
    assert gate.backend.passes.count("prefill") == 1
    assert tuple(token for part in stream for token in part.tokens) == plan.tokens
    stream.cancel()
    assert stream.plan is plan


def test_closing_a_stream_waits_until_the_engine_let_go():
    _, gate, stream = held(free=1)
    threading.Timer(0.05, gate.open.set).start()
    stream.close()
    assert stream._ticket.done
    assert list(stream) == []
    stream.close()


# asyncio -------------------------------------------------------------------------------------------------------------


def test_async_streams():
    planner = Planner(FakeBackend(), None)
    plan = planner.plan(PROMPT, max_new_tokens=12)

    async def work():
        stream = planner.astream(PROMPT, max_new_tokens=12)
        with pytest.raises(RequestError, match="await result"):
            _ = stream.plan
        tokens = [token async for part in stream for token in part.tokens]
        assert tuple(tokens) == stream.plan.tokens == (await stream.result()).tokens == plan.tokens
        plans = await asyncio.gather(*(planner.aplan(PROMPT, max_new_tokens=12) for _ in range(3)))
        assert [one.tokens for one in plans] == [plan.tokens] * 3
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
