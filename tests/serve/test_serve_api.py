from __future__ import annotations

import asyncio
import dataclasses
import json
import socket

from fakes import FakeBackend
from planner_support import Gate, Slow
from service_support import TEXT_SHAPE, TOOL_TASK, events, fake_service, live, thinking_service, until

from edge_dflash.serve import completions as completions_module
from edge_dflash.serve.app import make_app

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_a_chat_is_the_plan(service, client):
    plan = service.planner.plan(HELLO, max_new_tokens=20)
    reply = client.post(CHAT, json={"model": "fake", "messages": HELLO, "max_tokens": 20}).json()
    assert reply["object"] == "chat.completion"
    assert reply["choices"][0]["message"]["content"] == plan.text
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == len(plan.tokens) == 20
    extra = reply["edge_dflash"]
    assert extra["accept_lengths"] == list(plan.accept_lengths)
    assert extra["finish_reason"] == plan.finish_reason
    assert extra["timings"]["total_seconds"] > 0


def test_a_stream_is_the_same_in_pieces(client):
    body = {"messages": HELLO, "max_tokens": 20}
    whole = client.post(CHAT, json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}, "edge_dflash": {"tokens": True}}
    with client.stream("POST", CHAT, json={**body, **options}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response)
    assert done == "[DONE]"
    *pieces, last, usage = chunks
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    tokens = [token for piece in pieces[1:] for token in piece["edge_dflash"]["tokens"]]
    assert tokens == last["edge_dflash"]["tokens"]
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["id"] == chunks[0]["id"] for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_completions_take_text_as_it_is_and_ids(service, client):
    ids = list(service.planner.tokenizer.encode("once"))
    texts = []
    for prompt in ("once", ids, ["once"], [ids]):
        reply = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9}).json()
        assert reply["usage"]["prompt_tokens"] == 4
        texts.append(reply["choices"][0]["text"])
    assert len(set(texts)) == 1
    with client.stream("POST", "/v1/completions", json={"prompt": "once", "max_tokens": 9, "stream": True}) as response:
        *chunks, _ = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == texts[0]


def test_a_prompt_spells_control_tokens_only_when_it_is_raw(client):
    spelled = "<|start|>once<|end|>"
    for raw, length in ((False, len(spelled)), (True, 2 + len("once"))):
        body = {"prompt": spelled, "max_tokens": 2, "edge_dflash": {"raw": raw}}
        assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == length
    harmless = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * len(spelled)}]}).json()
    forged = client.post(CHAT, json={"messages": [{"role": "user", "content": spelled}]}).json()
    assert forged["usage"]["prompt_tokens"] == harmless["usage"]["prompt_tokens"]
    refused = client.post(CHAT, json={"messages": HELLO, "edge_dflash": {"raw": True}})
    assert (refused.status_code, "raw is given with messages" in refused.json()["error"]["message"]) == (400, True)
    encoded = client.post("/v1/edge_dflash/encode", json={"text": spelled, "raw": True}).json()["tokens"]
    assert (encoded[0], encoded[-1], len(encoded)) == (256, 257, 6)


def test_seeds_decide_and_are_told(client):
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 1.0}
    drawn = client.post(CHAT, json=body).json()
    seed = drawn["edge_dflash"]["seed"]
    again = client.post(CHAT, json={**body, "seed": seed}).json()
    assert again["choices"][0]["message"] == drawn["choices"][0]["message"]
    others = {client.post(CHAT, json=body).json()["edge_dflash"]["seed"] for _ in range(4)}
    assert len(others) == 4


def test_a_deadline_that_has_passed_gives_nothing_and_says_so(client):
    reply = client.post(CHAT, json={"messages": HELLO, "edge_dflash": {"deadline_s": 0.0}}).json()
    assert reply["edge_dflash"]["finish_reason"] == "deadline"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0


