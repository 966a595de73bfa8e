"""What callers hand in, observers and ranks: whatever it does, requests end, and nothing is freed under a step."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch
from fakes import FakeBackend

from edge_dflash.decode.delegate import Delegate
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner.astream import finished
from edge_dflash.runner.observer import OBSERVED, Observer

PROMPT = (3, 1, 4)
DRAWN = {"temperature": 1.0, "seed": 11, "max_new_tokens": 8}
PATIENT = 60


class Strict(Delegate):
    """A backend that knows whether it is freed under a step, or used after it was freed; a verify waits for ``go``."""

    def __init__(self, go=None):
        self.inner = FakeBackend()
        super().__init__(self.inner)
        self.inside, self.closed, self.wrong = False, 0, []
        self.began, self.go = threading.Event(), go

    def _pass(self, run, *args):
        if self.closed:
            self.wrong.append("used after it was freed")
        self.inside = True
        try:
            return run(*args)
        finally:
            self.inside = False

    def prefill(self, ids, lane=0, sight=None):
        return self._pass(super().prefill, ids, lane, sight)

    def verify(self, ids, lane=0, parents=None):
        self.began.set()
        assert self.go is None or self.go.wait(PATIENT)
        return self._pass(super().verify, ids, lane)

    def commit(self, rows, lane=0, path=None):
        return self._pass(super().commit, rows, lane, path)

    def close(self):
        if self.inside:
            self.wrong.append("freed under a step")
        self.closed += 1
        super().close()


class Calling(Observer):
    """An observer that does something, once, when the first of a kind comes."""

    def __init__(self, name, does):
        def call(*what):
            if not self.done:
                self.done = True
                self.thread = threading.current_thread()
                try:
                    does()
                except Exception as error:
                    self.error = error

        self.done, self.error, self.thread = False, None, None
        setattr(self, name, call)


def in_time(function):
    """What a function gives on another thread, which has to end."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(PATIENT)
    assert found, "it waits for ever"
    return found[0]


# closing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBSERVED)
def test_a_planner_that_an_observer_closes_is_freed_after_the_step(name):
    asked, aside = threading.Event(), name == "aside"
    backend = Strict(asked if aside else None)
    watching = Calling(name, lambda: asked.wait(PATIENT) and planner.close())
    planner = Planner(backend, None, observer=watching, fallback=False)
    running = planner.stream(PROMPT, max_new_tokens=40, speculative=not aside)
    assert not aside or backend.began.wait(PATIENT)
    waiting = planner.stream((5,), max_new_tokens=40, priority=5 * aside)
    asked.set()
    plans = [in_time(lambda stream=stream: stream.plan) for stream in (running, waiting)]
    assert [plan.finish_reason for plan in plans] == ["length" if name == "ended" else "cancelled", "cancelled"]
    assert watching.error is None
    watching.thread.join(PATIENT)
    assert (backend.wrong, backend.closed) == ([], 1)
    with pytest.raises(RequestError, match="the engine is closed"):
        planner.plan(PROMPT)
    in_time(lambda: planner.close() or True)


def test_closing_in_the_loop_over_a_stream_and_from_other_threads_waits_for_the_step():
    for closers in (1, 3):
        backend = Strict()
        planner = Planner(backend, None)
        tokens = 0
        for part in planner.stream(PROMPT, max_new_tokens=40):
            tokens += len(part.tokens)
            threads = [threading.Thread(target=planner.close, daemon=True) for _ in range(closers)]
            for thread in threads:
                thread.start()
            planner.close()
            for thread in threads:
                thread.join(PATIENT)
                assert not thread.is_alive()
        assert backend.wrong == []
        assert 0 < tokens <= 40


def test_what_frees_the_device_and_fails_on_the_engines_thread_is_logged(caplog):
    class Broken(Strict):
        def close(self):
            raise ValueError("a bus error")

    watching = Calling("step", lambda: planner.close())
    planner = Planner(Broken(), None, observer=watching)
    with caplog.at_level(logging.ERROR, "edge_dflash.runner"):
        assert in_time(lambda: planner.plan(PROMPT)).finish_reason == "cancelled"
        watching.thread.join(PATIENT)
    assert "could not let go of its backend" in caplog.text


# waiting on the thread that has to go on ------------------------------------------------------------------------------


@pytest.mark.parametrize("does", ["plan", "read", "await", "fork"])
def test_an_observer_that_waits_for_its_own_engine_is_refused(does):
    def wait_there():
        ask = partial(planner.stream, (7,), max_new_tokens=2)
        waits = {"plan": lambda: ask().plan, "read": lambda: list(ask()), "fork": session.fork}
        waits.get(does, lambda: asyncio.run(finished(ask()._ticket)))()

    watching = Calling("passed", wait_there)
    planner = Planner(FakeBackend(), None, observer=watching)
    session = planner.session()
    watching.done = True
    session.plan((9,), max_new_tokens=2)
    watching.done = False
    plan = in_time(lambda: planner.plan(PROMPT, max_new_tokens=12))
    assert plan.tokens == Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=12).tokens
    assert isinstance(watching.error, RequestError)
    assert "on another thread" in str(watching.error)
    in_time(lambda: planner.close() or True)


