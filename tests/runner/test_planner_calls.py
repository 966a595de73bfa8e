"""Answers that are or may be calls: forced, next to a form, and free ones whose strict tools keep their schemas."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from fakes import SHAPE, FakeBackend
from grammar_support import END, tokenizer, vocab_size
from service_support import client_of, events, fake_service

from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer
from tests.decode.test_tool_form import DIALECTS, WAIT, tool, with_template

TASK = [{"role": "user", "content": "Take the mug."}]
MOVE = tool("move", {"to": {"enum": ["hall", "dock"]}, "speed": {"type": "integer", "maximum": 9, "minimum": 0}},
            ("to", "speed"))  # fmt: skip
TOOLS = [MOVE, WAIT]
REPORT = {"type": "object", "properties": {"percent": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["percent"], "additionalProperties": False}  # fmt: skip
STRICT = {**MOVE, "function": {**MOVE["function"], "strict": True}}
FORMS = {"schema": REPORT, "regex": "yes|no/[0-9]\\n?"}
CHAT = "/v1/chat/completions"


def opened(words, script="", **given):
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    prompt = words.encode_chat(TASK, tools=given.pop("tools", TOOLS), enable_thinking=given.pop("thinking", False))
    backend = FakeBackend(shape, lambda at: at % 4, words.encode(script), len(prompt))
    return Planner(backend, words, [tokenizer().control_id(END)], fallback=False)


def runs(planner, **options):
    """A plan, the same without drafts, and streamed."""
    plan = planner.plan(TASK, **options)
    assert planner.plan(TASK, speculative=False, **options).tokens == plan.tokens
    with planner.stream(TASK, **options) as stream:
        parts = list(stream)
    assert "".join(part.text for part in parts) == plan.text
    assert tuple(call for part in parts for call in part.tool_calls) == plan.tool_calls
    return plan


def check_call(call, names=("move", "wait")):
    arguments = json.loads(call.arguments)
    assert call.name in names
    if call.name == "wait":
        assert arguments == {}
        return
    assert {"to", "speed"} <= set(arguments) <= {"to", "speed", "code", "then"}
    assert arguments["to"] in ("hall", "dock")
    assert 0 <= arguments["speed"] <= 9
    assert len(arguments.get("code", "")) <= 3
    assert all(isinstance(item, bool) for item in arguments.get("then", []))


FULL = tool(
    "move",
    {
        **MOVE["function"]["parameters"]["properties"],
        "code": {"type": "string", "maxLength": 3},
        "then": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    },
    ("to", "code", "speed"),
)


def check_forced(plan, names=("move", "wait")):
    assert (plan.finish_reason, plan.text, plan.malformed) == ("stop", "", ())
    (call,) = plan.tool_calls
    check_call(call, names)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_forced_call_is_made_the_same_with_and_without_drafter_and_in_a_session(dialect):
    tools = [FULL, WAIT]
    with opened(DIALECTS[dialect], tools=tools) as planner:
        for seed in range(4):
            check_forced(runs(planner, tools=tools, tool_choice="required", temperature=1.0, seed=seed))
        for name in ("move", "wait"):
            check_forced(runs(planner, tools=tools, tool_choice=name), (name,))
        session = planner.session("You move.")
        check_forced(session.plan("Go.", tools=tools, tool_choice="required"))
        check_forced(session.plan("Wait.", tools=tools, tool_choice="wait"), ("wait",))
        bare = Planner(planner.backend, None, (2,))
        with pytest.raises(RequestError, match="cannot be given a form"):
            bare.plan((1, 2), tools=tools, tool_choice="required")
    with opened(DIALECTS["tagged"], "hm</think>", thinking=True) as planner:
        plan = runs(planner, tools=TOOLS, tool_choice="move", thinking=True)
        assert plan.thinking == "hm"
        check_forced(plan, ("move",))


@pytest.mark.parametrize("whitespace", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_is_calls_or_of_the_form(dialect, form, whitespace):
    with opened(DIALECTS[dialect]) as planner:
        for seed in range(3):
            plan = runs(planner, tools=TOOLS, temperature=1.0, seed=seed, whitespace=whitespace, **{form: FORMS[form]})
            assert plan.finish_reason == "stop"
            assert not plan.malformed
            for call in plan.tool_calls:
                check_call(call)
            if form == "regex":
                assert bool(plan.tool_calls) != bool(re.fullmatch(FORMS["regex"], plan.text))
            else:
                assert bool(plan.tool_calls) != (plan.object is not None and set(plan.object) == {"percent"})
            if plan.tool_calls:
                assert (plan.text, plan.object) == ("", None)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_model_chooses_which(dialect):
    words = DIALECTS[dialect]
    with opened(words, "<tool_call>") as planner:
        plan = runs(planner, tools=TOOLS, schema=REPORT)
        assert plan.tool_calls
        check_call(plan.tool_calls[0])
    with opened(words, '{"percent":7}' + END) as planner:  # no blanks, as without tools
        plan = runs(planner, tools=TOOLS, schema=REPORT)
        assert (plan.text, plan.object, plan.tool_calls) == ('{"percent":7}', {"percent": 7}, ())
    with opened(words, "The battery") as planner:
        plan = runs(planner, tools=TOOLS, schema=REPORT)
        assert plan.object or plan.tool_calls


def test_several_calls_may_follow_each_other_and_the_choice_comes_behind_the_thinking():
    words = DIALECTS["json"]
    call = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    with opened(words, f"{call}\n{call}{call}{END}") as planner:
        assert [one.name for one in runs(planner, tools=TOOLS, schema=REPORT).tool_calls] == ["wait"] * 3
    with opened(DIALECTS["tagged"], 'a <tool_call> or {"percent"</think>\n\n<tool_call>', thinking=True) as planner:
        plan = runs(planner, tools=TOOLS, schema=REPORT, thinking=True)
        assert plan.thinking == 'a <tool_call> or {"percent"'
        assert plan.tool_calls
        check_call(plan.tool_calls[0])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_strict_call_in_a_free_answer_satisfies_its_schema(dialect):
    words = DIALECTS[dialect]
    for said in ("", "I go. ", "One moment, é, I have to think about it.\n"):
        with opened(words, said + "<tool_call>", tools=[STRICT]) as planner:
            for seed in range(3):
                plan = runs(planner, tools=[STRICT], temperature=0.9, seed=seed, max_new_tokens=160)
                assert plan.text.startswith(said.rstrip("\n"))
                check_call(plan.tool_calls[0])
                assert not [one for one in plan.malformed if one.reason != "the answer ended inside the call"]


def test_a_strict_call_is_free_before_it_begins_and_while_thinking():
    words = DIALECTS["tagged"]
    said = "</think>\n\nNo call here."
    with opened(words, "hm <tool_call> nonsense" + said + END, tools=[STRICT], thinking=True) as planner:
        plan = runs(planner, tools=[STRICT], thinking=True)
        assert (plan.thinking, plan.text) == ("hm <tool_call> nonsense", "No call here.")
        assert (plan.tool_calls, plan.malformed, plan.finish_reason) == ((), (), "stop")


def test_calls_of_tools_that_are_not_strict_are_as_the_model_writes_them():
    words = DIALECTS["json"]
    other = tool("free", {"n": {"type": "integer"}}, ("n",))
    body = '<tool_call>\n{"name": "free", "arguments": {"n": "many"}}\n</tool_call>'
    wrong = '<tool_call>\n{"name": "move", "arguments": {"to": "roof"'
    with opened(words, body + END, tools=[STRICT, other]) as planner:
        (call,) = runs(planner, tools=[STRICT, other]).tool_calls
        assert json.loads(call.arguments) == {"n": "many"}
    with opened(words, wrong, tools=[STRICT, other]) as planner:
        plan = runs(planner, tools=[STRICT, other], max_new_tokens=120)
        check_call(plan.tool_calls[0])
    with opened(words, wrong) as planner:  # without strict
        assert runs(planner, tools=TOOLS, max_new_tokens=120).tool_calls == ()


def test_what_cannot_be_is_refused_by_name():
    words = DIALECTS["json"]
    with opened(words) as planner:
        odd = tool("odd", {"a": {"type": "integer", "uniqueItems": True}})
        held = {**odd, "function": {**odd["function"], "strict": True}}
        odd_call = "and tools are given: a call of the tool 'odd' .*"
        for given, reason in (
            ({"tools": [held], "schema": REPORT}, f"schema {odd_call}tool_choice none"),
            ({"tools": [held]}, f"strict {odd_call}leave strict out"),
            ({"tools": TOOLS, "schema": {"type": "object", "uniqueItems": True}}, "schema and tools are given: "),
            ({"tools": TOOLS, "grammar": 'start: "a"'}, "grammar and tools are given, but the grammar leaves no call"),
            ({"tools": TOOLS, "schema": REPORT, "stop": "x"}, "schema and stop are given"),
            ({"tools": TOOLS, "regex": "x" * 70000}, "the tools are too large for calls beside a regex: "),
            ({"tools": [{**WAIT, "function": {"name": "w", "strict": "yes"}}]}, "tools"),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=reason):
                planner.plan(TASK, **given)
        assert planner.plan(TASK, tools=[odd], schema=REPORT, max_new_tokens=2).tokens  # held to its name
        assert planner.plan(TASK, tools=TOOLS, grammar='start: "a" | <tool_call> "b" </tool_call>').finish_reason
        assert planner.plan(TASK, tools=[held], tool_choice="none", max_new_tokens=2).tokens
    silent = with_template("{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}")
    with opened(silent) as planner:
        with pytest.raises(
            RequestError, match="schema and tools are given: the chat template writes tool calls in a form"
        ):
            planner.plan(TASK, tools=TOOLS, schema=REPORT)
        with pytest.raises(RequestError, match="leave strict out"):
            planner.plan(TASK, tools=[STRICT])


def test_the_service_answers_agents_with_an_output_type(tmp_path):
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    words = DIALECTS["json"]
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": REPORT, "strict": True}}
    body = {"messages": TASK, "tools": TOOLS, "response_format": form}
    prompt = words.encode_chat(TASK, tools=TOOLS)
    backend = FakeBackend(shape, script=words.encode("<tool_call>"), script_at=len(prompt))
    client = client_of(fake_service(tmp_path, backend, words))
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    streamed = events(client.post(CHAT, json={**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed[:-1] if chunk["choices"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [call["function"] for call in choice["message"]["tool_calls"]]
    (choice,) = client.post(CHAT, json={**body, "tools": [STRICT], "response_format": None, "max_tokens": 99}).json()[
        "choices"
    ]
    assert choice["message"]["tool_calls"]


def test_a_text_for_a_model_without_a_template_cannot_have_tools():
    words = Tokenizer(tokenizer()._tokenizer, None, tokenizer().control_id(END))
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    with Planner(FakeBackend(shape), words, [tokenizer().control_id(END)], fallback=False) as planner:
        assert planner.plan("Go.", max_new_tokens=2).tokens
        with pytest.raises(RequestError, match="no chat template, which describes tools"):
            planner.plan("Go.", tools=TOOLS, max_new_tokens=2)


def test_the_service_forces_calls(tmp_path):
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    client = client_of(fake_service(tmp_path, FakeBackend(shape), DIALECTS["json"]))
    body = {"messages": TASK, "tools": TOOLS}
    named = {"type": "function", "function": {"name": "move"}}
    for choice, parallel in (("required", None), (named, True), (named, False)):
        answer = client.post(CHAT, json={**body, "tool_choice": choice, "parallel_tool_calls": parallel}).json()
        choice_made = answer["choices"][0]
        assert choice_made["finish_reason"] == "tool_calls"
        (call,) = choice_made["message"]["tool_calls"]
        assert call["function"]["name"] in ("move", "wait")
    streamed = events(client.post(CHAT, json={**body, "tool_choice": named, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed[:-1] if chunk["choices"]]
    assert [call["function"] for delta in deltas for call in delta.get("tool_calls", ())] == [call["function"]]
    for change in ({"response_format": {"type": "json_object"}}, {"stop": "x"}, {"edge_dflash": {"regex": "a"}}):
        refused = client.post(CHAT, json={**body, "tool_choice": "required", **change})
        assert refused.status_code == 400
        assert "tool_choice" in refused.json()["error"]["message"]
