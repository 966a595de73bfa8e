"""OpenAI's ``n``: choices of one prompt, whole and in pieces, each that of a request alone with its seed."""

from __future__ import annotations

import pytest
from fakes import FakeBackend
from service_support import TEXT_SHAPE, client_of, events, fake_service

from edge_dflash.errors import RequestError

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODY = {"messages": HELLO, "max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": True}


def alone(client, path, body, n):
    return [client.post(path, json={**body, "seed": 5 + index}).json() for index in range(n)]


@pytest.mark.parametrize(("path", "task"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "once"})])
def test_choices_are_those_of_requests_alone(client, path, task):
    body = {**BODY, **task, "edge_dflash": {"tokens": True}, "logprobs": True if path == CHAT else 2}
    if path == COMPLETIONS:
        del body["messages"]
    single = alone(client, path, body, 3)
    reply = client.post(path, json={**body, "n": 3}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    for choice, one, extra in zip(reply["choices"], single, reply["edge_dflash"]["candidates"], strict=True):
        assert {**choice, "index": 0} == one["choices"][0]
        assert (extra["tokens"], extra["seed"]) == (one["edge_dflash"]["tokens"], one["edge_dflash"]["seed"])
    made = sum(one["usage"]["completion_tokens"] for one in single)
    prompt = single[0]["usage"]["prompt_tokens"]
    assert reply["usage"] == {**single[0]["usage"], "completion_tokens": made, "total_tokens": prompt + made}
    assert reply["edge_dflash"]["seed"] == 5
    assert "candidates" not in single[0]["edge_dflash"]


@pytest.mark.parametrize(("path", "task"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "once"})])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_of_all_choices_come_together(client, path, task, temperature):
    body = {**BODY, **task, "temperature": temperature, "n": 3, "logprobs": True if path == CHAT else 1}
    body["edge_dflash"] = {"tokens": True}
    if path == COMPLETIONS:
        del body["messages"]
    whole = client.post(path, json=body).json()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=asked) as response:
        *chunks, usage, done = events(response)
    assert (done, usage["usage"], usage["choices"]) == ("[DONE]", whole["usage"], [])
    for choice, extra in zip(whole["choices"], whole["edge_dflash"]["candidates"], strict=True):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        *pieces, last = mine
        said = [piece["choices"][0] for piece in pieces]
        text = "".join(one["delta"].get("content", "") if path == CHAT else one["text"] for one in said)
        assert text == (choice["message"]["content"] if path == CHAT else choice["text"])
        tokens = [token for piece in pieces for token in piece.get("edge_dflash", {}).get("tokens", [])]
        assert tokens == last["edge_dflash"]["tokens"] == extra["tokens"]
        assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
        offsets = [at for one in said if one["logprobs"] and path != CHAT for at in one["logprobs"]["text_offset"]]
        assert offsets == ([] if path == CHAT else choice["logprobs"]["text_offset"])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_equal_choices_are_made_once(tmp_path):
    backend = FakeBackend(TEXT_SHAPE)
    with client_of(fake_service(tmp_path, backend)) as client:
        single = client.post(CHAT, json={"messages": HELLO, "max_tokens": 8}).json()
        passes = len(backend.passes)
        reply = client.post(CHAT, json={"messages": HELLO, "max_tokens": 8, "n": 4}).json()
    assert len(backend.passes) == 2 * passes
    assert [choice["message"] for choice in reply["choices"]] == [single["choices"][0]["message"]] * 4
    assert reply["usage"]["completion_tokens"] == 4 * 8


def test_the_prompt_is_counted_once(service, client):
    client.post(CHAT, json={**BODY, "n": 3})
    found = client.get("/metrics").text
    prompt = len(service.planner.encode(HELLO))
    assert f'edge_dflash_tokens_total{{kind="prompt"}} {float(prompt)}' in found
    assert 'edge_dflash_tokens_total{kind="generated"} 36.0' in found
    assert 'edge_dflash_tokens_total{kind="reused"} 0.0' in found
    assert "edge_dflash_queue_wait_seconds_count 1.0" in found


def test_seeds_that_end_are_refused(client):
    refused = client.post(CHAT, json={**BODY, "n": 2, "seed": 2**64 - 1})
    assert (refused.status_code, "seed is" in refused.json()["error"]["message"]) == (400, True)


class Failing(FakeBackend):
    """The cycles of one seed fail."""

    def cycle(self, asked):
        if asked.sampling.seed == 6:
            raise RequestError("the cycle failed")
        return super().cycle(asked)


def test_a_choice_that_fails_ends_the_answer_and_tokens_of_others_are_counted(start):
    service, client = start(Failing(TEXT_SHAPE))
    refused = client.post(CHAT, json={**BODY, "n": 3})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "the cycle failed")
    made = service.metrics.registry.get_sample_value("edge_dflash_tokens_total", {"kind": "generated"})
    assert made >= BODY["max_tokens"]  # those of choice 0
    with client.stream("POST", CHAT, json={**BODY, "n": 3, "stream": True}) as response:
        *_, error, done = events(response)
    assert (error["error"]["message"], done) == ("the cycle failed", "[DONE]")
    assert not service.streams
    assert client.post(CHAT, json=BODY).status_code == 200
