"""Log-probabilities in the forms of the OpenAI API, whole and streamed, and read back by a planner far away."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from fakes import FakeBackend, FakeRows
from service_support import TEXT_SHAPE, TOOL, TOOL_TASK, client_of, fake_service, live, thinking_service, tool_service
from text_support import thinking_tokenizer

from edge_dflash import Planner, TokenLogprob
from edge_dflash.serve.errors import dump
from edge_dflash.serve.replies import LEAST

HELLO = [{"role": "user", "content": "hello"}]
PIECES = "grüße 🤖"  # characters of one, two and four tokens


def official(http):
    from openai import OpenAI  # here: it takes seconds, and every worker collects this file

    return OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)


@pytest.fixture
def client(service):
    with client_of(service) as http:
        yield official(http)


@pytest.fixture
def spelling(tmp_path):
    """A service whose model answers PIECES to HELLO."""
    tokenizer = thinking_tokenizer(tmp_path / "words")
    script = [*tokenizer.encode(PIECES), tokenizer.eos_token_id]
    backend = FakeBackend(TEXT_SHAPE, script=script, script_at=len(tokenizer.encode_chat(HELLO)))
    service = fake_service(tmp_path, backend, tokenizer)
    yield service
    service.close()


def entries(plan):
    """What a chat has to say of a plan."""

    def entry(one):
        return {"token": one.text.decode(errors="replace"), "bytes": list(one.text), "logprob": one.logprob}

    return [{**entry(one), "top_logprobs": [entry(other) for other in one.top]} for one in plan.logprobs]


def test_bytes_join_to_the_text_and_special_tokens_are_spelled(spelling):
    plan = spelling.planner.plan(HELLO, logprobs=1)
    *words, stop = plan.logprobs
    assert b"".join(one.text for one in words).decode() == plan.text == PIECES
    assert stop.text == b"<|end|>"
    assert spelling.planner.tokenizer.token_bytes(5000) is None
    with spelling.planner.stream(HELLO, logprobs=1) as stream:
        parts = list(stream)
    assert tuple(one for part in parts for one in part.logprobs) == plan.logprobs
    assert all(len(part.logprobs) == len(part.tokens) for part in parts)


class TestChat:
    def test_a_whole_answer_is_what_the_client_package_expects(self, service, client):
        plan = service.planner.plan(HELLO, max_new_tokens=9, logprobs=3)
        reply = client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=9, logprobs=True, top_logprobs=3
        )
        assert [one.to_dict() for one in reply.choices[0].logprobs.content] == entries(plan)
        reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, logprobs=True)
        assert [one.top_logprobs for one in reply.choices[0].logprobs.content] == [[]] * 9
        reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, logprobs=False)
        assert reply.choices[0].logprobs is None

    def test_a_stream_adds_up_to_the_whole(self, spelling):
        plan = spelling.planner.plan(HELLO, logprobs=2)
        with client_of(spelling) as http:
            client = official(http)
            asked = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
            chunks = list(client.chat.completions.create(**asked, stream=True))
            with client.chat.completions.stream(**asked) as stream:
                final = stream.get_final_completion()
        found = [one for chunk in chunks for one in getattr(chunk.choices[0].logprobs, "content", ())]
        assert [one.to_dict() for one in found] == entries(plan)
        assert [one.to_dict() for one in final.choices[0].logprobs.content] == entries(plan)
        assert final.choices[0].message.content == PIECES
        robot = found[-5:-1]
        assert {one.token for one in robot} == {"\ufffd"}
        assert bytes(byte for one in robot for byte in one.bytes).decode() == "🤖"

    def test_thinking_and_tool_calls_have_theirs_in_order(self, tmp_path):
        for name, made, body in (
            ("think", lambda path: thinking_service(path, "Well.</think>\n\nGo."), {"edge_dflash": {"thinking": True}}),
            ("tool", tool_service, {"tools": [TOOL]}),
        ):
            service = made(tmp_path / name)
            with client_of(service) as http:
                body |= {"messages": TOOL_TASK, "logprobs": True}
                body["edge_dflash"] = {**body.get("edge_dflash", {}), "tokens": True}
                reply = http.post("/v1/chat/completions", json=body).json()
            content = reply["choices"][0]["logprobs"]["content"]
            assert [one["token_id"] for one in content] == reply["edge_dflash"]["tokens"]
            said = "".join(one["token"] for one in content)
            assert said == ("Well.</think>\n\nGo.<|end|>" if name == "think" else said)
            assert (name == "tool") == ("<tool_call>" in said)
            service.close()

    def test_the_impossible_is_a_number_in_json(self, tmp_path):
        class Sure(FakeBackend):
            def _logits(self, context):
                row = np.full(self.shape.vocab_size, -np.inf, np.float32)
                row[65 + len(context) % 3] = 1.0
                return row

        class Broken(FakeBackend):
            def prefill(self, ids, lane=0, sight=None):
                super().prefill(ids, lane, sight)
                return FakeRows([[math.nan] * self.shape.vocab_size])

        for kind in (Sure, Broken):
            service = fake_service(tmp_path / kind.__name__, kind(TEXT_SHAPE))
            body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
            with client_of(service) as http:
                response = http.post("/v1/chat/completions", json=body)
                prompt = {"prompt": "a", "logprobs": 2, "max_tokens": 1}
                assert http.post("/v1/completions", json=prompt).status_code == 200
            (one,) = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["content"]
            if kind is Sure:
                assert [other["logprob"] for other in one["top_logprobs"]] == [0.0, LEAST]
            else:
                assert one["logprob"] == LEAST
            service.close()


def test_megabytes_are_written_beside_other_threads():
    """One call of the library's fast encoder holds all of them up."""
    entry = {"token": "a", "logprob": -0.123456789, "bytes": [97], "top_logprobs": [{"logprob": -1.5}] * 20}
    value = {"content": [entry] * 4000}
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    written = dump(value, sharing=True)
    done.set()
    thread.join()
    assert written == dump(value)
    assert len(ticks) > 5