def test_a_session_that_an_observer_closes_ends_with_its_turn():
    watching = Calling("passed", lambda: session.close())
    planner = Planner(FakeBackend(), None, observer=watching, fallback=False)
    session = planner.session()
    plan = in_time(lambda: session.plan(PROMPT, max_new_tokens=40))
    assert plan.finish_reason == "cancelled"
    assert session._state.closed
    with pytest.raises(RequestError, match="the session is closed"):
        session.plan((5,))
    assert planner.plan(PROMPT, max_new_tokens=3).finish_reason == "length"


@pytest.mark.parametrize("loop", [False, True])
def test_a_stream_that_an_observer_closes_is_cancelled_and_not_waited_for(loop):
    asked = threading.Event()

    def close():
        assert asked.wait(PATIENT)
        asyncio.run(stream.aclose()) if loop else stream.close()

    watching = Calling("passed", close)
    planner = Planner(FakeBackend(), None, observer=watching, fallback=False)
    stream = (planner.astream if loop else planner.stream)(PROMPT, max_new_tokens=40, speculative=False)
    if loop:
        asyncio.run(stream._started())
    asked.set()
    plan = in_time(lambda: asyncio.run(stream.result()) if loop else stream.plan)
    assert (plan.finish_reason, watching.error) == ("cancelled", None)
    in_time(lambda: planner.close() or True)


def test_a_session_that_another_thread_uses_is_let_go_by_it_when_an_observer_closes_it():
    def close():
        thread.start()
        while not planner._engine._calls:  # the fork, which waits for this thread
            time.sleep(0.001)
        session.close()

    watching = Calling("passed", close)
    planner = Planner(FakeBackend(), None, observer=watching, fallback=False)
    session = planner.session()
    thread = threading.Thread(target=lambda: session.fork(), daemon=True)
    watching.done = True
    session.plan(PROMPT, max_new_tokens=4)
    watching.done = False
    in_time(lambda: planner.plan((5,), max_new_tokens=4))
    thread.join(PATIENT)
    assert not thread.is_alive()
    assert watching.error is None
    assert session._state.closed
    in_time(lambda: planner.close() or True)


# errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_an_observer_that_raises_is_logged_once_and_changes_nothing(caplog, error):
    class Raising(Observer):
        pass

    def fail(self, *what):
        raise error("of an observer")

    for name in OBSERVED:
        setattr(Raising, name, fail)
    wanted = Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=12)
    with (
        caplog.at_level(logging.ERROR, "edge_dflash.runner"),
        Planner(FakeBackend(), None, observer=Raising(), fallback=False) as planner,
    ):
        session = planner.session()
        assert in_time(lambda: session.plan(PROMPT, max_new_tokens=12)).tokens == wanted.tokens
        slow = planner.stream(PROMPT, max_new_tokens=40, speculative=False)
        next(slow)
        assert len(planner.plan((5,), max_new_tokens=3, priority=5).tokens) == 3
        assert len(slow.plan.tokens) == 40
        assert planner.failure is None
    assert caplog.text.count("an observer raised") == 1


@pytest.mark.parametrize(
    "value",
    [
        10**400, -(10**400), float("nan"), np.float32("nan"), "7", b"7", None, [1.0], np.ones(3), np.ones((40, 40)), 1j,
        np.complex64(1), torch.ones(2), torch.tensor(1j), {}, object(), np.array("x"), np.array(None),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_number_is_refused_in_one_line(value):
    with Planner(FakeBackend(), None) as planner:
        for ask in (planner.plan, lambda *task, **options: asyncio.run(planner.aplan(*task, **options))):
            with pytest.raises(RequestError, match=r"^rank gave .*; give a number that a float can hold") as refused:
                ask(PROMPT, n=2, rank=lambda plan: value, **DRAWN)
            assert len(str(refused.value).splitlines()) == 1
            assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "kind",
    [int, float, np.float32, np.float64, np.int8, np.array, torch.tensor, lambda seed: torch.tensor(float(seed)),
     lambda seed: np.bool_(seed > 11), {11: float("-inf"), 12: float("inf")}.get],
)  # fmt: skip
def test_a_number_of_any_kind_orders_the_plans(kind):
    with Planner(FakeBackend(), None) as planner:
        best = planner.plan(PROMPT, n=2, rank=lambda plan: kind(plan.seed), **DRAWN)
    assert (best.seed, best.alternatives[0].seed) == (12, 11)
    assert type(best.score) is float


def test_a_rank_that_stops_an_iteration_stops_no_loop_of_the_caller():
    def rank(plan):
        return next(iter(()))

    with Planner(FakeBackend(), None) as planner:
        for ask in (
            lambda: planner.plan(PROMPT, n=2, rank=rank, **DRAWN),
            lambda: asyncio.run(asyncio.wait_for(planner.aplan(PROMPT, n=2, rank=rank, **DRAWN), PATIENT)),
        ):
            with pytest.raises(RequestError, match="rank raised StopIteration"):
                ask()
