"""Candidates: one prefill, copies on the device, and each answer exactly that of a request alone with its seed."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from inspect import GEN_CLOSED, getgeneratorstate

import pytest
from golden_pairs import ENGINE, backend, golden, same_bits

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError, QueueFullError, RequestError
from edge_dflash.planner import Planner

NAME = "qwen3_5"
PROMPT = tuple(golden(NAME)["p1.prompt"].tolist()) * 2
DRAWN = {"temperature": 0.9, "seed": 11, "max_new_tokens": 10}


class Counting(Delegate):
    """Counts rows of prefill and copies; passes wait for ``go``, and ``broken`` says which ones fail."""

    def __init__(self, lanes=1, chunk=8):
        super().__init__(backend(NAME, ENGINE, prefill_chunk=chunk, lanes=lanes))
        self.rows, self.copies, self.passes = 0, 0, []
        self.began, self.go, self.broken = threading.Event(), threading.Event(), lambda kind, ids: False
        self.go.set()

    def prefill(self, ids, lane=0, sight=None):
        self.began.set()
        assert self.go.wait(60)
        if self.broken("prefill", ids):
            raise BackendError("the pass failed")
        self.rows += len(ids)
        self.passes.append(len(ids))
        return self._backend.prefill(ids, lane, sight)

    def cycle(self, asked):
        if self.broken("cycle", [asked.sampling.seed]):
            raise RequestError("the cycle failed")
        self.passes.append("cycle")
        return self._backend.cycle(asked)

    def copy(self, source, target):
        self.copies += 1
        self._backend.copy(source, target)


@cache
def alone(index, prompt=PROMPT, **options):
    chosen = {**DRAWN, **options}
    found = generate(backend(NAME, ENGINE), prompt, Options(**{**chosen, "seed": chosen["seed"] + index}))
    return found.tokens, found.accept_lengths


def each(planner, n, prompt=PROMPT, **options):
    return [(stream.plan.tokens, stream.plan.accept_lengths) for stream in planner.streams(prompt, n, **options)]


SHARED = [(2, 1), (4, 1), (3, 2), (4, 4), (8, 4)]  # candidates, lanes
LENGTHS = [1, 2, 8, 9, len(PROMPT)]


@pytest.mark.parametrize(
    ("n", "lanes", "length"),
    [
        *((*shared, len(PROMPT)) for shared in SHARED),
        *((3, 2, length) for length in LENGTHS[:-1]),
        (8, 4, 8),
        (2, 1, 9),
    ],
)
def test_each_candidate_is_the_answer_to_a_request_alone_with_its_seed(n, lanes, length):
    prompt, counting = PROMPT[:length], Counting(lanes)
    with Planner(counting, None, fallback=False) as planner:
        assert each(planner, n, prompt, **DRAWN) == [alone(index, prompt) for index in range(n)]
        assert counting.rows == length + n - 1
        assert counting.copies == (min(n, lanes) - 1 if length > 1 else 0)
    if length > 1:  # those that have lanes compute the last token in one turn, before anybody's cycle
        assert counting.passes[: counting.passes.index("cycle")][-min(n, lanes) :] == [1] * min(n, lanes)


def test_state_bytes_are_those_of_a_request_alone():
    kept = {}

    class Keeping(Counting):
        def cycle(self, asked):
            found = super().cycle(asked)
            kept[asked.sampling.seed] = self._backend.length(asked.lane), self._backend.snapshot(asked.lane)
            return found

        def cycles(self, asked):
            return [self.cycle(one) for one in asked]

    for counting in (Keeping(4), Keeping(1)):
        with Planner(counting, None, fallback=False) as planner:
            each(planner, 4, **DRAWN)
        found = dict(kept)
        for index in range(4):
            single = Keeping(1)
            with Planner(single, None, fallback=False) as planner:
                planner.plan(PROMPT, **{**DRAWN, "seed": 11 + index})
            assert found[11 + index][0] == kept[11 + index][0]
            assert same_bits(found[11 + index][1], kept[11 + index][1])


def test_the_best_comes_first_and_the_others_behind_it():
    with Planner(Counting(2), None, fallback=False) as planner:
        plan = planner.plan(PROMPT, n=4, **DRAWN)
        told = planner.plan(PROMPT, n=4, logprobs=2, **DRAWN)
        ranked = planner.plan(PROMPT, n=4, rank=lambda one: -one.seed, **DRAWN)
    found = [plan, *plan.alternatives]
    assert sorted((one.seed, one.tokens) for one in found) == [(11 + i, alone(i)[0]) for i in range(4)]
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(one.logprobs == () for one in found)
    assert [one.seed for one in (told, *told.alternatives)] == [one.seed for one in found]
    for one in (told, *told.alternatives):
        assert one.score == pytest.approx(sum(token.logprob for token in one.logprobs) / len(one.tokens))
        assert all(len(token.top) == 2 for token in one.logprobs)
    assert [(one.seed, one.score) for one in (ranked, *ranked.alternatives)] == [(11 + i, -11 - i) for i in range(4)]
    assert all(one.alternatives == () for one in plan.alternatives)


def test_only_the_first_one_has_the_cost_of_the_prompt():
    with Planner(Counting(2), None, fallback=False) as planner:
        first, *others = (stream.plan for stream in planner.streams(PROMPT, 3, **DRAWN))
    assert (first.reused_tokens, {one.reused_tokens for one in others}) == (0, {len(PROMPT) - 1})
    assert first.timings.prefill_seconds > max(one.timings.prefill_seconds for one in others)
    assert first.timings.total_seconds >= first.timings.queue_seconds + first.timings.prefill_seconds


def test_a_rank_that_fails_is_told_to_the_caller_and_without_a_temperature_one_answer_is_made():
    def crash(plan):
        raise ZeroDivisionError("the simulator")

    counting = Counting(4)
    with Planner(counting, None, fallback=False) as planner:
        plan = planner.plan(PROMPT, n=4, max_new_tokens=6)
        assert [one.tokens for one in plan.alternatives] == [plan.tokens] * 3
        assert counting.rows == len(PROMPT)
        with pytest.raises(ZeroDivisionError, match="the simulator"):
            planner.plan(PROMPT, n=2, rank=crash, **DRAWN)
        assert planner.plan(PROMPT, n=1, rank=lambda plan: True, **DRAWN).score == 1.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 9}, "n is 9; give a whole number of candidates, 1 to 8"),
        ({"n": 0}, "n is 0"),
        ({"n": "2"}, "n is '2'"),
        ({"n": 2, "rank": 3}, "rank is 3"),
        ({"n": 2, "temperature": 1.0, "seed": 2**64 - 1}, "seed is 18446744073709551615 .* give 0 to .* 2$"),
        ({"n": 2, "draft": 1}, "draft is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(given, said):
    with Planner(Counting(2), None, fallback=False) as planner:
        with pytest.raises(RequestError, match=said):
            planner.plan(PROMPT, **given)
        with pytest.raises(RequestError, match=said):
            asyncio.run(planner.aplan(PROMPT, **given))
        with planner.session() as session, pytest.raises(RequestError, match="n is 2 in a session"):
            session.plan(PROMPT, n=2)
        assert planner.waiting == 0


def test_a_state_that_is_kept_is_used_and_a_conversation_makes_room():
    counting = Counting(2)
    with Planner(counting, None, fallback=False) as planner:
        sessions = [planner.session() for _ in range(2)]
        before = [session.plan(PROMPT[:5], max_new_tokens=3).tokens for session in sessions]
        assert each(planner, 3, **DRAWN) == [alone(index) for index in range(3)]
        after = [session.plan([7, 8], max_new_tokens=3) for session in sessions]
    assert before[0] == before[1]
    whole = [*PROMPT[:5], *before[0], 7, 8]
    truth = generate(backend(NAME, ENGINE), whole, Options(max_new_tokens=3)).tokens
    assert [(plan.tokens, plan.reused_tokens) for plan in after] == [(truth, len(whole) - 3)] * 2


def test_one_request_with_candidates_takes_one_place_in_the_queue():
    counting = Counting(1)
    counting.go.clear()
    with Planner(counting, None, fallback=False, queue=2) as planner:
        first = planner.stream(PROMPT, max_new_tokens=2)
        assert counting.began.wait(60)
        streams = [planner.streams(PROMPT, 8, caller=f"c{index}", **DRAWN) for index in range(2)]
        assert planner.waiting == 2
        with pytest.raises(QueueFullError):
            planner.streams(PROMPT, 2, caller="c2", **DRAWN)
        urgent = planner.stream(PROMPT, max_new_tokens=2, priority=1, caller="u")
        counting.go.set()
        for stream in streams[1]:
            with pytest.raises(QueueFullError, match="gave its place"):
                _ = stream.plan
        assert [stream.plan.tokens for stream in streams[0]] == [alone(index)[0] for index in range(8)]
        assert urgent.plan.tokens == first.plan.tokens


def test_one_that_is_cancelled_leaves_the_others_alone():
    counting = Counting(2)
    counting.go.clear()
    with Planner(counting, None, fallback=False) as planner:
        running = planner.streams(PROMPT, 3, **DRAWN)
        assert counting.began.wait(60)
        queued = planner.streams(PROMPT, 3, **DRAWN)
        for streams in (running, queued):
            streams[0].close()
            assert (streams[0].plan.tokens, streams[0].plan.finish_reason) == ((), "cancelled")
        counting.go.set()
        for streams in (running, queued):
            assert [one.plan.tokens for one in streams[1:]] == [alone(index)[0] for index in (1, 2)]
    assert counting.rows == 2 * (len(PROMPT) - 1 + 2)  # each prompt is computed once all the same


def test_when_all_are_cancelled_nothing_of_them_runs():
    counting = Counting(1)
    counting.go.clear()
    with Planner(counting, None, fallback=False) as planner:
        running = planner.streams(PROMPT, 2, **DRAWN)
        assert counting.began.wait(60)
        queued = planner.streams(PROMPT, 2, **DRAWN)
        for stream in (*queued, *running):
            stream.close()
        fill = running[0]._job.steps
        assert planner.waiting == 0
        dropped = planner.streams(PROMPT, 2, **DRAWN)
        del dropped
        counting.go.set()
        assert planner.plan(PROMPT[:3], max_new_tokens=2).finish_reason == "length"
        assert counting.rows == 8 + 3
        assert getgeneratorstate(fill) == GEN_CLOSED  # and its lane is nobody's, though the streams are still there


def test_a_deadline_ends_all_of_them():
    counting = Counting(1)
    counting.go.clear()
    with Planner(counting, None, fallback=False) as planner:
        first = planner.stream(PROMPT, max_new_tokens=2)
        assert counting.began.wait(60)
        for stream in planner.streams(PROMPT, 3, deadline=0.05, **DRAWN):
            assert (stream.plan.finish_reason, stream.plan.tokens) == ("deadline", ())
        counting.go.set()
        assert first.plan.tokens
        plan = planner.plan(PROMPT, n=3, deadline=0.0, **DRAWN)
        assert [one.finish_reason for one in (plan, *plan.alternatives)] == ["deadline"] * 3
        assert plan.score == float("-inf")


def test_a_prompt_that_fails_fails_all_of_them_each_with_an_error():
    counting = Counting(2)
    with Planner(counting, None, fallback=False) as planner:
        counting.broken = lambda kind, ids: kind == "prefill"
        errors = []
        for stream in planner.streams(PROMPT, 3, **DRAWN):
            with pytest.raises(BackendError, match="the pass failed") as caught:
                _ = stream.plan
            errors.append(caught.value)
        assert len(set(map(id, errors))) == 3
        counting.broken = lambda kind, ids: False
        assert each(planner, 2, **DRAWN) == [alone(index) for index in range(2)]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_candidate_that_fails_fails_alone_and_a_plan_with_it(lanes):
    counting = Counting(lanes)
    with Planner(counting, None, fallback=False) as planner:
        counting.broken = lambda kind, ids: kind == "cycle" and ids == [12]
        first, second, third = planner.streams(PROMPT, 3, **DRAWN)
        with pytest.raises(RequestError, match="the cycle failed"):
            _ = second.plan
        assert [first.plan.tokens, third.plan.tokens] == [alone(0)[0], alone(2)[0]]
        with pytest.raises(RequestError, match="the cycle failed"):
            planner.plan(PROMPT, n=3, **DRAWN)


def test_a_lost_state_is_computed_again():
    """The last token of one candidate fails: the states of all lanes are given up."""
    counting, failed = Counting(2), []

    def once(kind, ids):
        if kind == "prefill" and counting.rows == len(PROMPT) - 1 and not failed:
            failed.append(ids)
            return True
        return False

    counting.broken = once
    with Planner(counting, None, fallback=False) as planner:
        first, *others = planner.streams(PROMPT, 3, **DRAWN)
        with pytest.raises(BackendError, match="the pass failed"):
            _ = first.plan
        assert [stream.plan.tokens for stream in others] == [alone(index)[0] for index in (1, 2)]


def test_asyncio_has_the_same():
    async def ask(planner):
        plan = await planner.aplan(PROMPT, n=3, **DRAWN)
        streams = planner.astreams(PROMPT, 3, **DRAWN)
        assert not any(stream.queued for stream in streams)
        parts = [token async for part in streams[2] for token in part.tokens]
        streams[1].cancel()
        return plan, tuple(parts), await streams[0].result(), await streams[1].result()

    counting = Counting(2)
    with Planner(counting, None, fallback=False) as planner:
        plan, third, first, second = asyncio.run(ask(planner))
        assert plan.tokens == planner.plan(PROMPT, n=3, **DRAWN).tokens
    assert (first.tokens, third) == (alone(0)[0], alone(2)[0])
    assert second.tokens == alone(1)[0][: len(second.tokens)]


def test_an_async_stream_that_is_cancelled_while_it_is_prepared_never_runs(monkeypatch):
    counting, reached, go = Counting(1), threading.Event(), threading.Event()
    counting.go.clear()

    async def ask(planner):
        stream = planner.astream(PROMPT, **DRAWN)
        waiting = asyncio.ensure_future(stream.result())
        await asyncio.to_thread(reached.wait, 60)
        stream.cancel()
        go.set()
        return await asyncio.wait_for(waiting, 20)

    with Planner(counting, None, fallback=False) as planner:
        first, prepare = planner.stream(PROMPT[:3], max_new_tokens=2), planner._preparer.prepare
        assert counting.began.wait(60)
        monkeypatch.setattr(
            planner._preparer, "prepare", lambda *given: (reached.set(), go.wait(60), prepare(*given))[2]
        )
        try:
            assert asyncio.run(ask(planner)).finish_reason == "cancelled"  # while the first one has the only lane
        finally:
            counting.go.set()
        assert first.plan.finish_reason == "length"
    assert counting.rows == 3


def test_an_error_at_the_call_comes_to_every_stream():
    async def ask(planner):
        found = []
        for stream in planner.astreams([10**9], 2):
            with pytest.raises(RequestError, match="outside the vocabulary") as caught:
                await stream.result()
            found.append(caught.value)
        return found

    with Planner(Counting(1), None, fallback=False) as planner:
        first, second = asyncio.run(ask(planner))
    assert first is not second
