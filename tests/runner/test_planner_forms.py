"""Forms that take long: deadlines, cancelling and closing are obeyed, and the engine goes on beside them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from edge_dflash.decode.grammar import compiled as module
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

ENDLESS = "start: X\nX: " + " & ".join(f"/(.{{{n}}})*/" for n in (7, 11, 13, 17, 19, 23, 29, 31))
SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.fixture
def planner(demo_bundle):
    with Planner.open(demo_bundle, check_hashes=False, self_test="off") as planner:
        planner.plan("Go.", schema=SMALL)
        yield planner


def zygotes(planner):
    return [one.start()._process.pid for one in module._known[planner.tokenizer].values()]


def children(zygote):
    return [int(pid) for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()]


async def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_deadline_that_ends_while_the_form_compiles_gives_the_plan_of_one_that_ends_in_the_queue(planner):
    before = planner.plan("Go.", deadline=0.0)
    plan = planner.plan("Go.", grammar=ENDLESS, deadline=0.2)  # else it would be refused for its bounds
    assert (plan.finish_reason, plan.tokens, plan.text) == (before.finish_reason, (), "") == ("deadline", (), "")
    with planner.session() as session:
        assert session.plan("Go.", grammar=ENDLESS, deadline=0.2).finish_reason == "deadline"
        assert session.messages == ()
        assert session.plan("Go.", schema=SMALL).finish_reason == "stop"


def test_cancelling_ends_the_compiling(planner):
    (zygote,) = zygotes(planner)
    (small,) = children(zygote)

    async def compiling():
        """Until it is; its process is stopped then, and goes over no bound: it only ends if it is killed."""
        await until(lambda: len(children(zygote)) == 2)
        os.kill(*(pid for pid in children(zygote) if pid != small), signal.SIGSTOP)

    async def cancelled():
        stream = planner.astream("Go.", grammar=ENDLESS)
        waiting = asyncio.ensure_future(stream.result())
        await compiling()
        stream.cancel()
        plan = await waiting
        assert (plan.finish_reason, plan.tokens) == ("cancelled", ())
        await until(lambda: children(zygote) == [small])
        waiting = asyncio.ensure_future(planner.aplan("Go.", grammar=ENDLESS))
        await compiling()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: children(zygote) == [small])

    asyncio.run(cancelled())


def test_plans_are_made_beside_it_and_closing_ends_it(planner):
    failed = []

    def bomb():
        with pytest.raises(RequestError) as error:
            planner.plan("Go.", grammar=ENDLESS)
        failed.append(str(error.value))

    thread = threading.Thread(target=bomb)
    thread.start()
    time.sleep(0.2)
    assert planner.plan("Go.", schema=SMALL).finish_reason == "stop"
    (zygote,) = zygotes(planner)
    planner.close()
    thread.join()
    assert not Path(f"/proc/{zygote}").exists()
    assert failed == ["the planner of this grammar is closed; open it again"]


def test_a_planner_that_is_dropped_leaves_no_process(demo_bundle):
    planner = Planner.open(demo_bundle, check_hashes=False, self_test="off")
    planner.warm_up()
    (zygote,) = zygotes(planner)
    assert Path(f"/proc/{zygote}").exists()
    del planner
    end = time.monotonic() + 60
    while Path(f"/proc/{zygote}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_closed_planner_starts_no_process(demo_bundle):
    planner = Planner.open(demo_bundle, check_hashes=False, self_test="off")
    planner.close()
    planner.warm_up()
    with pytest.raises(RequestError, match="is closed"):
        planner.plan("Go.", schema=SMALL)
    assert planner.tokenizer not in module._known
