"""``/openapi.json`` says what the service does: routes, fields, statuses and answers, in both directions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from json_schema import faults
from service_support import TOOL, TOOL_TASK, client_of, events, fake_service, thinking_service, tool_service

from edge_dflash.decode.options import DECLARED
from edge_dflash.serve import openapi
from edge_dflash.serve.app import OPERATIONS, SCHEMAS, make_app
from edge_dflash.serve.config import DefaultConfig, ServeConfig
from tests.serve.test_serve_hostile import BAD, CALLS

SERVE = Path(openapi.__file__).parent


def document(config, *, key):
    return openapi.document(OPERATIONS, SCHEMAS, config, key=key)


DOCUMENT = document(ServeConfig(), key=True)
HELLO = [{"role": "user", "content": "hello"}]
CHAT, COMPLETIONS, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/edge_dflash/sessions"


def body_schema(path):
    return DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]


def body_faults(path, body):
    return faults(body_schema(path), body, DOCUMENT)


def keys_of(schema):
    """All names of properties."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for inner in schema.values():
            yield from keys_of(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from keys_of(inner)


def test_it_is_served_and_every_route_is_in_it(service):
    with client_of(service) as client:
        served = client.get("/openapi.json").json()
    assert served == json.loads(json.dumps(document(service.config, key=False)))
    assert served["openapi"] == "3.1.0"
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in make_app(service).routes
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(method, path) for path, methods in served["paths"].items() for method in methods}


def test_a_key_is_a_bearer():
    assert DOCUMENT["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert DOCUMENT["security"] == [{"key": []}]
    assert "security" not in document(ServeConfig(), key=False)


def test_every_option_of_the_table_that_stands_there_is_in_it():
    asked = {name for name, one in DECLARED.items() if one.http}
    for path in (CHAT, COMPLETIONS):
        extension = body_schema(path)["properties"]["edge_dflash"]["anyOf"][0]
        assert extension["properties"].keys() == asked | {"session", "tokens", "deadline_s"}


def test_every_status_that_the_code_gives_is_in_it():
    given = {200}
    for path in SERVE.glob("*.py"):
        given |= {int(status) for status in re.findall(r"status=(\d{3})", path.read_text())}
    documented = {
        int(status) for methods in DOCUMENT["paths"].values() for one in methods.values() for status in one["responses"]
    }
    assert given - {405} <= documented
    assert documented <= given | {400, 500, 503, 507}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"temperature": None, "edge_dflash": None},
        *({"temperature": 2}, {"n": 1.0}, {"n": 2}, {"max_tokens": 3.0}, {"seed": -(2**63)}, {"stop": ["x"] * 16}),
        {"tools": [{"function": {"name": "f"}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"edge_dflash": {"session": "a.b"}},
        {"messages": [*CALLS, {"role": "tool", "content": "x", "tool_call_id": "y"}]},
        {"messages": [{"role": "assistant", "content": "x", "reasoning": "y", "annotations": []}]},
        {"reasoning_effort": "high"},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"min_p": 0.0, "repetition_penalty": 1.0, "top_k": -1},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    ],
    ids=str,
)
def test_what_it_calls_good_is_taken(service, change):
    body = {"messages": HELLO, "max_tokens": 2, **change}
    assert not body_faults(CHAT, body)
    with client_of(service) as client:
        response = client.post(CHAT, json=body)
    assert response.status_code == 200 or response.json()["error"]["param"] is None, response.text


@pytest.mark.parametrize("change", [change for change, _ in BAD], ids=str)
def test_what_is_refused_by_name_it_calls_bad(change):
    assert body_faults(CHAT, {"messages": HELLO, "max_tokens": 2, **change})


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ({"text": "x"}, True),
        ({"messages": HELLO}, True),
        ({"messages": HELLO, "text": None, "thinking": True}, True),
        ({}, False),
        ({"text": "x", "messages": HELLO}, False),
    ],
)
def test_one_of_text_and_messages_is_encoded(service, body, good):
    assert (not body_faults("/v1/edge_dflash/encode", body)) == good
    with client_of(service) as client:
        assert client.post("/v1/edge_dflash/encode", json=body).is_success == good


@pytest.mark.parametrize(
    "prompt",
    ["x", [1, 2], [1.0], ["x"], [[1, 2]], [], "", [[]], [[1], [2]], [-1], [1.5], [True], ["x", "y"], {}, None, 1],
)
def test_prompts(service, prompt):
    with client_of(service) as client:
        taken = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2}).is_success
    assert taken == (not body_faults(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}))


# Answers --------------------------------------------------------------------------------------------------------------


def checked(response, method, path):
    """The answer's JSON, compared with what the document says of its status."""
    said = DOCUMENT["paths"][path][method]["responses"][str(response.status_code)]["content"]["application/json"]
    body = response.json()
    assert not (wrong := faults(said["schema"], body, DOCUMENT)), wrong
    return body


def streamed(client, path, body):
    """The events of an answer, compared with what the document says of a stream."""
    content = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, end = events(response)
    assert end == "[DONE]"
    for chunk in chunks:
        assert not (wrong := faults(content["x-event"], chunk, DOCUMENT)), wrong
    return chunks


