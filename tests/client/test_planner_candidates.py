"""Candidates of a planner somewhere else: those of the open planner, from one request."""

from __future__ import annotations

import asyncio
import time

import pytest
from fakes import FakeBackend
from planner_support import Slow
from service_support import TEXT_SHAPE, fake_service, live

from edge_dflash import Planner
from edge_dflash.errors import RequestError

TASK = "go to the hall"
DRAWN = {"temperature": 0.9, "seed": 3, "max_new_tokens": 12}


@pytest.fixture
def remote(service, tmp_path):
    with live(service, tmp_path) as url, Planner.connect(url) as planner:
        yield planner


def test_candidates_are_those_of_the_open_planner(service, remote):
    for more in ({}, {"logprobs": 1}, {"rank": lambda plan: -plan.seed}, {"temperature": 0.0}):
        here, there = (kind.plan(TASK, n=3, **{**DRAWN, **more}) for kind in (service.planner, remote))
        for mine, theirs in zip((here, *here.alternatives), (there, *there.alternatives), strict=True):
            for name in ("seed", "tokens", "text", "accept_lengths", "finish_reason", "reused_tokens", "prompt_tokens"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert mine.score == pytest.approx(theirs.score)
            assert bool(theirs.logprobs) == ("logprobs" in more)


def test_streams_come_apart_and_together(service, remote):
    streams = remote.streams(TASK, 3, **DRAWN)
    parts = [tuple(token for part in stream for token in part.tokens) for stream in reversed(streams)][::-1]
    assert parts == [stream.plan.tokens for stream in streams]
    assert parts == [stream.plan.tokens for stream in service.planner.streams(TASK, 3, **DRAWN)]

    async def ask():
        return await asyncio.gather(*(stream.result() for stream in remote.astreams(TASK, 3, **DRAWN)))

    assert [plan.tokens for plan in asyncio.run(ask())] == parts


def test_one_that_is_cancelled_leaves_the_others_and_the_last_one_the_connection(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.01))
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        whole = [stream.plan.tokens for stream in service.planner.streams(TASK, 3, **DRAWN)]
        streams = remote.streams(TASK, 3, **DRAWN)
        next(streams[0])
        streams[0].close()
        cut = streams[0].plan
        assert (cut.finish_reason, cut.tokens) == ("cancelled", whole[0][: len(cut.tokens)])
        assert [stream.plan.tokens for stream in streams[1:]] == whole[1:]
        for stream in remote.streams(TASK, 2, **{**DRAWN, "max_new_tokens": 300}):
            stream.close()
        until = time.monotonic() + 60
        while service.observer.jobs and time.monotonic() < until:
            time.sleep(0.01)
        assert service.observer.jobs == 0
        plan = remote.plan(TASK, n=2, deadline=0.0, **DRAWN)
        assert [one.finish_reason for one in (plan, *plan.alternatives)] == ["deadline"] * 2
    service.close()


def test_what_makes_no_sense_is_refused(remote):
    with pytest.raises(RequestError, match="n is 9"):
        remote.plan(TASK, n=9)
    with remote.session() as session, pytest.raises(RequestError, match="n is 2 in a session"):
        session.plan(TASK, n=2)
    with pytest.raises(RequestError, match="exceed the usable context"):
        remote.streams(TASK, 2, max_new_tokens=100_000)