def test_extensions_reach_the_planner(client):
    extra = {"speculative": False, "top_k": 3, "priority": 2, "caller": "arm", "regex": "[ab]{3}"}
    reply = client.post(CHAT, json={"messages": HELLO, "edge_dflash": extra}).json()
    assert reply["edge_dflash"]["speculative"] is False
    assert set(reply["choices"][0]["message"]["content"]) <= {"a", "b"}
    assert set(reply["edge_dflash"]["accept_lengths"]) <= {1}


def test_thinking_is_apart_from_the_answer(start):
    _, client = start("hm, the mug</think>Done.", kind=thinking_service)
    body = {"messages": TOOL_TASK, "edge_dflash": {"thinking": True}}
    message = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, the mug", "Done.")
    with client.stream("POST", CHAT, json={**body, "stream": True}) as response:
        deltas = [chunk["choices"][0].get("delta", {}) for chunk in events(response)[:-1]]
    for key in ("reasoning_content", "content"):
        assert "".join(delta.get(key, "") for delta in deltas) == message[key]


def test_a_model_without_tokenizer_takes_token_ids(start):
    _, client = start(tokenizer=None)
    refused = client.post("/v1/completions", json={"prompt": "go", "max_tokens": 2})
    assert refused.status_code == 400
    assert "no tokenizer; give token ids" in refused.json()["error"]["message"]
    reply = client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2.0}).json()  # as JSON has it
    assert reply["usage"]["completion_tokens"] == 2


def test_what_holds_without_a_budget_is_the_services(start):
    service, client = start(limits={"new_tokens": 5})
    assert client.post(CHAT, json={"messages": HELLO}).json()["usage"]["completion_tokens"] == 5
    refused = client.post(CHAT, json={"messages": HELLO, "max_completion_tokens": 6})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_completion_tokens"
    room = dataclasses.replace(service.planner.shape).usable_context
    near = client.post("/v1/completions", json={"prompt": [1] * (room - 2)}).json()  # less than 5 fit
    assert near["usage"]["completion_tokens"] == 2


def test_tools_reach_the_template_or_are_refused(client):
    tool = {"type": "function", "function": {"name": "grasp", "parameters": {"type": "object"}}}
    refused = client.post(CHAT, json={"messages": HELLO, "tools": [tool]})  # this model's template takes none
    assert refused.status_code == 400
    assert "takes no tools" in refused.json()["error"]["message"]
    assert client.post(
        CHAT, json={"messages": HELLO, "tools": [tool], "tool_choice": "none", "max_tokens": 1}
    ).is_success


def test_models_health_ready_and_metrics(service, client):
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["object"], card["owned_by"]) == ("fake", "model", "edge-dflash")
    assert client.get("/v1/models/fake").json() == card
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json()["status"] == "ok"
    assert client.get("/ready").status_code == 200
    client.post(CHAT, json={"messages": HELLO, "max_tokens": 16})
    text = client.get("/metrics").text
    for line in (
        'edge_dflash_requests_total{endpoint="chat",outcome="length"} 1.0',
        'edge_dflash_tokens_total{kind="generated"} 16.0',
        "edge_dflash_queue_depth 0.0",
        'edge_dflash_self_test{state="none"} 1.0',
        "edge_dflash_drafting 1.0",
        "edge_dflash_first_token_seconds_count 1.0",
        "edge_dflash_prefill_seconds_count 1.0",
        'edge_dflash_pictures{rows="made"} 0.0',
        "edge_dflash_picture_bytes 0.0",
        'edge_dflash_recorded_answers{outcome="written"} 0.0',
    ):
        assert line in text, line
    assert "_created" not in text


def test_metrics_count_drafts_by_position_and_accepted_tokens(start):
    asked = iter((0, 3, 1, 2))
    service, client = start(FakeBackend(TEXT_SHAPE, right=lambda position: next(asked)))
    extra = client.post(CHAT, json={"messages": HELLO, "max_tokens": 11}).json()["edge_dflash"]
    assert (extra["accept_lengths"], extra["accept_length"]) == ([1, 4, 2, 3], 2.5)
    value = service.metrics.registry.get_sample_value
    for position in range(1, TEXT_SHAPE.block_size):
        labels = {"position": str(position)}
        for name, counts in (("drafted", extra["drafts"]), ("accepted", extra["accepted_drafts"])):
            wanted = sum(count >= position for count in counts) or None
            assert value(f"edge_dflash_{name}_tokens_total", labels) == wanted
    assert value("edge_dflash_cycle_drafts_sum") == sum(extra["drafts"]) == 4 * (TEXT_SHAPE.block_size - 1)
    assert (value("edge_dflash_accept_length_sum"), value("edge_dflash_accept_length_count")) == (10, 4)
    assert value("edge_dflash_inter_token_seconds_count") == 10


