"""Forms that take long: deadlines, cancelling and closing are obeyed, and the engine goes on beside them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from edge_dflash.decode.grammar import compiled as module
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

ENDLESS = "start: X\nX: " + " & ".join(f"/(.{{{n}}})*/" for n in (7, 11, 13, 17, 19, 23, 29, 31))
SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


SOON = 60.0  # seconds in which what is ended has ended on a busy machine; that it was ended is said by how


@pytest.fixture
def planner(demo_bundle):
    with Planner.open(demo_bundle, check_hashes=False, self_test="off") as planner:
        planner.plan("Go.", schema=SMALL)
        yield planner


def zygotes(planner):
    return [one.start().pid for one in module._known[planner.tokenizer].values()]


def test_a_deadline_that_ends_while_the_form_compiles_gives_the_plan_of_one_that_ends_in_the_queue(planner):
    before = planner.plan("Go.", deadline=0.0)
    began = time.perf_counter()
    plan = planner.plan("Go.", grammar=ENDLESS, deadline=0.2)
    assert time.perf_counter() - began < SOON
    assert (plan.finish_reason, plan.tokens, plan.text) == (before.finish_reason, (), "") == ("deadline", (), "")
    with planner.session() as session:
        assert session.plan("Go.", grammar=ENDLESS, deadline=0.2).finish_reason == "deadline"
        assert session.messages == ()
        assert session.plan("Go.", schema=SMALL).finish_reason == "stop"


def test_cancelling_ends_the_compiling(planner):
    async def cancelled():
        stream = planner.astream("Go.", grammar=ENDLESS)
        waiting = asyncio.ensure_future(stream.result())
        await asyncio.sleep(0.2)
        stream.cancel()
        began = time.perf_counter()
        plan = await waiting
        assert (plan.finish_reason, plan.tokens) == ("cancelled", ())
        waiting = asyncio.ensure_future(planner.aplan("Go.", grammar=ENDLESS))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return began

    assert time.perf_counter() - asyncio.run(cancelled()) < SOON
    (zygote,) = zygotes(planner)
    children = Path(f"/proc/{zygote}/task/{zygote}/children")
    end = time.monotonic() + 60
    while len(children.read_text().split()) > 1:  # the small form's
        assert time.monotonic() < end
        time.sleep(0.01)


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
    began = time.perf_counter()
    planner.close()
    thread.join()
    assert time.perf_counter() - began < SOON
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
