"""A planner of several lanes: requests run together, urgent ones at once, each with what it has alone."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest
from golden_pairs import ENGINE, backend, golden

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.loop import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError, QueueFullError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner.job import Work
from edge_dflash.runner.turns import Share, turn_of

NAME = "qwen3_5"


def prompt_of(number):
    prompt = golden(NAME)["p1.prompt"].tolist()
    return [1 + number, *prompt[: 3 + 5 * number % 23]]


class Watched(Delegate):
    """Counts the lanes of each joint cycle; the first one waits for ``go``."""

    def __init__(self, lanes, chunk=16):
        super().__init__(backend(NAME, ENGINE, prefill_chunk=chunk, lanes=lanes))
        self.together, self.began, self.go, self.log = [], threading.Event(), threading.Event(), []
        self.go.set()

    def cycle(self, asked):
        self.began.set()
        assert self.go.wait(60)
        self.log.append(("cycle", asked.lane))
        return self._backend.cycle(asked)

    def cycles(self, asked):
        self.together.append(len(asked))
        return super().cycles(asked)

    def prefill(self, ids, lane=0, sight=None):
        self.log.append(("prefill", lane))
        return self._backend.prefill(ids, lane, sight)


def truth(number, **options):
    return generate(backend(NAME, ENGINE), prompt_of(number), Options(**options)).tokens


def test_requests_run_together_and_have_what_they_have_alone():
    asked = [{"max_new_tokens": 12 + n, "temperature": 0.8 * (n % 2), "seed": n} for n in range(8)]
    watched = Watched(4)
    with Planner(watched, None, prompt_share=1.0) as planner:
        streams = [planner.stream(prompt_of(n), caller=f"c{n % 3}", **options) for n, options in enumerate(asked)]
        found = [stream.plan.tokens for stream in streams]
    assert found == [truth(n, **options) for n, options in enumerate(asked)]
    assert max(watched.together) == 4


def test_callers_that_come_and_go_differ_in_nothing():
    """Threads with random priorities, deadlines and cancels: what was committed is what comes alone."""
    wrong, ends = [], []

    def caller(number):
        pick = random.Random(number)
        for turn in range(4):
            options = {"max_new_tokens": pick.randint(1, 20), "temperature": pick.choice((0.0, 0.9)), "seed": turn}
            limit = pick.choice((None, None, 0.01, 0.2))
            with suppress(QueueFullError):
                stream = planner.stream(
                    prompt_of(number), priority=pick.randint(-2, 2), caller=str(number), deadline=limit, **options
                )
                if pick.random() < 0.3:
                    with suppress(StopIteration):
                        next(stream)
                    stream.cancel()
                plan = stream.plan
                ends.append(plan.finish_reason)
                if plan.tokens != truth(number, **options)[: len(plan.tokens)]:
                    wrong.append((number, turn))

    watched = Watched(3)
    with Planner(watched, None, prompt_share=1.0) as planner:
        threads = [threading.Thread(target=caller, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert wrong == []
    assert len(ends) >= 20
    assert max(watched.together) >= 2


def test_an_urgent_request_takes_a_lane_away_and_gives_it_back():
    watched, wanted = Watched(2), truth(5, max_new_tokens=4)
    watched.go.clear()
    with Planner(watched, None) as planner:
        slow = [planner.stream(prompt_of(n), max_new_tokens=40, speculative=False) for n in range(2)]
        assert watched.began.wait(60)
        urgent = planner.stream(prompt_of(5), max_new_tokens=4, priority=5)
        watched.go.set()
        assert urgent.plan.tokens == wanted
        assert not any(stream._job.ticket.done for stream in slow)
        assert [stream.plan.tokens for stream in slow] == [truth(n, max_new_tokens=40) for n in range(2)]


def test_between_two_cycles_runs_one_chunk_of_a_newcomer_at_most():
    watched = Watched(2, chunk=2)
    watched.go.clear()
    with Planner(watched, None, prompt_share=1.0) as planner:
        first = planner.stream(prompt_of(0), max_new_tokens=60, speculative=False)
        assert watched.began.wait(60)
        began = len(watched.log)
        second = planner.stream(prompt_of(4), max_new_tokens=2)
        watched.go.set()
        assert (second.plan.tokens, first.plan.tokens) == (
            truth(4, max_new_tokens=2),
            truth(0, max_new_tokens=60, speculative=False),
        )
    kinds = [kind for kind, lane in watched.log[began:] if (kind, lane) != ("cycle", 1)]
    assert kinds.count("prefill") == -(-len(prompt_of(4)) // 2)
    assert "prefill prefill" not in " ".join(kinds)


def test_prompts_have_their_share_of_the_time():
    share = Share(0.25)
    share.took(2.0, 1.0)
    for _ in range(5):
        assert not share.open
        share.took(0.0, 1.0)
    share.took(0.0, 1.5)
    assert share.open
    share.took(0.0, 0.001)  # what a turn takes besides is nobody's
    assert share.open
    whole = Share(1.0)
    whole.took(9.0, 0.1)
    assert whole.open


def test_what_is_over_ends_before_anything_else_runs():
    works = [Work(lambda: iter(()), priority=rank) for rank in (0, 5, 0)]
    for work in works:
        work.alone, work.interruptible = False, True
    assert turn_of(works, 2, 8, Share(1.0)).works == (works[1], works[0])
    works[2].over = True
    assert turn_of(works, 2, 8, Share(1.0)).works == (works[2],)


def test_one_that_fails_in_a_joint_pass_fails_alone_and_a_lost_pass_fails_all_of_it():
    class Failing(Watched):
        fail = False

        def cycles(self, asked):
            if self.fail:
                self.fail = False
                raise BackendError("the pass was lost")
            return super().cycles(asked)

    failing = Failing(2)
    failing.go.clear()
    with Planner(failing, None) as planner:
        streams = [planner.stream(prompt_of(n), max_new_tokens=20, speculative=False) for n in range(2)]
        assert failing.began.wait(60)
        failing.fail = True
        failing.go.set()
        errors = []
        for stream in streams:
            with pytest.raises(BackendError, match="the pass was lost") as caught:
                _ = stream.plan
            errors.append(caught.value)
        assert errors[0] is not errors[1]
        assert planner.plan(prompt_of(3), max_new_tokens=5).tokens == truth(3, max_new_tokens=5)


def test_a_turn_of_a_session_goes_on_where_its_lane_was_given_away():
    with Planner(Watched(2), None) as planner:
        session = planner.session()
        first = session.plan(prompt_of(1), max_new_tokens=6)
        others = [planner.stream(prompt_of(n), max_new_tokens=12) for n in (2, 3, 4)]
        second = session.plan([9, 9], max_new_tokens=6)
        assert [stream.plan.tokens for stream in others] == [truth(n, max_new_tokens=12) for n in (2, 3, 4)]
    whole = [*prompt_of(1), *first.tokens, 9, 9]
    assert second.tokens == generate(backend(NAME, ENGINE), whole, Options(max_new_tokens=6)).tokens
    assert second.reused_tokens > 0


@pytest.mark.parametrize(
    ("given", "said"),
    [({"prompt_share": 0.0}, "prompt_share is 0.0"), ({"draft": 2}, "draft is unknown; did you mean drafts")],
)
def test_settings_are_checked(given, said):
    with pytest.raises(RequestError, match=said):
        Planner(Watched(1), None, **given)


def test_a_planner_that_is_closed_ends_all_that_run():
    planner, began = Planner(Watched(3), None), time.perf_counter()
    streams = [planner.stream(prompt_of(n), max_new_tokens=90, speculative=False) for n in range(5)]
    next(streams[0])
    planner.close()
    assert time.perf_counter() - began < 30
    assert all(stream._job.ticket.done for stream in streams)
