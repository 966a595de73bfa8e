from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
from fakes import SHAPE, TEXT_SHAPE, FakeBackend
from planner_support import Gate
from text_support import thinking_tokenizer, write_tokenizer

from edge_dflash.errors import ContextError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.result import Increment, PlanTimings, json_object
from edge_dflash.text.tokenizer import Tokenizer

PROMPT = (3, 1, 4)


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.open(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def bare(tmp_path):
    """A tokenizer without a chat template."""
    return Tokenizer.open(write_tokenizer(tmp_path / "bare", template=None))


def scripted(tokenizer, answer, prompt):
    """A planner whose model answers ``answer`` and its end-of-text token."""
    ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    backend = FakeBackend(TEXT_SHAPE, script=ids, script_at=len(prompt))
    return Planner(backend, tokenizer, [tokenizer.eos_token_id])


def test_speculative_and_plain_plans_agree():
    for right in range(SHAPE.block_size):
        planner = Planner(FakeBackend(right=lambda position, n=right: n), None)
        fast = planner.plan(PROMPT, max_new_tokens=20)
        slow = planner.plan(PROMPT, max_new_tokens=20, speculative=False)
        assert fast.tokens == slow.tokens
        assert (fast.speculative, slow.speculative) == (True, False)
        assert fast.accept_lengths[0] == right + 1
        assert set(slow.accept_lengths) == {1}
        assert slow.accept_length == 1.0
    backend, asked = FakeBackend(right=lambda position: next(asked)), iter((0, 3, 1, 2))
    plan = Planner(backend, None).plan(PROMPT, max_new_tokens=11)
    assert (plan.accept_lengths, plan.accept_length) == ((1, 4, 2, 3), 2.5)
    drafted = backend.passes.count("propose")
    Planner(backend, None).plan(PROMPT, max_new_tokens=5, speculative=False)
    assert backend.passes.count("propose") == drafted


def test_a_plan_says_what_happened():
    plan = Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=9)
    assert (plan.finish_reason, len(plan.tokens), plan.prompt_tokens) == ("length", 9, 3)
    assert plan.accept_lengths == (4, 4)
    assert plan.accept_length == 4.0
    assert (plan.text, plan.object) == (None, None)
    assert (plan.lossy, plan.relaxed_tokens, plan.reused_tokens) == (False, 0, 0)
    timings = plan.timings
    assert 0 < timings.prefill_seconds <= timings.first_token_seconds <= timings.total_seconds
    assert 0 <= timings.queue_seconds <= timings.first_token_seconds - timings.prefill_seconds
    assert timings.decode_seconds == pytest.approx(timings.total_seconds - timings.first_token_seconds)
    assert plan.tokens_per_second > 0
    assert PlanTimings(0.0, 0.5, 0.5, 2.0, 2.5).rate(9) == 4.0  # without the first token
    assert PlanTimings(0.0, 0.5, 0.5, 0.0, 0.5).rate(1) == 0.0
    for value in (plan, plan.timings, Increment("a", (1,))):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.tokens = ()


def test_the_context_or_a_stop_token_inside_an_accepted_span_ends_a_plan():
    plan = Planner(FakeBackend(), None).plan(PROMPT)
    assert plan.finish_reason == "context"
    assert len(PROMPT) + len(plan.tokens) == SHAPE.usable_context
    for at in range(1, 7):
        planner = Planner(FakeBackend(script=[9] * at + [5], script_at=3), None, [5])
        assert planner.plan(PROMPT).tokens == (9,) * at + (5,)
        assert planner.plan(PROMPT).finish_reason == "stop"


def test_a_seed_repeats_a_plan():
    planner = Planner(FakeBackend(), None)
    drawn = [planner.plan(PROMPT, max_new_tokens=12, temperature=1.0, seed=seed).tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    plain = planner.plan(PROMPT, max_new_tokens=12, temperature=1.0, seed=1, speculative=False)
    assert plain.tokens == drawn[0]


# streaming -----------------------------------------------------------------------------------------------------------


def test_increments_join_to_the_plan(tokenizer):
    answer = "first 🤖, then 杯"
    prompt = tokenizer.encode_chat([{"role": "user", "content": "go"}])
    stream = scripted(tokenizer, answer, prompt).stream("go")
    parts = list(stream)
    assert "".join(part.text for part in parts) == stream.plan.text == answer
    assert tuple(token for part in parts for token in part.tokens) == stream.plan.tokens
    assert len(parts) == 1 + len(stream.plan.accept_lengths)
    assert stream.plan.tokens[-1] == tokenizer.eos_token_id


def test_a_character_cut_by_the_budget_is_not_lost(tokenizer):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "go"}])
    plan = scripted(tokenizer, "a🤖", prompt).plan("go", max_new_tokens=3)
    assert plan.text == "a\ufffd"


