"""Images while they are read: frames that are overwritten, waiting for memory, deadlines, cancelling, a full queue."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from picture_files import noise
from pictures_support import seeing, shown, sighted
from planner_support import Gate

from edge_dflash.decode.options import Options
from edge_dflash.errors import QueueFullError, RequestError
from edge_dflash.pictures import picture as making

FRAMES = [noise(300, 400, seed) for seed in range(2)]
OPTIONS = {"max_new_tokens": 5, "temperature": 1.5, "seed": 3}


@pytest.fixture(scope="module")
def backend():
    return sighted(max_context=400)


def test_at_each_step_of_the_way_the_name_is_that_of_what_is_seen(backend, tmp_path, monkeypatch):
    with seeing(backend, tmp_path / "alone") as planner:
        alone = [planner.plan(shown(frame, "Go"), **OPTIONS).tokens for frame in FRAMES]
    assert alone[0] != alone[1]
    with seeing(backend, tmp_path / "attacked") as planner:
        for name in ("resize", "_patches", "Picture"):
            buffer, original = FRAMES[0].copy(), getattr(making, name)

            def late(*given, original=original, buffer=buffer):
                made = original(*given)
                buffer[:] = FRAMES[1]
                return made

            monkeypatch.setattr(making, name, late)
            planner.plan(shown(buffer, "Go"), **OPTIONS)
            monkeypatch.undo()
            assert [planner.plan(shown(frame, "Go"), **OPTIONS).tokens for frame in FRAMES] == alone


@pytest.fixture
def planner(backend, tmp_path):
    with seeing(backend, tmp_path, queue=2) as made:
        yield made


def test_a_deadline_ends_the_waiting_for_memory(planner):
    gate = planner._preparer.prompter.images.gate
    with gate.hold(gate.budget):
        plan = planner.plan(shown(FRAMES[0], "Go"), deadline=0.2, **OPTIONS)
        assert (plan.finish_reason, plan.tokens) == ("deadline", ())
        with planner.session() as session:
            assert session.plan(shown(FRAMES[0], "Go"), deadline=0.2, **OPTIONS).finish_reason == "deadline"
            assert (session.messages, session.tokens) == ((), ())
    assert planner.plan(shown(FRAMES[0], "Go"), **OPTIONS).tokens
    assert gate.held == 0


@pytest.mark.parametrize("system", [None, "You plan."])
def test_a_turn_that_ends_while_it_waits_for_memory_reads_each_image_once(planner, monkeypatch, system):
    opened, counted = making.opened, []
    monkeypatch.setattr(making, "opened", lambda *given: counted.append(1) or opened(*given))
    gate = planner._preparer.prompter.images.gate
    with gate.hold(gate.budget), planner.session(system) as session:
        assert session.plan(shown(FRAMES[0], "Go"), deadline=0.2, **OPTIONS).finish_reason == "deadline"
    assert len(counted) == 1


def test_a_deadline_counts_from_the_call_and_not_from_where_images_are_read(planner):
    began = time.perf_counter() - 30
    gate = planner._preparer.prompter.images.gate
    for session in (None, planner.session()):
        with gate.hold(gate.budget):
            (asked,) = planner._ask(shown(FRAMES[0], "Go"), session, Options(deadline=20.0), began)
        assert asked._job.request.ended == "deadline"


def test_what_nobody_wants_any_more_when_it_is_prepared_never_runs(planner):
    before = planner.prefixes
    streams = planner.streams(shown(FRAMES[0], "Go"), 2, unwanted=lambda: True, **OPTIONS)
    for stream in streams:
        assert (stream.plan.finish_reason, stream.plan.tokens, list(stream)) == ("cancelled", (), [])
    assert planner.prefixes == before


def test_cancelling_ends_the_waiting_for_memory(planner):
    gate = planner._preparer.prompter.images.gate

    async def ask():
        stream = planner.astream(shown(FRAMES[0], "Go"), **OPTIONS)
        asking = asyncio.create_task(stream.result())
        while not gate._waiting:
            await asyncio.sleep(0.01)
        stream.cancel()
        return await asyncio.wait_for(asking, 20)

    with gate.hold(gate.budget):
        plan = asyncio.run(ask())
    assert (plan.finish_reason, plan.tokens) == ("cancelled", ())
    assert not gate._waiting


def test_a_full_queue_refuses_before_anything_is_decoded_and_while_it_waits(backend, tmp_path, monkeypatch):
    held = Gate(backend)
    with seeing(held, tmp_path, queue=2) as planner:
        gate, outcome = planner._preparer.prompter.images.gate, []
        streams = [planner.stream("Go", max_new_tokens=2, caller="a")]
        assert held.reached.wait(30)

        def wait_for_memory():
            try:
                outcome.append(planner.plan(shown(FRAMES[0], "Go"), caller="late", **OPTIONS))
            except RequestError as error:
                outcome.append(error)

        with gate.hold(gate.budget):
            waiting = threading.Thread(target=wait_for_memory)
            waiting.start()
            while not gate._waiting:
                time.sleep(0.01)
            streams += [planner.stream("Go", max_new_tokens=2, caller=caller) for caller in "bc"]
            waiting.join(30)
        (error,) = outcome
        assert isinstance(error, QueueFullError)
        monkeypatch.setattr(making, "opened", lambda *_: pytest.fail("an image is read"))
        for ask in (planner.plan, planner.session().plan):
            with pytest.raises(QueueFullError, match="2 requests are waiting, the limit is 2"):
                ask(shown(FRAMES[0], "Go"), caller="d", **OPTIONS)
        monkeypatch.undo()
        assert planner.encode(shown(FRAMES[0], "Go"))  # takes no place
        urgent = planner.stream(shown(FRAMES[0], "Go"), caller="e", priority=1, max_new_tokens=2)
        held.open.set()
        assert urgent.plan.finish_reason == "length"
        assert streams[0].plan.finish_reason == "length"


def test_a_closed_planner_reads_no_image(planner, monkeypatch):
    planner.close()
    monkeypatch.setattr(making, "opened", lambda *_: pytest.fail("an image is read"))
    with pytest.raises(RequestError, match="closed"):
        planner.plan(shown(FRAMES[0], "Go"), **OPTIONS)