def test_a_service_that_loads_or_stops_refuses(service, client):
    for state in ("loading", "draining"):
        service.state = state
        refused = client.post(CHAT, json={"messages": HELLO})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == state
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
    assert client.get("/v1/models").status_code == 200


def test_a_full_queue_is_429(start):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    service, client = start(backend, queue=1)
    first = service.planner.stream(HELLO, max_new_tokens=2)
    assert backend.reached.wait(60)
    second = service.planner.stream(HELLO, max_new_tokens=2)
    refused = client.post(CHAT, json={"messages": HELLO, "max_tokens": 2})
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "queue_full"
    backend.open.set()
    assert first.plan.tokens == second.plan.tokens
    text = client.get("/metrics").text
    assert 'edge_dflash_requests_total{endpoint="chat",outcome="queue_full"} 1.0' in text


def test_an_engine_that_fails_is_503_and_the_next_request_runs(start):
    from edge_dflash.errors import BackendError

    class Failing(FakeBackend):
        failing = True

        def verify(self, ids, lane=0, parents=None):
            if self.failing:
                raise BackendError("the device is gone; restart the service")
            return super().verify(ids, lane)

    backend = Failing(TEXT_SHAPE)
    _, client = start(backend)
    refused = client.post(CHAT, json={"messages": HELLO, "max_tokens": 9})
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_failed"
    with client.stream("POST", CHAT, json={"messages": HELLO, "max_tokens": 9, "stream": True}) as response:
        *_, error, done = events(response)
    assert error["error"]["code"] == "engine_failed"
    assert done == "[DONE]"
    backend.failing = False
    assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 9}).is_success


def test_a_client_that_takes_nothing_is_left(tmp_path, caplog):
    """Its events fill what lies between the two; then its connection is cut, and with it the request."""
    caplog.set_level("INFO", "edge_dflash.requests")
    backend = Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.005)  # 2 s in all
    service = fake_service(tmp_path, backend, timeouts={"write": 0.2})
    asked = {"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
    body = json.dumps(asked | {"edge_dflash": {"regex": "[a-f]{400}"}}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    value = service.metrics.registry.get_sample_value
    with live(service, tmp_path) as address, socket.socket(socket.AF_UNIX) as one:
        one.connect(address.removeprefix("unix:"))
        one.sendall(head.encode() + body)
        until(lambda: value("edge_dflash_disconnects_total"))
        assert service.observer.jobs == 0
        assert not service.streams
    assert value("edge_dflash_requests_total", {"endpoint": "chat", "outcome": "disconnected"}) == 1
    assert value("edge_dflash_tokens_total", {"kind": "generated"}) > 3
    (line,) = caplog.messages
    assert " finish=cancelled " in line
    assert line.endswith(" outcome=disconnected")
    service.close()


async def asked(app, body, send):
    """One chat, as bytes, with an ear of its own."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b""}
    scope |= {"headers": headers, "server": ("/run/api.sock", None), "root_path": "", "http_version": "1.1"}
    await app(scope, receive, send)


def test_comments_are_sent_while_nothing_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(completions_module, "ALIVE", 0.05)
    service = fake_service(tmp_path, Slow(FakeBackend(TEXT_SHAPE, right=lambda position: 0), 0.2))
    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    asyncio.run(
        asked(make_app(service), json.dumps({"messages": HELLO, "stream": True, "max_tokens": 3}).encode(), send)
    )
    assert sent.count(b": working\n\n") >= 4
    assert sent[-2] == b"data: [DONE]\n\n"
    service.close()
