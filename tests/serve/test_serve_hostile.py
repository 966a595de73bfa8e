"""What a client may send and must not get away with: every answer is an error in OpenAI form, none a 500."""

from __future__ import annotations

import json
import socket

import pytest
from service_support import client_of, fake_service, live

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    service = fake_service(tmp_path_factory.mktemp("service"))
    with client_of(service) as client:
        yield client
    service.close()


def refused(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"messages": "\xff\xfe"}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"seed": 1' + b"0" * 5000 + b"}",
        b'{"seed": 99999999999999999999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}",
        '{"a": 1}'.encode("utf-16"),
    ],
    ids=lambda body: repr(body[:16]),
)
def test_bodies_that_are_no_json_object(client, body):
    assert refused(client.post(CHAT, content=body, headers=JSON))["code"] == "json"


GRASP = {"type": "function", "function": {"name": "grasp"}}
CALLS = [*HELLO, {"role": "assistant", "tool_calls": [{"id": "y", "function": {"name": "f", "arguments": "{}"}}]}]


def said(**message):
    return {"messages": [{"role": "user", "content": "x", **message}]}


BAD = [  # a change of a good body, and the field that is named; the document of the API says so, too
    *(({"messages": value}, "messages") for value in (None, [], "hello")),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    *((said(role=role), "messages[0].role") for role in ("robot", "user<|end|>", "user\n")),
    (said(extra=1), "messages[0].extra"),
    (said(tool_call_id="y"), "messages[0].tool_call_id"),
    (said(tool_calls=[1]), "messages[0].tool_calls"),
    (said(role="assistant", refusal="no"), "messages[0].refusal"),
    (said(role="assistant", tool_calls=[{"function": {"name": "f"}}]), "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [*CALLS, {"role": "tool", "content": "x"}]}, "messages[2].tool_call_id"),
    *((said(content=content), "messages[0].content") for content in (
        5, ["x"], [{"type": "image_url"}], [{"type": "image_url", "image_url": {}}])),
    *(({"max_tokens": value}, "max_tokens") for value in (0, -1, True, 1.5, "9")),
    *(({"temperature": value}, "temperature") for value in (2.1, "1", "hot")),
    ({"top_p": -0.1}, "top_p"),
    *(({"seed": value}, "seed") for value in (0.5, -(2**63) - 1)),
    *(({"n": value}, "n") for value in (0, 9, True, "2")),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    *(({name: value}, name) for name, value in (
        ("presence_penalty", 0.5), ("logit_bias", {"5": 1}), ("min_p", False), ("min_p", 0.1), ("echo", 0),
        ("guided_regex", "a"), ("stream", "yes"), ("reasoning_effort", "most"), ("functions", []), ("unheard_of", 1))),
    *(({"stop": value}, "stop") for value in ("", [1], ["x"] * 17)),
    ({"chat_template_kwargs": {"preserve": True}}, "chat_template_kwargs.preserve"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"tools": [{}]}, "tools[0].function"),
    *(({"tools": [{"function": {"name": "f", **more}}]}, f"tools[0].function.{name}") for name, more in (
        ("name", {"name": 1}), ("parameters", {"parameters": 0}), ("strict", {"strict": "yes"}),
        ("returns", {"returns": {}}))),
    ({"tools": [{"function": {"name": "f"}, "cache": 1}]}, "tools[0].cache"),
    ({"tool_choice": {"type": "function", "name": "grasp"}, "tools": [GRASP]}, "tool_choice"),
    ({"tool_choice": "grasp", "tools": [GRASP]}, "tool_choice"),
    *(({"edge_dflash": {"session": name}}, "edge_dflash.session") for name in (
        "../../etc/passwd", "a/b", ".hidden", "-a", "a\u0000b", "\u00e9", "x" * 65, "")),
    ({"edge_dflash": {"deadline_s": -1}}, "edge_dflash.deadline_s"),
    ({"edge_dflash": {"deadline": 1}}, "edge_dflash.deadline"),
    ({"edge_dflash": []}, "edge_dflash"),
    ({"edge_dflash": {"top_k": -1}}, "edge_dflash.top_k"),
    ({"edge_dflash": {"priority": 101}}, "edge_dflash.priority"),
]  # fmt: skip
CONTRADICTIONS = [  # which a schema does not say
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"n": 2, "edge_dflash": {"session": "hall"}}, "n"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": [GRASP]}, "tool_choice"),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("change", "param"), BAD + CONTRADICTIONS, ids=str)
def test_bad_parameters_are_named(client, change, param):
    assert refused(client.post(CHAT, json={"messages": HELLO, "max_tokens": 2, **change}))["param"] == param


