"""Plans of a form, on the demo pair: always of the schema, the same with and without a drafter, whatever it drafts."""

from __future__ import annotations

import json
import re

import pytest

from calib.demo.evaluate import heldout_tasks
from edge_dflash.backends import load
from edge_dflash.bundle.reader import Bundle
from edge_dflash.checks.lossless import Adversary, ByTurns, drafters, oracle
from edge_dflash.decode.accept import Relaxation
from edge_dflash.demo.checking import plan_schema, schema_problems
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer

TASKS = heldout_tasks()
SMALL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def planner(demo_bundle, opened_once):
    with Planner.open(demo_bundle, fallback=False) as planner:
        yield planner


def adversarial(demo_bundle, planner, sequence, drafter, around=lambda backend: backend):
    backend = around(Adversary(load(Bundle.open(demo_bundle, check_hashes=False)), sequence, drafter))
    return Planner(backend, planner.tokenizer, planner.stop_token_ids, fallback=False)


@pytest.mark.parametrize("index", [0, 7])
def test_plans_are_of_the_schema(planner, index):
    plan = planner.plan(TASKS[index].messages, schema=plan_schema())
    assert plan.finish_reason == "stop"
    assert schema_problems(plan.object, plan_schema()) == []
    assert plan.object == json.loads(plan.text)
    assert plan.accept_length > 4


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_constrained_speculative_equals_constrained_plain(demo_bundle, planner, temperature):
    """With a prompt that the model does not answer by the schema on its own."""
    options = {"schema": plan_schema(), "temperature": temperature, "seed": 4, "max_new_tokens": 40, "logprobs": 3}
    task = "Say hello."
    plain = planner.plan(task, speculative=False, **options)
    assert [one.token for one in plain.logprobs] == list(plain.tokens)
    assert any(one.token not in [other.token for other in one.top] for one in plain.logprobs)  # the form's, not its own
    plan = planner.plan(task, **options)
    assert (plan.tokens, plan.logprobs) == (plain.tokens, plain.logprobs)
    sequence = [*planner.encode(task), *plain.tokens]
    for name, drafter in drafters(0, 1, planner.shape.block_size).items():
        with adversarial(demo_bundle, planner, sequence, drafter) as other:
            plan = other.plan(task, **options)
        assert (plan.tokens, plan.logprobs) == (plain.tokens, plain.logprobs), name
        if name == "oracle":
            assert plan.accept_length > 8
        if (name in ("oracle", "noise")) != (temperature > 0):  # half of the drafters in each mode
            continue
        with adversarial(demo_bundle, planner, sequence, drafter, ByTurns) as other:
            plan = other.plan(task, **options)
        assert (plan.tokens, plan.logprobs) == (plain.tokens, plain.logprobs), name
        assert max(plan.drafting.drafts) > min(plan.drafting.drafts)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_a_small_schema_is_kept_at_any_temperature(planner, temperature):
    for seed in range(4):
        plan = planner.plan("Say hello.", schema=SMALL, temperature=temperature, seed=seed)
        assert plan.finish_reason == "stop"
        assert re.fullmatch(r'\{"ok":(true|false),"n":[1-9]\d\}', plan.text)
        assert plan.object["n"] in range(10, 100)


def test_any_json_value_may_be_the_object(planner):
    assert planner.plan("Say hello.", schema={"type": "array", "items": False, "maxItems": 0}).object == []
    assert planner.plan("Say hello.", schema={"const": 7}).object == 7
    blanks = planner.plan("Say hello.", schema=SMALL, whitespace=True, max_new_tokens=80)
    assert blanks.finish_reason != "stop" or set(blanks.object) == {"ok", "n"}


def test_a_cut_answer_has_no_object(planner):
    plan = planner.plan("Say hello.", schema={"type": "integer", "minimum": 100}, max_new_tokens=1)
    assert plan.finish_reason == "length"
    assert plan.object is None


def test_pydantic_like_classes_are_schemas(planner):
    class Reply:
        @classmethod
        def model_json_schema(cls):
            return SMALL

    assert set(planner.plan("Say hello.", schema=Reply).object) == {"ok", "n"}


def test_regex_and_grammar(planner):
    assert re.fullmatch(r"(yes|no)!{2}", planner.plan("Say hello.", regex="(yes|no)!{2}").text)
    text = planner.plan("Say hello.", grammar='start: "go " DIGIT+ "."\nDIGIT: /[0-9]/', max_new_tokens=60).text
    assert text.startswith("go ")


