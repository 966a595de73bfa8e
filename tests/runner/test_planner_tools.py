"""Forced calls through the planner and the service: with and without drafter, streamed, behind thinking."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fakes import SHAPE, FakeBackend
from grammar_support import END, tokenizer, vocab_size
from service_support import client_of, events, fake_service

from edge_dflash.client.api import Served, ask
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from tests.decode.test_tool_form import DIALECTS, WAIT, tool

TASK = [{"role": "user", "content": "Take the mug."}]
MOVE = tool(
    "move",
    {
        "to": {"enum": ["hall", "dock"]},
        "code": {"type": "string", "maxLength": 3},
        "speed": {"type": "integer", "minimum": 1, "maximum": 40},
        "then": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
    },
    ("to", "code", "speed"),
)
TOOLS = [MOVE, WAIT]


@pytest.fixture(params=DIALECTS)
def planner(request):
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    backend = FakeBackend(shape, right=lambda position: position % 3)
    with Planner(backend, DIALECTS[request.param], [tokenizer().control_id(END)], fallback=False) as planner:
        yield planner


def check(plan, names=("move", "wait")):
    assert plan.finish_reason == "stop"
    assert plan.text == ""
    assert plan.malformed == ()
    (call,) = plan.tool_calls
    arguments = json.loads(call.arguments)
    assert call.name in names
    if call.name == "wait":
        assert arguments == {}
        return
    assert {"to", "code", "speed"} <= set(arguments) <= {"to", "code", "speed", "then"}
    assert arguments["to"] in ("hall", "dock")
    assert 1 <= arguments["speed"] <= 40
    assert len(arguments["code"]) <= 3
    assert all(isinstance(item, bool) for item in arguments.get("then", []))


def test_a_required_call_is_made_the_same_with_and_without_drafter(planner):
    for seed in range(4):
        options = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0, "seed": seed}
        plan = planner.plan(TASK, **options)
        check(plan)
        assert planner.plan(TASK, speculative=False, **options).tokens == plan.tokens


def test_a_named_tool_is_the_one_that_is_called(planner):
    check(planner.plan(TASK, tools=TOOLS, tool_choice="move"), ("move",))
    check(planner.plan(TASK, tools=TOOLS, tool_choice="wait"), ("wait",))


def test_a_streamed_call_is_the_same(planner):
    with planner.stream(TASK, tools=TOOLS, tool_choice="move") as stream:
        calls = [call for part in stream for call in part.tool_calls]
    assert tuple(calls) == stream.plan.tool_calls
    check(stream.plan, ("move",))


def test_a_forced_call_begins_behind_the_thinking():
    words = DIALECTS["tagged"]
    close = words.control_id("</think>")
    shape = replace(SHAPE, vocab_size=vocab_size(), max_context=2048)
    prompt = words.encode_chat(TASK, tools=TOOLS, enable_thinking=True)
    backend = FakeBackend(shape, script=[*words.encode_text("hm"), close], script_at=len(prompt))
    with Planner(backend, words, [words.control_id(END)], fallback=False) as planner:
        plan = planner.plan(TASK, tools=TOOLS, tool_choice="move", thinking=True)
        assert plan.thinking == "hm"
        check(plan, ("move",))
        plain = planner.plan(TASK, tools=TOOLS, tool_choice="move", thinking=True, speculative=False)
        assert plain.tokens == plan.tokens


def test_a_turn_of_a_session_may_be_a_forced_call(planner):
    session = planner.session("You move.")
    check(session.plan("Go.", tools=TOOLS, tool_choice="required"))
    check(session.plan("Wait.", tools=TOOLS, tool_choice="wait"), ("wait",))


def test_a_model_that_cannot_call_tools_says_so(planner):
    bare = Planner(planner.backend, None, (2,))
    with pytest.raises(RequestError, match="cannot be given a form"):
        bare.plan((1, 2), tools=TOOLS, tool_choice="required")


CHAT = "/v1/chat/completions"


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


def test_a_remote_planner_sends_the_choice():
    server = Served("m", {})
    assert ask(server, TASK, Options(tools=TOOLS, tool_choice="required"))[1]["tool_choice"] == "required"
    named = {"type": "function", "function": {"name": "wait"}}
    assert ask(server, TASK, Options(tools=TOOLS, tool_choice="wait"))[1]["tool_choice"] == named
    assert "tool_choice" not in ask(server, TASK, Options(tools=TOOLS))[1]
    assert "tools" not in ask(server, TASK, Options(tools=TOOLS, tool_choice="none"))[1]
