"""A prompt with its log-probabilities over HTTP: OpenAI's form, what lm-eval asks and reads, a planner far away."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from operator import itemgetter

import pytest
from fakes import FakeBackend
from planner_support import Gate, Slow
from service_support import TEXT_SHAPE, client_of, events, fake_service, live, until

from edge_dflash import ContextError, Planner, RequestCancelledError, RequestError
from edge_dflash.serve.replies import Writer

COMPLETIONS = "/v1/completions"
TEXT = "grüße 🤖 an <|end|>"
WIDE = replace(TEXT_SHAPE, max_context=4200, prefill_chunk=64)


def ask(client, prompt, status=200, **body):
    response = client.post(COMPLETIONS, json={"prompt": prompt, "echo": True, **body})
    assert response.status_code == status, response.text
    return response.json()


class TestForm:
    def test_prompt_and_completion_are_one(self, service):
        planner = service.planner
        ids = planner.encode(TEXT, raw=True)
        plan = planner.plan(TEXT, raw=True, prompt_logprobs=True, logprobs=2, max_new_tokens=5)
        with client_of(service) as client:
            for prompt in (TEXT, list(ids), [list(ids)]):
                made = ask(client, prompt, max_tokens=5, logprobs=2, edge_dflash={"raw": True})
                (choice,) = made["choices"]
                both, logprobs = (*plan.prompt_logprobs, *plan.logprobs), choice["logprobs"]
                assert choice["text"] == TEXT + plan.text
                assert logprobs["tokens"] == [one.text.decode(errors="replace") for one in both]
                assert logprobs["token_logprobs"] == [None, *(one.logprob for one in both[1:])]
                nothing, *likely = logprobs["top_logprobs"]
                assert nothing is None
                assert [max(top.values()) for top in likely] == [one.top[0].logprob for one in both[1:]]
                before = [len(_whole(planner, ids[: at + 1])) - 1 for at in range(len(ids) - 1)]
                assert logprobs["text_offset"][: len(ids)] == [*before, len(TEXT) - len("<|end|>")]
                assert made["usage"]["prompt_tokens"] == len(ids)
                assert made["usage"]["completion_tokens"] == 5

    def test_nothing_is_made_where_nothing_is_wanted(self, service):
        score = service.planner.score("abc", logprobs=1)
        with client_of(service) as client:
            made = ask(client, "abc", max_tokens=0, logprobs=1)
        (choice,) = made["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, *(one.logprob for one in score.logprobs)]
        assert made["usage"]["completion_tokens"] == 0
        assert made["edge_dflash"]["accept_lengths"] == []

    def test_without_logprobs_it_is_text_alone(self, service):
        plan = service.planner.plan("abc", raw=True, max_new_tokens=4)
        with client_of(service) as client:
            (choice,) = ask(client, "abc", max_tokens=4)["choices"]
            assert (choice["text"], choice["logprobs"]) == ("abc" + plan.text, None)
            two = ask(client, "abc", max_tokens=4, n=2)["choices"]
            assert [one["text"] for one in two] == ["abc" + plan.text] * 2

    @pytest.mark.parametrize("logprobs", [None, 1])
    def test_a_stream_adds_up_to_the_whole(self, service, logprobs):
        how = {} if logprobs is None else {"logprobs": logprobs}
        with client_of(service) as client:
            (whole,) = ask(client, TEXT, max_tokens=6, **how)["choices"]
            body = {"prompt": TEXT, "echo": True, "max_tokens": 6, "stream": True, **how}
            with client.stream("POST", COMPLETIONS, json=body) as response:
                *chunks, _ = events(response)
        said = [chunk["choices"][0] for chunk in chunks]
        assert "".join(one["text"] for one in said) == whole["text"]
        for name in whole["logprobs"] or ():
            parts = [one["logprobs"][name] for one in said if one["logprobs"]]
            assert [one for part in parts for one in part] == whole["logprobs"][name]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_long_prompt_is_written_beside_the_loop(self, tmp_path, monkeypatch, stream):
        sizes, original = [], Writer._logprobs

        def noted(self, found, index):
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            sizes.append(len(found))
            return original(self, found, index)

        monkeypatch.setattr(Writer, "_logprobs", noted)
        service = fake_service(tmp_path, FakeBackend(WIDE))
        body = {"prompt": [3, 5] * 200, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": stream}
        with client_of(service) as client:
            assert client.post(COMPLETIONS, json=body).status_code == 200
        assert sizes == [400]

    @pytest.mark.parametrize(
        ("body", "param", "why"),
        [
            ({"max_tokens": 0}, "max_tokens", "0 is for echo with logprobs"),
            ({"max_completion_tokens": 0}, "max_completion_tokens", "0 is for echo with logprobs"),
            ({"max_tokens": 0, "logprobs": 1, "echo": False}, "max_tokens", "0 is for echo"),
            ({"max_tokens": -1, "logprobs": 1}, "max_tokens", "max_tokens"),
            ({"logprobs": 21}, "logprobs", "logprobs"),
            ({"logprobs": 1, "prompt": "a"}, None, "one token"),
            ({"logprobs": 1, "prompt": [[5, 6], [7, 8]]}, "prompt", "one list of token ids"),
            ({"logprobs": 1, "edge_dflash": {"session": "a"}}, None, "session"),
            ({"logprobs": 1, "n": 2, "temperature": 1}, "n", "n is 2"),
            ({"logprobs": 1, "n": 2}, "n", "n is 2; echo with logprobs gives"),
            ({"echo": "yes"}, "echo", "echo"),
            ({"prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs"),
        ],
    )
    def test_what_is_refused(self, service, body, param, why):
        with client_of(service) as client:
            error = ask(client, body.pop("prompt", "abc"), 400, **body)["error"]
        assert error["param"] == param
        assert why in error["message"]

    def test_a_chat_has_no_echo(self, service):
        with client_of(service) as client:
            body = {"messages": [{"role": "user", "content": "a"}], "echo": True}
            assert client.post("/v1/chat/completions", json=body).json()["error"]["param"] == "echo"


def _whole(planner, ids):
    """The text up to and with the character that the last of the ids begins, or is a part of."""
    data = b"".join(planner.tokenizer.token_bytes(one) for one in ids)
    while data and data[-1] & 0xC0 == 0x80:
        data = data[:-1]
    return data.decode(errors="replace")


def lm_eval(client, pairs):
    """Sums and whether greedy, as lm-eval 0.4.13's local-completions asks and reads: ids of a context and behind it."""
    found = []
    for context, continuation in pairs:
        body = {"model": "fake", "prompt": [[*context, *continuation]], "temperature": 0, "max_tokens": 1}
        out = client.post(COMPLETIONS, json={**body, "logprobs": 1, "seed": 1234, "echo": True}).json()
        for choice in sorted(out["choices"], key=itemgetter("index")):
            values = choice["logprobs"]["token_logprobs"][len(context) : -1]
            top = choice["logprobs"]["top_logprobs"][len(context) : -1]
            found.append((sum(values), all(one == max(most.values()) for one, most in zip(values, top, strict=True))))
    return found


