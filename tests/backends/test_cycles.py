"""What users run is what is timed: every way to ask for a plan reaches the backend's own cycles, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE, client_of, fake_service
from text_support import thinking_tokenizer

from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.backend import Cycle
from edge_dflash.decode.cycle import host_cycle, host_cycles
from edge_dflash.planner import Planner

NEW = 24
SHORT = "ab"
LONG = "Take the red mug from the table."  # several chunks


class Counting:
    """A backend that counts what is asked of it from outside."""

    def __init__(self, shape):
        self.inner = FakeBackend(shape, right=lambda position: position % shape.block_size)
        self.calls = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def prefill(self, ids, lane=0, sight=None):
        self.calls.append("prefill")
        return self.inner.prefill(ids, lane, sight)

    def propose(self, anchor, lane=0):
        self.calls.append("propose")
        return self.inner.propose(anchor)

    def verify(self, ids, lane=0, parents=None):
        self.calls.append("verify")
        return self.inner.verify(ids)

    def cycle(self, asked) -> Cycle:
        self.calls.append("cycle" if asked.drafting else "plain")
        return host_cycle(self.inner, asked)

    def cycles(self, asked):
        return host_cycles(self, asked)

    def only(self, plan, kind="cycle"):
        """One call a cycle since the last time, beside chunks of prompts and moves of state."""
        calls, self.calls = self.calls, []
        assert len(plan.tokens) == NEW or plan.finish_reason == "stop"
        assert [call for call in calls if call != "prefill"] == [kind] * len(plan.accept_lengths)
        return len(calls) - len(plan.accept_lengths)


@pytest.fixture
def tokenizer(tmp_path):
    return thinking_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def backend(tokenizer):
    return Counting(replace(TEXT_SHAPE, vocab_size=262))


@pytest.fixture
def planner(backend, tokenizer):
    with Planner(backend, tokenizer, [tokenizer.eos_token_id], fallback=False) as planner:
        yield planner


WAYS = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "seed": 3},
    "with a deadline": {"deadline": 60.0},
    "with a stop text": {"stop": "\x00\x01\x02"},
    "of a form": {"regex": "[a-z ]{60,80}"},
    "of a form, sampled": {"regex": "[a-z ]{60,80}", "temperature": 0.8, "seed": 3},
    "thinking": {"thinking": True},
    "of a form behind thinking": {"thinking": True, "regex": "[a-z ]{60,80}"},
    "relaxed": {"thinking": True, "relaxed": Relaxation((260,), top_k=5, margin=0.5)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", [SHORT, LONG])
def test_a_plan_runs_in_cycles(backend, planner, task, way):
    chunks = backend.only(planner.plan(task, max_new_tokens=NEW, **WAYS[way]))
    assert chunks == -(-len(planner.encode(task, thinking="thinking" in WAYS[way])) // 8)


def test_plain_decoding_runs_in_plain_cycles(backend, planner):
    backend.only(planner.plan(SHORT, max_new_tokens=NEW, speculative=False), "plain")


def test_a_stream_runs_in_cycles(backend, planner):
    with planner.stream(LONG, max_new_tokens=NEW) as stream:
        increments = list(stream)
    backend.only(stream.plan)
    assert len(increments) == 1 + len(stream.plan.accept_lengths)  # chunks of the prompt are not given


def test_sessions_run_in_cycles_whatever_ran_in_between(backend, planner):
    one, other = planner.session("Be brief."), planner.session()
    assert backend.only(one.plan(LONG, max_new_tokens=NEW)) > 0
    backend.only(one.plan(SHORT, max_new_tokens=NEW))
    backend.only(other.plan(SHORT, max_new_tokens=NEW))  # takes the place
    backend.only(one.plan(SHORT, max_new_tokens=NEW))  # and comes back
    fork = one.fork()
    backend.only(fork.plan(SHORT, max_new_tokens=NEW))
    backend.only(one.plan(LONG, max_new_tokens=NEW))
    assert planner.backend is backend


def test_the_service_runs_in_cycles(backend, tokenizer, tmp_path):
    service = fake_service(tmp_path, backend, tokenizer)
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": NEW}
    with client_of(service) as client:
        for more in ({}, {"edge_dflash": {"regex": "[a-z ]{60,80}"}}, {"temperature": 0.8, "seed": 1}):
            backend.calls.clear()
            found = client.post("/v1/chat/completions", json=body | more).json()
            assert found["usage"]["completion_tokens"] == NEW
            assert set(backend.calls) == {"prefill", "cycle"}
            assert backend.calls.count("cycle") == len(found["edge_dflash"]["accept_lengths"])
