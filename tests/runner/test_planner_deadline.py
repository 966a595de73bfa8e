"""A deadline is a promise, cancelling takes effect within a cycle, and both leave what was committed."""

from __future__ import annotations

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


def test_no_cycle_starts_that_is_not_expected_to_end_in_time():
    backend = FakeBackend()
    planner = Planner(Slow(backend, 2.0), None)
    planner.plan(PROMPT, max_new_tokens=5)  # its one cycle is measured
    backend.passes.clear()
    plan = planner.plan(PROMPT, deadline=1.0)  # the prompt has all of it, on a busy machine, too
    assert (plan.finish_reason, len(plan.tokens)) == ("deadline", 1)
    assert backend.passes == ["prefill"]


def test_a_deadline_that_is_far_changes_nothing():
    planner = Planner(FakeBackend(), None)
    wanted = planner.plan(PROMPT, max_new_tokens=9)
    for deadline in (60.0, 1e12, math.inf):
        assert planner.plan(PROMPT, max_new_tokens=9, deadline=deadline).tokens == wanted.tokens


def test_time_in_the_queue_counts():
    gate = Gate()
    planner = Planner(gate, None)
    running = planner.stream(PROMPT, max_new_tokens=9)
    assert gate.reached.wait(60)
    began = time.perf_counter()
    plan = planner.plan(PROMPT, deadline=0.1)  # returns although the engine is not free
    assert 0.09 < time.perf_counter() - began < 50.0  # the gate gives up after 60 s
    assert (plan.finish_reason, plan.tokens) == ("deadline", ())
    assert plan.timings.queue_seconds >= 0.09
    stream = planner.stream(PROMPT, deadline=0.05)
    assert list(stream) == []
    assert stream.plan.finish_reason == "deadline"
    gate.open.set()
    assert len(running.plan.tokens) == 9
    assert planner.plan(PROMPT, max_new_tokens=9, deadline=60.0).tokens == running.plan.tokens


@pytest.mark.parametrize("deadline", [math.nan, "soon"])
def test_deadlines_are_seconds(deadline):
    with pytest.raises(RequestError, match="give seconds from now"):
        Planner(FakeBackend(), None).plan(PROMPT, deadline=deadline)


# cancelling ----------------------------------------------------------------------------------------------------------


def test_cancelling_takes_effect_within_a_cycle():
    gate = Gate(FakeBackend(right=lambda position: 0), free=3)  # prefill and two cycles pass
    planner = Planner(gate, None, fallback=False)
    wanted = Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=20).tokens
    stream = planner.stream(PROMPT)
    assert gate.reached.wait(60)  # inside the third cycle
    threading.Thread(target=stream.cancel).start()
    while not stream._job.cancelled:
        time.sleep(0.001)
    gate.open.set()
    plan = stream.plan
    assert plan.finish_reason == "cancelled"
    assert plan.tokens == wanted[:4]
    assert gate.backend.passes.count("verify") == 3
    assert tuple(token for part in stream for token in part.tokens) == plan.tokens
    stream.cancel()
    assert stream.plan is plan


def test_a_waiting_request_is_cancelled_at_once():
    gate = Gate()
    planner = Planner(gate, None)
    running, waiting = planner.stream(PROMPT, max_new_tokens=9), planner.stream(PROMPT)
    assert gate.reached.wait(60)
    waiting.cancel()
    assert (waiting.plan.finish_reason, waiting.plan.tokens) == ("cancelled", ())
    assert list(waiting) == []
    gate.open.set()
    assert running.plan.finish_reason == "length"
    assert gate.backend.passes.count("prefill") == 1


def test_closing_a_stream_waits_until_the_engine_let_go():
    gate = Gate(free=1)
    planner = Planner(gate, None)
    stream = planner.stream(PROMPT)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.open.set).start()
    stream.close()
    assert stream._ticket.done
    assert list(stream) == []
    stream.close()


def test_a_result_can_be_waited_for_a_while():
    gate = Gate()
    planner = Planner(gate, None)
    stream = planner.stream(PROMPT, max_new_tokens=9)
    with pytest.raises(TimeoutError):
        stream.result(0.01)
    gate.open.set()
    assert len(stream.result(10).tokens) == 9


# fallback ------------------------------------------------------------------------------------------------------------


class Costly(Slow):
    """Drafting takes time and is never right."""

    def propose(self, anchor, lane=0):
        time.sleep(self.seconds)
        return super().propose(anchor, lane)


@pytest.mark.parametrize("fallback", [True, False])
def test_drafting_that_does_not_pay_rests_and_changes_nothing(fallback):
    backend = FakeBackend(right=lambda position: 0)
    planner = Planner(Costly(backend, 0.02), None, fallback=fallback)
    wanted = Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=40).tokens
    plans = [planner.plan(PROMPT, max_new_tokens=40) for _ in range(2)]
    assert all(plan.tokens == wanted for plan in plans)
    assert all(plan.speculative for plan in plans)
    drafted, verified = backend.passes.count("propose"), backend.passes.count("verify")
    assert (drafted < verified // 3) == fallback
    assert (drafted == verified) == (not fallback)
    assert SHAPE.usable_context > 43
