"""Who has the next step where several prompts wait, and what ends while it waits."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from itertools import pairwise

import pytest
from golden_pairs import ENGINE, backend, golden

from edge_dflash.decode.delegate import Delegate
from edge_dflash.errors import QueueFullError
from edge_dflash.planner import Planner
from edge_dflash.runner.job import Work
from edge_dflash.runner.turns import Share, turn_of

NAME = "qwen3_5"
LONG = tuple(golden(NAME)["p1.prompt"].tolist()) * 2
SECONDS = 30.0


class Held(Delegate):
    """Passes of a kind wait for ``go`` once there is one that ``stops`` holds for."""

    def __init__(self, lanes, chunk=4):
        super().__init__(backend(NAME, ENGINE, prefill_chunk=chunk, lanes=lanes))
        self.stops = lambda kind: False
        self.stood, self.go, self.prefills = threading.Event(), threading.Event(), []

    def _pass(self, kind):
        if self.stops(kind):
            self.stood.set()
            assert self.go.wait(SECONDS)

    def prefill(self, ids, lane=0, sight=None):
        self._pass("prefill")
        self.prefills.append(tuple(ids))
        return self._backend.prefill(ids, lane, sight)

    def cycle(self, asked):
        self._pass("cycle")
        return self._backend.cycle(asked)


def prompting(rank, served, *, begun=True, deadline=None):
    work = Work(lambda: iter(()), priority=rank, deadline=deadline)
    work.alone, work.prompting, work.interruptible, work.served = False, True, True, served
    work.steps = iter(()) if begun else None
    return work


def until(done):
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_long_prompt_goes_on_while_short_ones_come():
    held, stop, answered = Held(2), threading.Event(), []

    def short(number):
        while not stop.is_set():
            with suppress(QueueFullError):
                answered.append(planner.plan([1, 2, 3], max_new_tokens=1, caller=f"short {number}"))

    with Planner(held, None, prompt_share=1.0, queue=64) as planner:
        threads = [threading.Thread(target=short, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: len(answered) > 4)
        before = len(answered)
        assert planner.stream(LONG, max_new_tokens=2, caller="long").result(SECONDS)
        made = len(answered) - before
        stop.set()
        for thread in threads:
            thread.join()
    assert made < 4 * len(LONG) // 4  # about as many as the long one has chunks


def test_of_several_prompts_the_most_urgent_then_the_one_that_waits_longest():
    new, old, urgent = prompting(0, 2.0, begun=False), prompting(0, 1.0), prompting(3, 3.0)
    assert turn_of([new, old, urgent], 3, 8, Share(1.0)).first == [urgent]
    assert turn_of([new, old], 2, 8, Share(1.0)).first == [old]
    old.served = 4.0
    assert turn_of([new, old], 2, 8, Share(1.0)).first == [new]


def test_a_prompt_that_has_not_begun_gives_its_place_to_an_urgent_one():
    held = Held(2)
    held.stops = lambda kind: kind == "cycle"
    with Planner(held, None) as planner:
        first = planner.stream([1, 2, 3], max_new_tokens=90, speculative=False, priority=5)
        assert held.stood.wait(SECONDS)
        planner._engine._share.took(1e6, 0.0)  # no prompt that is not urgent has a step
        second = planner.stream(LONG, max_new_tokens=2)
        held.go.set()
        until(lambda: second._job.ticket.state == "running")
        urgent = planner.stream([3, 4], max_new_tokens=2, priority=9)
        assert urgent.result(SECONDS).tokens
        assert not first._job.ticket.done
        assert (first._job.passed, second._job.passed) == (0, 1)
        second.cancel()
        assert first.plan.finish_reason == "length"


@pytest.mark.parametrize("ends", ["deadline", "cancelled"])
def test_a_prompt_that_waits_for_another_ends_in_time(ends):
    first, second = (
        prompting(0, 1.0),
        prompting(0, 2.0, deadline=time.perf_counter() - 1 if ends == "deadline" else None),
    )
    second.cancelled = ends == "cancelled"
    assert turn_of([first, second], 2, 8, Share(1.0)).works == (second,)


def test_a_prompt_that_waits_for_its_share_ends_in_time():
    held = Held(2)
    held.stops = lambda kind: kind == "cycle"
    with Planner(held, None) as planner:
        first = planner.stream([1, 2, 3], max_new_tokens=60, speculative=False)
        assert held.stood.wait(SECONDS)
        planner._engine._share.took(1e6, 0.0)
        second = planner.stream(LONG, max_new_tokens=2)
        held.go.set()
        until(lambda: second._job.ticket.state == "running")
        second.cancel()
        assert second.result(SECONDS).finish_reason == "cancelled"
        assert not first._job.ticket.done
        first.cancel()


def test_an_urgent_prompt_leaves_one_step_to_be_made_up_for():
    share = Share(0.5)
    for _ in range(50):
        share.took(1.0, 0.01)
    share.took(0.0, 1.0)
    assert share.open


def test_what_is_owed_to_cycles_ends_with_the_last_that_decodes():
    share, decoding, prompts = Share(0.5), prompting(0, 0.0), [prompting(0, at) for at in (1.0, 2.0)]
    decoding.prompting = False
    share.took(5.0, 0.0)
    assert turn_of([decoding, *prompts], 3, 8, share).first == []
    assert turn_of(prompts, 3, 8, share).first == prompts[:1]
    assert turn_of([decoding, *prompts], 3, 8, share).first == prompts[:1]


@pytest.mark.parametrize("lanes", [1, 2])
def test_many_small_works_of_the_engine_leave_each_other_turn_to_requests(lanes):
    held, done = Held(lanes), []
    held.stops = lambda kind: kind == "cycle"
    with Planner(held, None) as planner:
        slow = planner.stream([1, 2, 3], max_new_tokens=40, speculative=False)
        assert held.stood.wait(SECONDS)

        def small():
            planner._engine.call(lambda: done.append(len(slow._job._made)))

        threads = [threading.Thread(target=small) for _ in range(9)]
        for thread in threads:
            thread.start()
        until(lambda: planner.waiting == len(threads))
        held.stops = lambda kind: False
        held.go.set()
        for thread in threads:
            thread.join()
    assert len(done) == 9
    assert all(after > before for before, after in pairwise(done))


def test_small_works_of_the_engine_make_nobody_more_urgent():
    held = Held(1)
    held.stops = lambda kind: kind == "cycle"
    with Planner(held, None) as planner:
        slow = planner.stream([1, 2, 3], max_new_tokens=40, speculative=False)
        assert held.stood.wait(SECONDS)
        threads = [threading.Thread(target=planner._engine.call, args=(lambda: None,)) for _ in range(9)]
        for thread in threads:
            thread.start()
        until(lambda: planner.waiting == len(threads))
        held.stops = lambda kind: False
        held.go.set()
        for thread in threads:
            thread.join()
        urgent = planner.stream([4, 5], max_new_tokens=2, priority=1)
        assert urgent.result(SECONDS).tokens
        assert not slow._job.ticket.done
        assert slow._job.passed == 1


def test_a_planner_that_is_closed_ends_candidates_whose_prompt_has_just_ended():
    held = Held(2, chunk=64)
    with Planner(held, None, prompt_share=1.0) as planner:
        planner.stream([1, 2, 3], max_new_tokens=90, speculative=False).cancel()
        first = planner.stream([1, 2, 3], max_new_tokens=90, speculative=False)
        next(first)
        group = []
        held.stops = lambda kind: kind == "cycle" and any(work.ticket.done for work in group)
        streams = planner.streams(LONG, 4, temperature=0.9, max_new_tokens=90, speculative=False)
        until(lambda: group.extend(work for work in planner._engine._running if work.tickets[1:]) or group)
        assert held.stood.wait(SECONDS)
        threading.Timer(0.2, held.go.set).start()
        planner.close()
    assert {stream.plan.finish_reason for stream in streams} == {"cancelled"}


def test_a_stream_that_nobody_awaited_can_be_cancelled():
    async def main(planner):
        streams = planner.astreams(LONG, 4, temperature=0.9, max_new_tokens=60)
        streams[3].cancel()
        await anext(streams[0])
        for stream in streams[:3]:
            stream.cancel()
        for stream in streams:
            await stream.aclose()
        assert planner._engine._running == [] or all(work.ticket.done for work in planner._engine._running)
        assert all([(await stream.result()).finish_reason == "cancelled" for stream in streams])

    with Planner(Held(4), None) as planner:
        asyncio.run(main(planner))


def test_a_prompt_of_candidates_is_looked_up_once():
    with Planner(Held(4), None) as planner:
        planner.plan(LONG, n=4, temperature=0.9, max_new_tokens=2)
        assert (planner.prefixes.hits, planner.prefixes.misses) == (0, 1)


def test_what_ends_has_ended_before_the_others_cycle():
    streams, done = [], []

    class Cancelling(Held):
        joint = 0

        def cycles(self, asked):
            found = super().cycles(asked)
            if len(asked) > 1:
                self.joint += 1
                streams[0].cancel()
            return found

        def cycle(self, asked):
            if self.joint == 1:
                done.append(streams[0]._ticket.done)
            return super().cycle(asked)

    held = Cancelling(2)
    held.stops = lambda kind: len(streams) < 2
    with Planner(held, None, prompt_share=1.0) as planner:
        streams.extend(planner.stream([1, 2, n], max_new_tokens=40, caller=str(n)) for n in (3, 4))
        held.go.set()
        plans = [stream.result(SECONDS) for stream in streams]
    assert [plan.finish_reason for plan in plans] == ["cancelled", "length"]
    assert held.joint == 1
    assert done[0]


def test_a_prompt_waits_where_a_deadline_is_near():
    decoding, near, urgent = (prompting(0, 0.0) for _ in range(3))
    decoding.prompting = near.prompting = False
    near.hurried = lambda: True
    newcomer = prompting(0, 1.0)
    assert turn_of([decoding, newcomer], 2, 8, Share(1.0)).first == [newcomer]
    assert turn_of([near, newcomer], 2, 8, Share(1.0)).first == []
    urgent.priority = 1
    assert turn_of([near, urgent], 2, 8, Share(1.0)).first == [urgent]


def test_a_deadline_in_company_is_overshot_by_less_than_a_cycle():
    class Timed(Held):
        def cycle(self, asked):
            time.sleep(0.1)
            return super().cycle(asked)

        def prefill(self, ids, lane=0, sight=None):
            time.sleep(0.2)
            return super().prefill(ids, lane, sight)

    over, stop = [], threading.Event()

    def other():
        while not stop.is_set():
            planner.plan([1, 2], max_new_tokens=6, caller="other")

    with Planner(Timed(2), None, fallback=False, prompt_share=1.0) as planner:
        planner.plan([1, 2], max_new_tokens=6)
        thread = threading.Thread(target=other)
        thread.start()
        for bound in (1.5, 1.6, 1.7, 1.8, 1.9):
            began = time.perf_counter()
            assert planner.plan([1, 2], max_new_tokens=140, deadline=bound).finish_reason == "deadline"
            over.append(time.perf_counter() - began - bound)
        stop.set()
        thread.join()
    assert sorted(over)[-2] < 0.15  # of 0.2 s; one may be held up by a busy machine
