"""Lone surrogates: named and refused wherever a request may hold one."""

from __future__ import annotations

import json

import pytest

from edge_dflash.common.rules import lone_surrogate
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.serve.errors import Refusal
from edge_dflash.serve.limits import parse_object

BAD = "a\ud800b"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (BAD, "x"),
        ([1, {"a": [BAD]}], "x[1].a[0]"),
        ({"a": {BAD: 1}}, "a key of x.a"),
        (("\udfff",), "x[0]"),
        ("\U0001f600 fine", None),
        ({"a": [1, 2.5, None, True, b"\xff"]}, None),
    ],
)
def test_the_place_is_named(value, place):
    assert lone_surrogate(value, "x") == place


def test_what_holds_itself_is_looked_at_once():
    value = [1]
    value.append(value)
    assert lone_surrogate(value, "x") is None


@pytest.fixture(scope="module")
def planner(demo_bundle, opened_once):
    with Planner.open(demo_bundle) as planner:
        yield planner


OPTIONS = [
    ({"schema": {"const": BAD}}, "schema.const"),
    ({"schema": {"properties": {BAD: {}}}}, "a key of schema.properties"),
    ({"schema": json.dumps({"const": BAD})}, "schema.const"),
    ({"schema": json.dumps({"x-a": [BAD]})}, "schema.x-a[0]"),
    ({"regex": BAD}, "regex"),
    ({"grammar": f'start: "{BAD}"'}, "grammar"),
    ({"grammar": 'start: %json {"const": "\\ud800"}'}, "the grammar's %json.const"),
    ({"stop": ["x", BAD]}, "stop[1]"),
    ({"tools": [{"type": "function", "function": {"name": BAD}}]}, "tools[0].function.name"),
    ({"caller": BAD}, "caller"),
    ({BAD: 1}, "the name of an option"),
]


@pytest.mark.parametrize(("options", "place"), OPTIONS, ids=lambda value: ascii(value)[:40])
def test_options_are_refused(planner, options, place):
    with pytest.raises(RequestError) as refused:
        planner.plan("x", max_new_tokens=1, **options)
    assert str(refused.value).startswith(f"{place} holds a lone surrogate")
    str(refused.value).encode()


@pytest.mark.parametrize(
    ("task", "place"),
    [
        (BAD, "the text"),
        ([{"role": "user", "content": BAD}], "messages[0].content"),
        ([{"role": BAD, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", BAD: 1}], "a key of messages[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": BAD}]}], "messages[0].content[0].text"),
    ],
    ids=ascii,
)
def test_tasks_are_refused(planner, task, place):
    for ask in (planner.plan, planner.session("You plan.").plan, planner.encode):
        with pytest.raises(RequestError, match="holds a lone surrogate") as refused:
            ask(task)
        assert str(refused.value).startswith(place)


def test_system_prompts_are_refused(planner):
    with pytest.raises(RequestError, match="system holds a lone surrogate"):
        planner.session(BAD)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"messages": [{"role": "user", "content": BAD}]}, "messages[0].content"),
        ({"response_format": {"json_schema": {BAD: 1}}}, "a key of response_format.json_schema"),
        ({BAD: 1}, "a key of the body"),
        ({"edge_dflash": {"session": "\udc00"}}, "edge_dflash.session"),
        ({"stop": [BAD]}, "stop[0]"),
    ],
    ids=ascii,
)
def test_bodies_are_refused(body, place):
    for text in (json.dumps(body), json.dumps(body).replace("\\ud", "\\uD")):
        with pytest.raises(Refusal, match="holds a lone surrogate") as refused:
            parse_object(text.encode(), 64)
        assert refused.value.status == 400
        assert refused.value.param == place
    assert parse_object(b'{"a": "\\ud83d\\ude00"}', 64) == {"a": "\U0001f600"}
