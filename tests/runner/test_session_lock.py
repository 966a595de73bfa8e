"""A session while its next turn is prepared: nobody waits for a picture, a form or a disk but who asked for it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE
from text_support import write_tokenizer

from edge_dflash import session as session_module
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner import form as form_module
from edge_dflash.text.tokenizer import Tokenizer

PATIENT = 60


@pytest.fixture
def planner(tmp_path):
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path / "tokenizer"))
    with Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id], fallback=False) as made:
        yield made


class Slow:
    """A function that waits where it is called, until it may go on."""

    def __init__(self, monkeypatch, module, name):
        self.inner, self.reached, self.go = getattr(module, name), threading.Event(), threading.Event()
        self.calls = 0
        monkeypatch.setattr(module, name, self)

    def __get__(self, instance, owner):
        return self if instance is None else partial(self, instance)

    def __call__(self, *args, **more):
        self.calls += 1
        self.reached.set()
        assert self.go.wait(PATIENT)
        return self.inner(*args, **more)


PLACES = [(Tokenizer, "render_pieces"), (form_module, "compile_form")]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.mark.parametrize("place", PLACES)
def test_a_session_can_be_closed_while_its_turn_is_prepared(planner, pool, monkeypatch, place):
    session = planner.session("You are a robot.")
    session.plan("Wait.", max_new_tokens=4)
    slow = Slow(monkeypatch, *place)
    turn = pool.submit(session.plan, "Go.", regex="[a-z]{4}", max_new_tokens=4)
    try:
        assert slow.reached.wait(PATIENT)
        assert session.busy
        pool.submit(session.close).result(PATIENT)
        assert session._state.closed
        assert not turn.done()
    finally:
        slow.go.set()
    with pytest.raises(RequestError, match="the session is closed"):
        turn.result(PATIENT)
    assert not session.busy


@pytest.mark.parametrize("place", PLACES)
def test_a_session_can_be_forked_and_saved_while_its_turn_is_prepared(planner, pool, monkeypatch, tmp_path, place):
    session = planner.session("You are a robot.")
    first = session.plan("Wait.", max_new_tokens=4)
    before = session.tokens
    slow = Slow(monkeypatch, *place)
    turn = pool.submit(session.plan, "Go.", regex="[a-z]{4}", max_new_tokens=4)
    try:
        assert slow.reached.wait(PATIENT)
        fork = pool.submit(session.fork).result(PATIENT)
        assert pool.submit(session.save, tmp_path / "saved").result(PATIENT) > 0
        with pytest.raises(RequestError, match="a turn of this session is still running"):
            pool.submit(session.plan, "Stop.").result(PATIENT)
        assert slow.calls == 1
    finally:
        slow.go.set()
    plan = turn.result(PATIENT)
    assert len(plan.text) == 4
    assert plan.reused_tokens == len(before) - 1
    assert fork.tokens == before
    assert [message["content"] for message in fork.messages] == ["You are a robot.", "Wait.", first.text]
    assert planner.load_session(tmp_path / "saved").tokens == before
    assert fork.plan("Go.", regex="[a-z]{4}", max_new_tokens=4).tokens == plan.tokens


def test_a_form_is_compiled_no_longer_than_its_session_is_open(planner, pool, monkeypatch):
    session, reached = planner.session(), threading.Event()

    def compiled(source, tokenizer, stop, patience, caller):
        reached.set()
        while True:
            patience.check()
            threading.Event().wait(0.005)

    monkeypatch.setattr(form_module, "compile_form", compiled)
    turn = pool.submit(session.plan, "Go.", regex="[a-z]{4}")
    assert reached.wait(PATIENT)
    session.close()
    with pytest.raises(RequestError, match="the session is closed"):
        turn.result(PATIENT)


def test_a_slow_disk_keeps_no_session_open(planner, pool, monkeypatch, tmp_path):
    session = planner.session()
    session.plan("Go.", max_new_tokens=4)
    slow = Slow(monkeypatch, session_module, "save_session")
    saved = pool.submit(session.save, tmp_path / "saved")
    try:
        assert slow.reached.wait(PATIENT)
        before = session.tokens
        assert session.plan("Wait.", max_new_tokens=4).tokens
        pool.submit(session.close).result(PATIENT)
    finally:
        slow.go.set()
    assert saved.result(PATIENT) > 0
    assert planner.load_session(tmp_path / "saved").tokens == before


def test_an_observer_does_not_wait_for_who_waits_for_the_engine(planner):
    session = planner.session()
    session.plan("Go.", max_new_tokens=4)
    refused = []

    def on_the_engine(use=session.fork):
        try:
            use()
        except RequestError as error:
            refused.append(str(error))

    with session._held():
        planner._engine.call(on_the_engine)
    with session._saving:  # nor for a disk
        planner._engine.call(lambda: on_the_engine(lambda: session.save("nowhere")))
    assert refused == ["the session is in use by another thread, which waits for this one; call on another one"] * 2


def test_of_two_saves_to_one_path_the_newer_state_stays(planner, pool, monkeypatch, tmp_path):
    session = planner.session()
    session.plan("Go.", max_new_tokens=4)
    slow = Slow(monkeypatch, session_module, "save_session")
    older = pool.submit(session.save, tmp_path / "saved")
    try:
        assert slow.reached.wait(PATIENT)
        session.plan("Wait.", max_new_tokens=4)
        newer = pool.submit(session.save, tmp_path / "saved")
        assert session.fork().tokens == session.tokens
        threading.Event().wait(0.1)
        assert slow.calls == 1
    finally:
        slow.go.set()
    assert newer.result(PATIENT) > older.result(PATIENT) > 0
    assert planner.load_session(tmp_path / "saved").tokens == session.tokens