def test_forms_are_refused_with_the_reason(planner):
    for options, message in (
        ({"schema": SMALL, "regex": "a"}, "schema and regex are given"),
        ({"schema": {"type": "string", "minLength": 2, "maxLength": 1}}, "schema"),
        ({"regex": "("}, "regex"),
    ):
        with pytest.raises(RequestError, match=message):
            planner.plan("Say hello.", **options)
    bare = Planner(planner.backend, None, (2,))
    with pytest.raises(RequestError, match="cannot be given a form"):
        bare.plan((1, 2), regex="a")
    endless = Planner(planner.backend, planner.tokenizer)
    with pytest.raises(RequestError, match="no end-of-text token"):
        endless.plan("x", regex="a")


# stop tokens that are ordinary text ----------------------------------------------------------------------------------


def test_inside_a_form_only_its_end_ends_it(planner):
    """Every token of the answer is a stop token, too."""
    usual = planner.plan("Say hello.", schema=SMALL)
    other = Planner(planner.backend, planner.tokenizer, sorted(set(usual.tokens)), fallback=False)
    plan = other.plan("Say hello.", schema=SMALL)
    assert plan.finish_reason == "stop"
    assert plan.tokens == usual.tokens
    assert plan.object == usual.object
    assert set(plan.object) == {"ok", "n"}
    assert other.plan("Say hello.", schema=SMALL, speculative=False).tokens == plan.tokens
    free = other.plan(TASKS[0].messages, max_new_tokens=60)  # outside a form they end it as before
    assert free.finish_reason == "stop"
    assert len(free.tokens) < 10
    assert other.plan(TASKS[0].messages, max_new_tokens=60, speculative=False).tokens == free.tokens


def test_a_form_needs_an_end_that_is_no_text(planner):
    commas = Planner(planner.backend, planner.tokenizer, planner.tokenizer.encode(","))
    with pytest.raises(RequestError, match=r"no end-of-text token, .*its stop tokens \[\d+\] are ordinary text"):
        commas.plan("x", schema=SMALL)


# thinking ------------------------------------------------------------------------------------------------------------


def thinker(demo_bundle, planner, thought, answer):
    """The demo's target with a drafter that knows what is wanted; and the prompt."""
    prompt = planner.encode("Say hello.", thinking=True)
    ids = [*planner.tokenizer.encode(f"{thought}\n</think>\n\n{answer}"), planner.stop_token_ids[0]]
    return adversarial(demo_bundle, planner, [*prompt, *ids], oracle), prompt


def test_the_form_begins_behind_the_thinking(planner):
    for seed in range(3):
        options = {"regex": "[ab]{3}", "thinking": True, "temperature": 1.5, "seed": seed, "max_new_tokens": 160}
        plan = planner.plan(TASKS[0].messages, **options)
        assert planner.plan(TASKS[0].messages, speculative=False, **options).tokens == plan.tokens
        thought = planner.tokenizer.control_id("</think>")
        assert plan.finish_reason == "length" or thought in plan.tokens
        if plan.finish_reason == "stop":
            assert re.fullmatch("[ab]{3}", plan.text)
        else:
            assert re.fullmatch("[ab]*", plan.text)


def test_relaxed_acceptance_is_named_lossy_and_ends_with_the_thinking(demo_bundle, planner):
    close = planner.tokenizer.control_id("</think>")
    loose = Relaxation((close,), top_k=1024, margin=1e9)
    other, prompt = thinker(demo_bundle, planner, "hm hm hm hm hm hm hm hm", "never said like this")
    with other:
        plan = other.plan(prompt, relaxed=loose, max_new_tokens=60)
        strict = other.plan(prompt, max_new_tokens=60)
    assert plan.lossy
    assert plan.relaxed_tokens > 0
    assert plan.thinking.count("hm") > 4
    closed = plan.tokens.index(close) if close in plan.tokens else 60  # the target closes it itself or not at all
    assert plan.relaxed_tokens <= closed
    assert (strict.lossy, strict.relaxed_tokens) == (False, 0)


def test_nothing_is_relaxed_where_nothing_is_thought(planner):
    plan = planner.plan("Say hello.", relaxed=True, max_new_tokens=8)
    assert not plan.lossy
    assert plan.tokens == planner.plan("Say hello.", max_new_tokens=8).tokens
    assert planner.plan("Say hello.", relaxed=True, thinking=True, max_new_tokens=8).lossy


def test_relaxing_needs_a_token_that_closes_thinking(planner, tmp_path):
    from text_support import write_tokenizer

    bare = Planner(planner.backend, Tokenizer.open(write_tokenizer(tmp_path / "t")))
    with pytest.raises(RequestError, match="needs a token that closes thinking"):
        bare.plan([1, 2], relaxed=True)