def test_what_lm_eval_asks_and_reads(service):
    planner = service.planner
    context = planner.encode("The door is", raw=True)
    greedy = planner.plan(context, max_new_tokens=6, logprobs=0)
    assert planner.tokenizer.eos_token_id not in greedy.tokens
    other = (greedy.tokens[0], (greedy.tokens[1] + 1) % 200)
    with client_of(service) as client:
        (sure, yes), (unsure, no) = lm_eval(client, [(context, greedy.tokens), (context, other)])
        stop = {"prompt": [list(context)], "model": "fake", "max_tokens": 6, "temperature": 0, "stop": ["\n\n"]}
        (choice,) = client.post(COMPLETIONS, json={**stop, "seed": 1234}).json()["choices"]
    assert (yes, no) == (True, False)
    assert sure == pytest.approx(math.fsum(one.logprob for one in greedy.logprobs), abs=1e-4)
    score = planner.score([*context, *other])
    assert unsure == pytest.approx(sum(one.logprob for one in score.logprobs[-2:]), abs=1e-9)
    assert choice["text"] == greedy.text


class TestBounds:
    def test_a_huge_prompt_is_refused_quickly(self, tmp_path):
        service = fake_service(tmp_path)
        with client_of(service) as client:
            began = time.perf_counter()
            error = ask(client, [7] * 100_000, 400, logprobs=1, max_tokens=0)["error"]
            assert time.perf_counter() - began < 5
        assert error["code"] == "context_length_exceeded"
        assert "508 tokens" in error["message"]
        service.close()

    def test_two_thousand_tokens_with_all_that_is_told_of_them(self, tmp_path):
        service = fake_service(tmp_path, FakeBackend(WIDE))
        with client_of(service) as client:
            made = ask(client, [3, 5] * 1000, logprobs=20, max_tokens=0)
            assert len(made["choices"][0]["logprobs"]["top_logprobs"]) == 2000
            lines = client.get("/metrics").text.splitlines()
        counted = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("edge_dflash_")}
        assert counted['edge_dflash_tokens_total{kind="scored"}'] == 2000
        assert counted['edge_dflash_tokens_total{kind="generated"}'] == 0
        assert counted["edge_dflash_accept_length_count"] == counted["edge_dflash_first_token_seconds_count"] == 0
        assert counted["edge_dflash_prefill_seconds_count"] == 0
        service.close()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_deadline_gives_no_half(self, tmp_path, stream):
        service = fake_service(tmp_path, Slow(FakeBackend(WIDE), 0.005))
        how = {"logprobs": 1, "max_tokens": 1, "edge_dflash": {"deadline_s": 0.2}}
        with client_of(service) as client:
            if stream:
                body = {"prompt": [3, 5] * 1000, "echo": True, "stream": True, **how}
                with client.stream("POST", COMPLETIONS, json=body) as response:
                    *_, error, _ = events(response)
            else:
                error = ask(client, [3, 5] * 1000, 503, **how)
            assert "(deadline) before all 2000 tokens" in error["error"]["message"]
            assert ask(client, "abc", logprobs=1, max_tokens=0)["choices"][0]["text"] == "abc"
        service.close()

    def test_a_client_that_leaves_ends_it(self, tmp_path):
        gate = Gate(FakeBackend(WIDE), free=5)
        service = fake_service(tmp_path, gate)
        with live(service, tmp_path) as url, Planner.connect(url) as remote:
            stream = remote.stream([3, 5] * 1000, prompt_logprobs=True, logprobs=0, max_new_tokens=0)
            assert gate.reached.wait(60)
            stream.cancel()
            gate.open.set()
            until(lambda: not service.streams)
            assert gate.backend.passes.count("verify") < 100
        service.close()