class TestCompletions:
    @pytest.mark.parametrize("stream", [False, True])
    def test_four_lists_say_the_same(self, spelling, stream):
        prompt = list(spelling.planner.encode(HELLO))
        plan = spelling.planner.plan(prompt, logprobs=3)
        with client_of(spelling) as http:
            client = official(http)
            made = client.completions.create(model="fake", prompt=prompt, max_tokens=30, logprobs=3, stream=stream)
            parts = [one.choices[0].logprobs for one in (made if stream else [made])]
        tokens, values, top, offsets = (
            [one for part in parts if part is not None for one in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        )
        assert tokens == [one["token"] for one in entries(plan)]
        assert values == [one.logprob for one in plan.logprobs]
        for one, others in zip(plan.logprobs, top, strict=True):
            assert len(others) <= 3
            assert next(iter(others.values())) == one.top[0].logprob
        spelled = [PIECES[at].encode() for at in offsets[:-1]]
        assert all(one.text in character for one, character in zip(plan.logprobs[:-1], spelled, strict=True))
        assert offsets == sorted(offsets)
        assert offsets[-1] == len(PIECES)

    def test_without_alternatives_and_without_being_asked(self, client):
        asked = {"model": "fake", "prompt": "once", "max_tokens": 4}
        found = client.completions.create(**asked, logprobs=0).choices[0].logprobs
        assert len(found.tokens) == 4
        assert found.top_logprobs == [{}] * 4
        assert client.completions.create(**asked).choices[0].logprobs is None


class TestRemote:
    def test_a_remote_planner_has_those_of_the_open_one(self, spelling, tmp_path):
        with live(spelling, tmp_path) as url, Planner.connect(url) as remote:
            for task in (HELLO, spelling.planner.encode(HELLO)):
                for options in ({"logprobs": 20}, {"logprobs": 0}, {"logprobs": 3, "temperature": 2.0, "seed": 3}):
                    here, there = (one.plan(task, max_new_tokens=12, **options) for one in (spelling.planner, remote))
                    assert there.tokens == here.tokens
                    assert there.logprobs == here.logprobs
                    assert isinstance(there.logprobs[0], TokenLogprob)
            with remote.stream(HELLO, max_new_tokens=12, logprobs=1) as stream:
                parts = list(stream)
            assert tuple(one for part in parts for one in part.logprobs) == stream.plan.logprobs
            session = remote.session()
            turn = session.plan("hello", max_new_tokens=5, logprobs=1)
            assert len(turn.logprobs) == len(turn.tokens)
            assert remote.plan(HELLO, max_new_tokens=3).logprobs == ()