def test_answers_are_as_it_says(tmp_path):
    seen = set()
    plain = {"max_tokens": 8, "edge_dflash": {"tokens": True}, "stream_options": {"include_usage": True}}
    thinks = thinking_service(tmp_path / "thinks", "<think>hm</think>ok")
    services = (
        (fake_service(tmp_path / "plain"), {"messages": HELLO}),
        (tool_service(tmp_path / "tools"), {"messages": TOOL_TASK, "tools": [TOOL], "max_tokens": 200}),
        (thinks, {"messages": TOOL_TASK, "max_tokens": 60}),
    )
    for service, body in services:
        with client_of(service) as client:
            whole = {key: value for key, value in {**plain, **body}.items() if key != "stream_options"}
            seen |= set(keys_in(checked(client.post(CHAT, json=whole), "post", CHAT)))
            seen |= set(keys_in(streamed(client, CHAT, {**plain, **body})))
            seen |= set(keys_in(checked(client.post(CHAT, json={**whole, "n": 2}), "post", CHAT)))
            streamed(client, CHAT, {**body, "n": 2})
            text = {"prompt": "a b", "max_tokens": 4}
            checked(client.post(COMPLETIONS, json=text), "post", COMPLETIONS)
            streamed(client, COMPLETIONS, text)
            echo = {**text, "max_tokens": 0, "echo": True, "logprobs": 1, "edge_dflash": {"tokens": True}}
            seen |= set(keys_in(checked(client.post(COMPLETIONS, json=echo), "post", COMPLETIONS)))
            seen |= set(keys_in(streamed(client, COMPLETIONS, echo)))
        service.close()
    documented = {key for name in ("ChatCompletion", "ChatCompletionChunk", "Extension", "Usage")
                  for key in keys_of(DOCUMENT["components"]["schemas"][name])}  # fmt: skip
    logprobs = {"token", "logprob", "bytes", "top_logprobs", "token_id"}
    sometimes = {"board", "session_error", "reasoning_content", "text", "reason"} | logprobs
    assert documented - seen <= sometimes, documented - seen - sometimes


def keys_in(value):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_in(inner)


def test_other_answers_are_as_it_says(service):
    with client_of(service) as client:
        for path in ("/v1/models", "/health", "/ready", SESSIONS):
            checked(client.get(path), "get", path)
        checked(client.get("/v1/models/fake"), "get", "/v1/models/{name}")
        checked(client.get("/v1/models/other"), "get", "/v1/models/{name}")
        checked(client.post("/v1/edge_dflash/encode", json={"text": "x"}), "post", "/v1/edge_dflash/encode")
        client.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "edge_dflash": {"session": "hall"}})
        one = SESSIONS + "/{name}"
        checked(client.get(SESSIONS + "/hall"), "get", one)
        checked(client.post(SESSIONS + "/hall/save", json={}), "post", one + "/save")
        checked(client.post(SESSIONS + "/hall/fork", json={"to": "room"}), "post", one + "/fork")
        checked(client.post(SESSIONS + "/hall/fork", json={}), "post", one + "/fork")
        checked(client.get(SESSIONS), "get", SESSIONS)
        checked(client.delete(SESSIONS + "/hall"), "delete", one)
        checked(client.get(SESSIONS + "/hall"), "get", one)


def test_defaults_are_those_of_the_service():
    from dataclasses import replace

    made = document(replace(ServeConfig(), defaults=DefaultConfig(0.5, thinking=True, draft_confidence=0.3)), key=False)
    fields = made["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert fields["temperature"]["default"] == 0.5
    assert fields["stream"]["default"] is False
    inner = fields["edge_dflash"]["anyOf"][0]["properties"]
    assert inner["thinking"]["default"] is True
    assert inner["draft_confidence"]["default"] == 0.3
    assert {"type": "number", "minimum": 0.0, "maximum": 1.0} in inner["draft_confidence"]["anyOf"]
    assert inner["speculative"]["default"] is True
    assert "default" not in fields["seed"]


def test_head_is_answered_and_other_methods_are_refused(service):
    with client_of(service) as client:
        for path in ("/health", "/ready", "/v1/models", "/metrics", "/openapi.json"):
            head = client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert int(head.headers["content-length"]) > 0
            for method in ("OPTIONS", "POST", "PUT", "DELETE", "TRACE"):
                refused = client.request(method, path)
                assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})
                assert refused.json()["error"]["message"]
        refused = client.request("OPTIONS", CHAT)
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        refused = client.request("OPTIONS", SESSIONS + "/hall")
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}
        assert client.request("OPTIONS", "/nothing").status_code == 404


@pytest.mark.parametrize("one", [one for one in OPERATIONS if isinstance(one.answer, str)], ids=lambda one: one.answer)
def test_an_answer_that_is_named_is_of_that_schema(one):
    answers = DOCUMENT["paths"][one.path.replace(":path", "")][one.method.lower()]["responses"]
    assert answers["200"]["content"]["application/json"]["schema"] == openapi.ref(one.answer)
    assert one.answer in SCHEMAS
