"""Log-probabilities of a prompt: what decoding gives the same tokens, alone and next to others, whole or not at all."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from fakes import SHAPE, TEXT_SHAPE, FakeBackend
from golden_pairs import ENGINE, FLOAT32, NAMES, backend, golden
from planner_support import Gate, Slow
from service_support import until
from text_support import thinking_tokenizer

from edge_dflash import ContextError, QueueFullError, RequestCancelledError, RequestError, Score
from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.options import MOST_TOLD, Options, admit
from edge_dflash.errors import BackendError
from edge_dflash.planner import Planner as Opened
from edge_dflash.runner.observer import Observer

NEW = 21


def Planner(inner, tokenizer=None, stops=(), **settings):
    return Opened(inner, tokenizer, stops, **settings)


def prompt(name):
    return tuple(golden(name)["p1.prompt"].tolist())


@cache
def answered(name, precision=ENGINE):
    with Planner(backend(name, precision)) as planner:
        return planner.plan(prompt(name), max_new_tokens=NEW, logprobs=3)


def whole(name):
    return (*prompt(name), *answered(name).tokens)


@cache
def alone(name, top=0):
    with Planner(backend(name, ENGINE)) as planner:
        return planner.score(whole(name), logprobs=top)


class Counted(Delegate):
    """Writes down its passes, and the most rows of a verify."""

    def __init__(self, inner):
        super().__init__(inner)
        self.passes, self.rows = [], []

    def propose(self, anchor, lane=0):
        self.passes.append("propose")
        return super().propose(anchor, lane)

    def prefill(self, ids, lane=0, sight=None):
        self.passes.append(f"prefill {len(ids)}")
        return super().prefill(ids, lane, sight)

    def verify(self, ids, lane=0, parents=None):
        self.passes.append("verify")
        self.rows.append(len(ids))
        return super().verify(ids, lane, parents)


@pytest.mark.parametrize("name", NAMES)
class TestValues:
    def test_a_score_is_what_decoding_found_of_the_same_tokens(self, name):
        plan, score = answered(name), alone(name, 3)
        assert score.tokens == whole(name)
        assert len(score.logprobs) == len(score.tokens) - 1
        assert score.logprobs[-NEW:] == plan.logprobs
        assert math.fsum(one.logprob for one in score.logprobs) == score.total
        assert score.perplexity == math.exp(-score.total / len(score.logprobs))

    def test_each_is_the_log_softmax_of_a_prefill(self, name):
        inner, ids = backend(name, FLOAT32), whole(name)
        with Planner(backend(name, FLOAT32)) as planner:
            score = planner.score(ids, logprobs=20)
        for at, one in enumerate(score.logprobs, 1):
            inner.reset()
            row = inner.prefill(ids[:at]).logits()[0].astype(np.float64)
            right = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert one.token == ids[at]
            assert abs(one.logprob - right[one.token]) < 5e-5
            assert [other.logprob for other in one.top] == pytest.approx(np.sort(right)[:-21:-1], abs=5e-5)

    def test_no_drafter_is_asked_and_every_row_of_a_verify_is_used(self, name):
        counted = Counted(backend(name, ENGINE))
        with Planner(counted, fallback=False) as planner:
            assert planner.score(whole(name)).logprobs == tuple(replace(one, top=()) for one in alone(name, 3).logprobs)
        rows, left = counted.shape.verify_rows, len(whole(name)) - 2
        assert counted.rows == [min(rows, left - done) for done in range(0, left, rows)]
        assert counted.passes == ["prefill 1", *["verify"] * len(counted.rows)]

    def test_an_answer_goes_on_behind_it(self, name):
        free = Planner(backend(name, FLOAT32))
        plan = free.plan(prompt(name), max_new_tokens=NEW, logprobs=0)
        both = free.plan(prompt(name), max_new_tokens=NEW, logprobs=0, prompt_logprobs=True)
        assert both.tokens == plan.tokens
        assert [one.logprob for one in both.logprobs] == pytest.approx([one.logprob for one in plan.logprobs], abs=5e-5)
        assert (both.prompt_tokens, both.reused_tokens) == (len(prompt(name)), 0)
        assert [one.token for one in both.prompt_logprobs] == list(prompt(name))
        assert both.prompt_logprobs[0].logprob is math.nan
        assert sum(both.accept_lengths) == NEW
        assert both.timings.first_token_seconds > 0
        free.close()


class TestOthers:
    def test_same_bits_next_to_others_with_prefixes_and_sessions(self):
        name = NAMES[1]
        with Planner(backend(name, ENGINE, lanes=3), prefix_bytes=1 << 24) as planner:
            session = planner.session()
            session.plan(prompt(name), max_new_tokens=4)
            streams = [planner.stream(prompt(name)[:n], max_new_tokens=60, seed=n, temperature=n % 2) for n in (5, 9)]
            scores = planner.score([list(whole(name))] * 3 + [list(prompt(name))])
            stats = planner.prefixes
            del streams
        assert [one.logprobs for one in scores[:3]] == [alone(name).logprobs] * 3
        assert scores[3].logprobs == alone(name).logprobs[: len(prompt(name)) - 1]
        assert stats.misses <= 3  # those that scored looked for nothing

    def test_several_share_their_passes(self):
        name, lanes, found = NAMES[1], [], []

        class Watching(Observer):
            def passed(self, count, rows):
                lanes.append(count)

        gate = Gate(backend(name, ENGINE, lanes=3))
        with Planner(gate, observer=Watching()) as planner:
            thread = threading.Thread(target=lambda: found.extend(planner.score([list(whole(name))] * 3)))
            thread.start()
            until(lambda: gate.reached.is_set() and len(planner._engine._running) + planner.waiting == 3)
            gate.open.set()
            thread.join(60)
        assert max(lanes) == 3
        assert [one.logprobs for one in found] == [alone(name).logprobs] * 3

    def test_a_more_urgent_request_takes_the_lane_in_the_middle(self):
        name, gate = NAMES[1], Gate(backend(NAMES[1], ENGINE), free=4)
        with Planner(gate) as planner:
            found = []
            thread = threading.Thread(target=lambda: found.append(planner.score(whole(name))))
            thread.start()
            assert gate.reached.wait(60)
            urgent = planner.stream(prompt(name), max_new_tokens=9, priority=5)
            gate.open.set()
            thread.join(60)
            assert urgent.plan.tokens == answered(name).tokens[:9]
        assert found[0].logprobs == alone(name).logprobs

    def test_nothing_learns_of_it(self, tmp_path):
        seen = []

        class Watching(Observer):
            def step(self, step):
                seen.append(step)

        with Planner(FakeBackend(), observer=Watching(), record=tmp_path / "answers") as planner:
            pace, before = planner._engine.pace, planner._engine.pace.drafts
            planner.score(list(range(1, 40)))
            assert not pace._cycles
            assert pace.told.longest > 0
            assert pace.drafts == before
        assert all(not step.tokens and not step.drafts for step in seen)
        assert sum(len(step.prompt) for step in seen) == 39

    def test_nothing_is_recorded(self, tmp_path):
        with _texts(tmp_path, record=tmp_path / "answers") as planner:
            planner.plan("hello", prompt_logprobs=True, logprobs=0, max_new_tokens=3)
            planner.score("hello")
            recorded = planner.recorded
        assert recorded == type(recorded)()


def _texts(tmp_path, inner=None, **settings):
    tokenizer = thinking_tokenizer(tmp_path / "words")
    return Planner(inner or FakeBackend(TEXT_SHAPE), tokenizer, (tokenizer.eos_token_id,), **settings)


class TestTexts:
    def test_a_text_is_used_as_it_is_and_control_tokens_by_name(self, tmp_path):
        with _texts(tmp_path) as planner:
            text = "hi<|end|>you"
            score = planner.score(text)
            assert score.tokens == planner.encode(text, raw=True)
            assert planner.tokenizer.eos_token_id in score.tokens  # and does not end it
            messages = [{"role": "user", "content": "hello"}]
            assert planner.score(messages).tokens == planner.encode(messages)
            assert [one.tokens for one in planner.score([text, "hello"])] == [
                planner.encode(one, raw=True) for one in (text, "hello")
            ]
            assert b"".join(one.text for one in score.logprobs) == text[1:].encode()

    def test_a_known_prefix_hides_nothing_of_it(self, tmp_path):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        with _texts(tmp_path, prefix_bytes=1 << 20) as planner, _texts(tmp_path / "other") as other:
            assert planner.plan(messages, max_new_tokens=2).reused_tokens == 0
            assert planner.plan(messages, max_new_tokens=2).reused_tokens > 0
            score = planner.score(messages)
            assert len(score.logprobs) == len(score.tokens) - 1
            assert score.logprobs == other.score(messages).logprobs
            assert planner.prefixes.entries == 1

    def test_stop_texts_and_forms_begin_behind_the_prompt(self, tmp_path):
        with _texts(tmp_path) as planner:
            how = {"raw": True, "prompt_logprobs": True, "logprobs": 0, "max_new_tokens": 40}
            plan = planner.plan("a stop b", stop="stop", **how)
            assert len(plan.prompt_logprobs) == 8
            assert plan.tokens
            formed = planner.plan("x", **{**how, "raw": False}, regex="[ab]{6}")
            assert set(formed.text) <= {"a", "b"}
            assert len(formed.text) == 6

    @pytest.mark.parametrize(
        ("task", "why"),
        [
            ("", "empty"), ("x", "one token"), ([5], "one token"), ([], "no tokens"), ([3, 258], "outside the voc"),
            ([3, -1], "outside"), ([3, True], "no token id"), ([[3, 4], [5]], "one token"), (["ab", 3], "no token id"),
            ({"a": 1}, "of type dict"), (7, "of type int"), (b"ab", "of type bytes"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], "image"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_scored(self, tmp_path, task, why):
        with _texts(tmp_path) as planner, pytest.raises(RequestError, match=why):
            planner.score(task)

    def test_options_that_do_not_go_with_it(self, tmp_path):
        with _texts(tmp_path) as planner:
            for given, why in (
                ({"prompt_logprobs": True}, "give logprobs too"),
                ({"max_new_tokens": 0}, "max_new_tokens is 0"),
                ({"max_new_tokens": 0, "logprobs": 3}, "max_new_tokens is 0"),
            ):
                with pytest.raises(RequestError, match=why):
                    planner.plan("hello", **given)
            with pytest.raises(RequestError, match="n is 2"):
                planner.plan("hello", n=2, temperature=1.0, logprobs=0, prompt_logprobs=True)
            with pytest.raises(RequestError, match="session"):
                planner.session().plan("hello", logprobs=0, prompt_logprobs=True)
            for logprobs in (-1, 21, 1.5, None):
                with pytest.raises(RequestError):
                    planner.score("hello", logprobs=logprobs)


class TestBounds:
    def test_a_huge_prompt_is_refused_at_once(self):
        with Planner(FakeBackend()) as planner:
            began = time.perf_counter()
            with pytest.raises(ContextError, match=r"ends at token 100000, the usable context is 60 tokens"):
                planner.score([7] * 100_000)
            assert time.perf_counter() - began < 2
            assert len(planner.score([7] * 59).logprobs) == 58
            with pytest.raises(ContextError):
                planner.score([7] * 60)
            assert planner._engine.backend.passes.count("prefill") == 1

    def test_what_is_told_of_a_prompt_is_bounded(self):
        with Planner(FakeBackend(replace(SHAPE, max_context=20_000, prefill_chunk=64))) as planner:
            most = MOST_TOLD // 21
            with pytest.raises(RequestError, match=rf"{most + 1} tokens with 20 alternatives .* at most {MOST_TOLD}"):
                planner.score([7] * (most + 1), logprobs=20)
            assert planner._engine.backend.passes.count("prefill") == 0
            admit(planner.shape, [7] * most, Options(logprobs=20, prompt_logprobs=True, max_new_tokens=0))

    def test_no_more_than_a_pass_of_logits_is_held(self):
        held = []

        class Rows:
            def __init__(self, rows):
                self._rows = rows
                held.append(len(rows))

            def __getattr__(self, name):
                return getattr(self._rows, name)

            def __len__(self):
                return len(self._rows)

            def __del__(self):
                held.append(-len(self._rows))

        class Watched(Delegate):
            most = 0

            def verify(self, ids, lane=0, parents=None):
                rows = Rows(super().verify(ids, lane))
                self.most = max(self.most, sum(held))
                return rows

        watched = Watched(FakeBackend(replace(SHAPE, max_context=2100, prefill_chunk=64)))
        with Planner(watched) as planner:
            assert len(planner.score([3, 5] * 1000).logprobs) == 1999
        assert watched.most <= 2 * SHAPE.verify_rows

    def test_a_deadline_in_the_middle_gives_no_half(self):
        with Planner(Slow(FakeBackend(replace(SHAPE, max_context=2100)), 0.005)) as planner:
            planner.score([3, 4, 5, 6])  # a time is known
            began = time.perf_counter()
            with pytest.raises(RequestCancelledError, match=r"deadline.*all 2000 tokens"):
                planner.score([3, 5] * 1000, deadline=0.15)
            assert time.perf_counter() - began < 1.0
            plan = planner.plan([3, 5] * 1000, prompt_logprobs=True, logprobs=0, deadline=0.1)
            assert (plan.finish_reason, plan.prompt_logprobs, plan.tokens) == ("deadline", (), ())
            with pytest.raises(RequestCancelledError):
                planner.score([[3, 5] * 40] * 20, deadline=0.1)
            assert planner.score([3, 4, 5, 6]).tokens == (3, 4, 5, 6)

    def test_a_cancel_in_the_middle_leaves_the_lane_to_the_next(self):
        gate = Gate(free=3)
        with Planner(gate) as planner:
            stream = planner.stream([3, 5] * 20, prompt_logprobs=True, logprobs=0, max_new_tokens=0)
            assert gate.reached.wait(60)
            stream.cancel()
            gate.open.set()
            assert stream.plan.finish_reason == "cancelled"
            with pytest.raises(RequestCancelledError, match="cancelled"):
                Score.of(stream.plan)
            assert planner.waiting == 0
            assert planner.score([9, 8, 7]).tokens == (9, 8, 7)

    def test_a_full_queue_is_waited_for_by_who_has_some_running(self):
        with Planner(FakeBackend(), queue=2) as planner:
            assert len(planner.score([[one, 7, 9] for one in range(40)])) == 40
        gate = Gate()
        with Planner(gate, queue=1) as planner:
            streams = [planner.stream([one, 2], caller=str(one), max_new_tokens=2) for one in (1,)]
            assert gate.reached.wait(60)
            streams.append(planner.stream([5, 2], max_new_tokens=2))
            with pytest.raises(QueueFullError):
                planner.score([3, 4, 5])
            gate.open.set()

    def test_logits_that_are_no_numbers_end_it_by_name(self):
        class Broken(Delegate):
            def verify(self, ids, lane=0, parents=None):
                rows = super().verify(ids, lane)
                rows.logits()[:] = -np.inf
                return rows

        with Planner(Broken(FakeBackend())) as planner, pytest.raises(BackendError, match="logits are no numbers"):
            planner.score([3, 4, 5, 6, 7])


def test_relaxation_and_plain_decoding_change_nothing(tmp_path):
    name = NAMES[1]
    how = {"prompt_logprobs": True, "logprobs": 0, "max_new_tokens": 0}
    with Planner(backend(name, ENGINE)) as planner:
        found = planner.plan(whole(name), speculative=False, temperature=1.5, top_k=3, seed=9, **how)
    assert found.prompt_logprobs[1:] == alone(name).logprobs
    with _texts(tmp_path) as planner:
        usual = planner.plan("hello", raw=True, **how)
        assert planner.plan("hello", raw=True, relaxed=Relaxation((3,)), **how).prompt_logprobs == usual.prompt_logprobs


def test_a_score_is_json_free_values():
    score = Score((1, 2), (replace(alone(NAMES[0]).logprobs[0], logprob=-1e6),), None)
    assert score.perplexity == math.inf
    assert json.dumps(score.total) == "-1000000.0"