@pytest.mark.parametrize(
    "change",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}},
        {"response_format": {"type": "json_object"}, "stop": "x"},
        {"edge_dflash": {"regex": "("}},
        {"edge_dflash": {"regex": "((a{1000}){1000}){1000}"}},
        {"edge_dflash": {"grammar": "start: start"}},
        {"edge_dflash": {"regex": "a", "grammar": "start: /a/"}},
        {"max_tokens": 100_000},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x" * 10_000}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
    ],
    ids=lambda change: json.dumps(change)[:60],
)
def test_what_the_planner_refuses_is_refused(client, change):
    body = json.dumps({"messages": HELLO, "max_tokens": 2, **change})
    refused(client.post(CHAT, content=body, headers=JSON))


def test_odd_parameters_of_completions(client):
    for change in (
        {"echo": 1},
        {"max_tokens": 0},
        {"best_of": 2},
        {"suffix": "x"},
        {"messages": HELLO},
        {"prompt": [10**6]},
    ):
        refused(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, **change}))


def test_odd_requests(client):
    assert refused(client.post(CHAT, content=b"{}"), 415)["code"] == "content_type"
    refused(client.post(CHAT, content=b"{}", headers={**JSON, "content-encoding": "gzip"}), 415)
    assert refused(client.get(CHAT), 405)["message"] == f"the method of {CHAT} is GET; it takes POST"
    refused(client.post("/metrics"), 405)
    lost = refused(client.get("/nothing"), 404)["message"]
    assert lost == "no endpoint answers GET /nothing; GET /openapi.json lists them all"
    assert "this service has " in refused(client.get("/v1/models/gpt"), 404)["message"]
    refused(client.get("/health/"), 404)
    refused(client.get("/v1/models/..%2f..%2fetc"), 404)
    assert refused(client.post(CHAT, json={"model": "gpt", "messages": HELLO}), 404)["code"] == "model_not_found"
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000_000}]})
    answer = client.post(CHAT, content=large, headers=JSON)
    assert (refused(answer, 413)["code"], answer.headers["connection"]) == ("too_large", "close")  # no more is read
    refused(client.post(CHAT, content=iter([large.encode()]), headers=JSON), 413)  # chunked, of unsaid length


def test_sizes_have_limits(start):
    _, client = start(limits={"prompt_chars": 100, "schema_bytes": 100})
    refused(client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 100}]}))
    refused(client.post(CHAT, json={"messages": HELLO, "edge_dflash": {"regex": "x" * 101}}))
    form = {"type": "json_schema", "json_schema": {"schema": {"description": "x" * 100}}}
    refused(client.post(CHAT, json={"messages": HELLO, "response_format": form}))


def test_a_key_is_asked_of_everyone_on_tcp(tmp_path):
    service = fake_service(tmp_path)
    key = "k" * 20
    with client_of(service, key) as client:
        for path in ("/v1/models", "/health", "/ready", "/metrics", "/nothing"):
            error = refused(client.get(path), 401)
            assert error["code"] == "invalid_api_key"
            for wrong in ("", "Bearer", f"Bearer {key}x", f"Basic {key}", "Bearer \xff", key):
                refused(client.get(path, headers={"authorization": wrong.encode("latin-1")}), 401)
        assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).is_success
    service.close()


@pytest.mark.parametrize(("key", "length", "status"), [("wrong", 400_000, 401), ("k" * 20, 2_000_000, 413)])
def test_an_answer_before_the_end_of_the_body_arrives(tmp_path, key, length, status):
    service = fake_service(tmp_path)
    start = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer {key}"
    with live(service, tmp_path, "k" * 20, tcp=True) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        for _ in range(5):
            with socket.create_connection((host, int(port)), timeout=30) as one:
                one.sendall(f"{start}\r\ncontent-length: {length}\r\n\r\n".encode() + b"x" * 400_000)
                said = b"".join(iter(lambda: one.recv(65536), b""))
            assert said.startswith(b"HTTP/1.1 %d" % status)
            assert said.endswith(b"}")
    service.close()


def test_without_a_key_only_this_machines_names_are_hosts(client):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil"):
        assert refused(client.get("/v1/models", headers={"host": host}), 403)["code"] == "host"
    for host in ("localhost", "127.0.0.1:8080", "[::1]:8080"):
        assert client.get("/v1/models", headers={"host": host}).is_success
