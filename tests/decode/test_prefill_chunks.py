"""A prompt is computed in chunks; between two of them requests end, and urgent ones run."""

from __future__ import annotations

import random
import threading
import time

import pytest
from fakes import SHAPE, FakeBackend
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits
from session_support import answer, forked, state_of

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate, stream
from edge_dflash.decode.options import Options
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.planner import Planner

CHUNK = SHAPE.prefill_chunk
LONG = tuple(range(1, 51))  # 7 chunks
SHORT = (3, 1, 4)
SECONDS = 0.03  # of a chunk


def alone(prompt, new):
    """Its answer on a backend of its own."""
    return generate(FakeBackend(), prompt, Options(max_new_tokens=new)).tokens


class Chunked(Delegate):
    """Each chunk takes its time; ``ends`` notes when each pass ended, and ``between`` is called before each chunk."""

    def __init__(self, seconds=SECONDS, inner=None):
        super().__init__(inner or FakeBackend())
        self.seconds, self.ends, self.between = seconds, [], lambda: None
        self.restored = 0

    def prefill(self, ids, lane=0, sight=None):
        self.between()
        assert len(ids) <= self.shape.prefill_chunk
        rows = super().prefill(ids, lane, sight)
        time.sleep(self.seconds)
        self.ends.append(time.perf_counter())
        return rows

    def restore(self, snapshot, lane=0):
        self.restored += 1
        super().restore(snapshot, lane)


def test_there_is_a_step_between_two_chunks_and_the_first_token_has_the_time_of_all():
    b = Chunked(0.001)
    steps = list(stream(b, LONG, Options(max_new_tokens=5)))
    assert [step.chunk for step in steps[:7]] == [True] * 6 + [False]
    assert [step.first for step in steps] == [False] * 6 + [True] + [False] * (len(steps) - 7)
    assert steps[6].verify_seconds >= 7 * 0.001
    assert alone(LONG, 5) == tuple(t for s in steps for t in s.tokens)


@pytest.mark.parametrize("kind", ["deadline", "cancel"])
def test_a_prompt_ends_within_a_chunk_of_its_deadline_or_of_its_cancel(kind):
    """Against an unknown engine and one whose times are known."""
    b = Chunked()
    planner, chance, told = Planner(b, None), random.Random(5), []
    for _ in range(12):
        b.ends.clear()
        after = chance.uniform(0.0, 5 * SECONDS)
        until = time.perf_counter() + after
        if kind == "deadline":
            plan = planner.plan(LONG, deadline=after)
        else:
            with planner.stream(LONG) as running:
                timer = threading.Timer(
                    after, lambda running=running: (running.cancel(), told.append(time.perf_counter()))
                )
                timer.start()
                plan = running.plan
                timer.join()
                until = told[-1]
        assert (plan.finish_reason, plan.tokens) == ({"deadline": "deadline", "cancel": "cancelled"}[kind], ())
        assert sum(end > until for end in b.ends) <= 1
    assert planner.plan(LONG, max_new_tokens=3).tokens == alone(LONG, 3)


def test_an_urgent_request_runs_between_two_chunks():
    b = Chunked()
    planner, urgent = Planner(b, None), []
    sent = []

    def send():
        if len(b.ends) == 2:
            sent.append(time.perf_counter())
            urgent.append(planner.stream(SHORT, max_new_tokens=4, priority=100))

    b.between = send
    slow = planner.stream(LONG, max_new_tokens=6)
    plan = slow.plan
    assert plan.tokens == alone(LONG, 6)
    fast = urgent[0].plan
    assert fast.tokens == alone(SHORT, 4)
    assert sum(end < sent[0] + fast.timings.queue_seconds for end in b.ends) <= 2 + 1
    assert len(b.ends) == 7 + 1  # nothing was computed twice
    assert b.restored == 1


def test_a_turn_that_ends_inside_its_prompt_leaves_no_trace_and_its_state_serves_the_next():
    b = Chunked(0.002)
    planner = Planner(b, None)
    session = planner.session()
    first = session.plan(SHORT, max_new_tokens=4)
    known = session.tokens
    b.ends.clear()
    b.between = lambda: len(b.ends) == 3 and running.cancel()
    running = session.stream(LONG[:40])
    assert running.plan.finish_reason == "cancelled"
    assert session.tokens == known == (*SHORT, *first.tokens)
    b.ends.clear()
    b.between = lambda: None
    again = session.plan(LONG[:40], max_new_tokens=4)
    assert again.reused_tokens == len(known) - 1 + 4 * CHUNK
    assert again.tokens == alone((*known, *LONG[:40]), 4)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_prompt_has_the_bits_of_an_unbroken_one(name):
    options, prompt = {"prefill_chunk": 5}, tuple(golden(name)["p1.prompt"].tolist())
    alone = backend(name, ENGINE, **options)
    truth = generate(alone, prompt, Options(max_new_tokens=9))
    manager = SessionManager(backend(name, ENGINE, **options), "bundle", store=PrefixStore(0))
    one, other = manager.open(), manager.open()
    steps = []
    for index, step in enumerate(answer(one, prompt, Options(max_new_tokens=9))):
        steps.append(step)
        if index % 2 == 0:
            list(answer(other, prompt[3 + index :], Options(max_new_tokens=2)))
    assert tuple(t for step in steps for t in step.tokens) == truth.tokens
    assert same_bits(state_of(one).snapshot, alone.snapshot())


def test_a_fork_in_the_middle_of_a_prompt_starts_at_the_last_answer():
    manager = SessionManager(FakeBackend(), "bundle", store=PrefixStore(0))
    session = manager.open()
    list(answer(session, SHORT, Options(max_new_tokens=4)))
    known = session.tokens
    running = answer(session, (*known, *LONG[:30]), Options(max_new_tokens=4))
    assert next(running).chunk
    fork = forked(session)
    assert fork.tokens == known
    assert state_of(fork).snapshot.length == len(known) - 1
    found = tuple(t for step in running for t in step.tokens)
    assert found == alone((*known, *LONG[:30]), 4)


def test_a_turn_that_was_cut_in_its_prompt_is_saved_chunk_by_chunk(tmp_path):
    """Its own state is gone and is computed again; what runs beside it is not held up for longer than a chunk."""
    b = Chunked(0.002)
    planner = Planner(b, None)
    session = planner.session()
    session.plan(LONG[:20], max_new_tokens=3)
    b.between = lambda: len(b.ends) == 4 and running.cancel()  # behind the first of its chunks
    running = session.stream(LONG[:25])
    assert running.plan.finish_reason == "cancelled"
    b.between = lambda: None
    assert session.save(tmp_path / "session") > 0  # Chunked refuses more than a chunk at once
    again = planner.load_session(tmp_path / "session")
    assert again.plan(SHORT, max_new_tokens=3).tokens == session.plan(SHORT, max_new_tokens=3).tokens