def test_requests_do_not_disturb_each_other_and_a_plan_waits_for_its_end():
    planner = Planner(FakeBackend(), None)
    wanted = planner.plan(PROMPT, max_new_tokens=9).tokens
    with pytest.raises(RequestError):
        planner.plan([64])
    left, other = planner.stream(PROMPT, max_new_tokens=9), planner.stream(PROMPT, max_new_tokens=9)
    assert planner.plan((2, 7), max_new_tokens=9).tokens != wanted
    assert tuple(token for part in left for token in part.tokens) == wanted
    assert left.plan.tokens == wanted
    assert next(other).tokens == other.plan.tokens[:1] == wanted[:1]


# what a task may be --------------------------------------------------------------------------------------------------


def test_a_task_is_text_messages_with_parts_or_ids(tokenizer, bare):
    planner = Planner(FakeBackend(TEXT_SHAPE), tokenizer)
    assert planner.encode("go") == tokenizer.encode("<|start|>user\ngo<|end|><|start|>assistant\n")
    for task in ("go", [{"role": "user", "content": "go"}]):
        assert planner.encode(task) == planner.encode("go")
        assert planner.encode(task, thinking=True) == planner.encode(task) + tokenizer.encode("<think>")
    assert Planner(FakeBackend(TEXT_SHAPE), bare).encode("go") == bare.encode("go")
    assert planner.encode([7, 8]) == planner.encode(np.array([7, 8])) == (7, 8)
    parts = [{"type": "text", "text": "go "}, {"type": "text", "text": "home"}]
    whole = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "go home"}]
    split = [{"role": "system", "content": "Plan."}, {"role": "user", "content": parts}]
    assert planner.encode(split) == planner.encode(whole)
    session = planner.session()
    session.plan(split, max_new_tokens=2)
    assert session.messages[:2] == tuple(whole)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}],
            r"content of message 1\[1\] is .*image",
        ),
        (["x"], r"content of message 1\[0\] is 'x'"),
        ([{"type": "text", "text": 5}], r"content of message 1\[0\] is "),
        (5, "content of message 1 is 5; give a text, or a list of parts of type text"),
        (
            [{"type": "text", "text": "x"}, {"type": "text", "text": "y", "cache_control": None}],
            r"content of message 1\[1\]\.cache_control is unknown here; known are text, type",
        ),
    ],
)
def test_other_parts_are_refused_by_name(tokenizer, content, message):
    planner = Planner(FakeBackend(TEXT_SHAPE), tokenizer)
    with pytest.raises(RequestError, match=message) as refused:
        planner.plan([{"role": "system", "content": "Plan."}, {"role": "user", "content": content}])
    assert "text" in str(refused.value).partition(";")[2]


def test_text_needs_a_tokenizer():
    planner = Planner(FakeBackend(), None)
    with pytest.raises(RequestError, match="the task is empty"):
        planner.plan(" \n")
    for task in ("go", [{"role": "user", "content": "go"}]):
        with pytest.raises(RequestError, match=r"no tokenizer: give token ids .* or build it again"):
            planner.plan(task)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, 64], "token id 64 is outside the vocabulary of 64"),
        ([-1], "token id -1 is outside the vocabulary of 64"),
        ([1, 2.0], "2.0 is no token id"),
        ([True], "True is no token id"),
    ],
)
def test_bad_tasks_are_refused_before_any_pass(task, message):
    backend = FakeBackend()
    with pytest.raises(RequestError, match=message):
        Planner(backend, None).stream(task)
    assert backend.passes == []


def test_a_prompt_longer_than_the_usable_context_is_refused_with_the_numbers():
    backend = FakeBackend()
    planner = Planner(backend, None)
    with pytest.raises(ContextError, match=r"token 60.*usable context is 60 tokens \(context 64 minus block 4\)"):
        planner.stream([1] * 60)
    with pytest.raises(ContextError, match="at most 50 new tokens fit"):
        planner.stream([1] * 10, max_new_tokens=51)
    assert backend.passes == []
    assert len(planner.plan([1] * 10, max_new_tokens=50).tokens) == 50


def test_closing_releases_the_backend_and_ends_what_runs():
    backend = FakeBackend()
    with Planner(backend, None) as planner:
        stream = planner.stream(PROMPT)
        first = next(stream)
    assert backend.closed
    assert stream.plan.tokens[: len(first.tokens)] == first.tokens
    with pytest.raises(RequestError, match="closed and takes no more requests"):
        planner.plan(PROMPT)
    planner.close()