def test_a_planner_far_away_scores_as_the_one_here(tmp_path):
    service = fake_service(tmp_path, Slow(FakeBackend(WIDE), 0.001))
    tasks = [TEXT, "abc", "x" * 40]
    messages = [{"role": "user", "content": "hello"}]
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        here = service.planner
        for one, other in zip(here.score(tasks, logprobs=3), remote.score(tasks, logprobs=3), strict=True):
            assert (one.tokens, one.logprobs, one.total) == (other.tokens, other.logprobs, other.total)
        assert here.score([3, 4, 5]).logprobs == remote.score([3, 4, 5]).logprobs
        assert here.score(messages).logprobs == remote.score(messages).logprobs
        how = {"raw": True, "prompt_logprobs": True, "logprobs": 1, "max_new_tokens": 6}
        one, other = here.plan("abc", **how), remote.plan("abc", **how)
        assert (one.text, one.tokens, one.logprobs) == (other.text, other.tokens, other.logprobs)
        assert one.prompt_logprobs == other.prompt_logprobs
        for bad in ("", [5], [3, 10**6]):
            with pytest.raises(RequestError):
                remote.score(bad)
        with pytest.raises(ContextError):
            remote.score([7] * 100_000)
        with pytest.raises(RequestCancelledError, match="deadline"):
            remote.score([3, 5] * 1500, deadline=0.2)
        with pytest.raises(RequestError, match="encode"):
            remote.plan(messages, logprobs=0, prompt_logprobs=True)
    service.close()