def test_a_planner_that_is_dropped_ends_its_worker():
    planner = Planner(FakeBackend(), None)
    planner.plan(PROMPT, max_new_tokens=2)
    worker = planner._engine._thread
    del planner
    gc.collect()
    worker.join(60)
    assert not worker.is_alive()


def test_a_dropped_stream_ends_its_request():
    gate = Gate()
    planner = Planner(gate, None)
    stream = planner.stream(PROMPT)
    job = stream._job
    del stream
    gate.open.set()
    assert planner.plan(PROMPT, max_new_tokens=2).finish_reason == "length"
    assert job.ticket.result().finish_reason == "cancelled"
    assert gate.backend.passes.count("verify") <= 2


# stop texts ----------------------------------------------------------------------------------------------------------

ANSWER = "one; two\n\nthree 🤖 <stop> four"


@pytest.mark.parametrize("right", range(4))
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (";", "one"),
        ("\n\n", "one; two"),
        ("wo\n\nth", "one; t"),
        ("🤖", "one; two\n\nthree "),
        (["<stop>", "xyz"], "one; two\n\nthree 🤖 "),
        (["xyz", "four", "<stop"], "one; two\n\nthree 🤖 "),
        ("<stop>x", ANSWER),
        ("four!", ANSWER),
    ],
)
def test_stop_texts_span_tokens_and_are_cut(tokenizer, right, stop, text):
    prompt = tokenizer.encode_chat([{"role": "user", "content": "go"}])
    ids = [*tokenizer.encode(ANSWER), tokenizer.eos_token_id]
    plans = []
    for speculative in (True, False):
        backend = FakeBackend(TEXT_SHAPE, right=lambda position: right, script=ids, script_at=len(prompt))
        planner = Planner(backend, tokenizer, [tokenizer.eos_token_id])
        stream = planner.stream("go", stop=stop, speculative=speculative)
        parts = list(stream)
        plans.append(stream.plan)
        assert "".join(part.text for part in parts) == stream.plan.text == text
        assert tuple(token for part in parts for token in part.tokens) == stream.plan.tokens
        assert backend.passes.count("verify") == len(stream.plan.accept_lengths)
    assert plans[0].tokens == plans[1].tokens == tuple(ids[: len(plans[0].tokens)])
    assert plans[0].finish_reason == "stop"
    if text != ANSWER:
        used = tokenizer.decode(plans[0].tokens)
        assert used.startswith(text)
        assert any(used.endswith(one) for one in ([stop] if isinstance(stop, str) else stop))


@pytest.mark.parametrize("right", range(4))
def test_stop_texts_are_looked_for_behind_the_thinking_only(tmp_path, right):
    tokenizer = thinking_tokenizer(tmp_path)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "go"}], enable_thinking=True)
    script = tokenizer.encode("the mug\n\nthere</think>\n\nTake <think>mug</think>the mug now")
    backend = FakeBackend(dataclasses.replace(TEXT_SHAPE, vocab_size=262), lambda position: right, script, len(prompt))
    with Planner(backend, tokenizer, [tokenizer.eos_token_id]) as planner:
        plan = planner.plan("go", thinking=True, stop=["\n\n", "mug"])
    assert (plan.thinking, plan.text, plan.finish_reason) == ("the mug\n\ntheremug", "Take the ", "stop")
    assert tokenizer.decode(plan.tokens).endswith("the mug")


def test_stop_texts_need_a_tokenizer_and_go_with_no_form(tokenizer):
    with pytest.raises(RequestError, match="stop texts cannot be found"):
        Planner(FakeBackend(), None).plan(PROMPT, stop="x")
    planner = Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id])
    with pytest.raises(RequestError, match="regex and stop are given"):
        planner.plan("go", regex="a+", stop="x")
    for stop in ("", ["a", ""], [3]):
        with pytest.raises(RequestError, match="give a text, or several, none of them empty"):
            planner.plan("go", stop=stop) if stop else planner.plan("go", stop=[""])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"steps": []}', {"steps": []}),
        (' \n{"a": 1}\n', {"a": 1}),
        ('<think>{"b": 2}</think>\n{"a": 1}', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('{"a": 1.5e300}', {"a": 1.5e300}),
        ('{"a": 1e999}', None),
        ('{"a": NaN}', None),
        ('{"a": 1', None),
        ("[1]", None),
        ('so: {"a": 1}', None),
        ("[" * 100_000, None),
        ("", None),
    ],
)
def test_the_json_object_of_a_plan(text, value):
    assert json_object(text) == value


@pytest.mark.parametrize("name", ["fingerprint", "self_test", "tokenizer", "stop_token_ids", "shape"])
def test_what_a_planner_says_of_its_bundle_cannot_be_replaced(name):
    with Planner(FakeBackend(), None) as planner, pytest.raises(AttributeError):
        setattr(planner, name, None)
