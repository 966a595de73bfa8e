"""What the real clients get from a service: the ``openai`` package and ``curl``, over the Unix socket and over TCP."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass

import httpx2
import openai
import pytest
from service_support import Process

TASK = [{"role": "user", "content": "Bring the red mug to the kitchen table."}]
KEY = "conformance-key-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"action": {"enum": ["navigate", "pick"]}, "target": {"type": "string", "maxLength": 8}},
    "required": ["action", "target"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "step", "schema": SCHEMA, "strict": True}}
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Way:
    """A way in: a socket's path, or an address and its key."""

    uds: str | None
    address: str = "http://edge-dflash"
    key: str = ""

    def http(self) -> httpx2.Client:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        transport = httpx2.HTTPTransport(uds=self.uds)
        return httpx2.Client(transport=transport, base_url=self.address, headers=headers, timeout=60)

    def openai(self, key: str | None = None) -> openai.OpenAI:
        http = httpx2.Client(transport=httpx2.HTTPTransport(uds=self.uds), timeout=60)
        chosen = (self.key or "none") if key is None else key
        return openai.OpenAI(base_url=self.address + "/v1", api_key=chosen, http_client=http, max_retries=0)

    def curl(self, path: str, body: object = None, *arguments: str) -> tuple[int, str, int]:
        """Status, body and exit code of curl."""
        command = ["curl", "-sS", "-N", "-w", "\n%{http_code}", *arguments]
        command += ["--unix-socket", self.uds] if self.uds else []
        command += ["-H", f"authorization: Bearer {self.key}"] if self.key else []
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            command += ["-H", "content-type: application/json", "--data-binary", "@-"]
        else:
            data = b""
        done = subprocess.run([*command, self.address + path], input=data, capture_output=True, check=False)
        text, _, status = done.stdout.decode().rpartition("\n")
        return int(status or 0), text, done.returncode


def idle(way: Way, seconds: float = 5.0) -> float:
    """Wait until nothing runs; returns the seconds that it took."""
    began = time.perf_counter()
    with way.http() as client:
        while client.get("/health").json()["running"]:
            assert time.perf_counter() - began < seconds, "the request still runs"
            time.sleep(0.002)
    return time.perf_counter() - began


# The openai package ---------------------------------------------------------------------------------------------------


def models(way: Way) -> None:
    with way.openai() as client:
        listed = [model.id for model in client.models.list()]
        assert listed == ["demo"]
        assert client.models.retrieve("demo").owned_by == "edge-dflash"


def chat(way: Way) -> None:
    with way.openai() as client:
        reply = client.chat.completions.create(model="demo", messages=TASK, max_completion_tokens=12)
        assert reply.usage.completion_tokens == 12
        assert reply.choices[0].finish_reason == "length"
        assert reply.choices[0].message.content.startswith('{"goal"')
        assert reply.model_extra["edge_dflash"]["accept_length"] >= 1


def chat_stream(way: Way) -> None:
    with way.openai() as client:
        whole = client.chat.completions.create(model="demo", messages=TASK, max_tokens=24)
        options = {"include_usage": True}
        stream = client.chat.completions.create(
            model="demo", messages=TASK, max_tokens=24, stream=True, stream_options=options
        )
        chunks = list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert chunks[-2].choices[0].finish_reason == "length"


def json_schema(way: Way) -> None:
    with way.openai() as client:
        reply = client.chat.completions.create(model="demo", messages=TASK, response_format=FORM)
        value = json.loads(reply.choices[0].message.content)
        assert set(value) == {"action", "target"}
        assert value["action"] in ("navigate", "pick")
        reply = client.chat.completions.create(
            model="demo", messages=TASK, response_format={"type": "json_object"}, max_tokens=400
        )
        assert isinstance(json.loads(reply.choices[0].message.content), dict)


def json_schema_stream(way: Way) -> None:
    with (
        way.openai() as client,
        client.chat.completions.stream(model="demo", messages=TASK, response_format=FORM) as stream,
    ):
        for _ in stream:
            pass
        assert set(json.loads(stream.get_final_completion().choices[0].message.content)) == {"action", "target"}


def sampling(way: Way) -> None:
    with way.openai() as client:
        drawn = [
            client.chat.completions.create(
                model="demo", messages=TASK, max_tokens=32, temperature=2.0, top_p=0.99, seed=seed
            ).choices[0].message.content
            for seed in (1, 1, 2)
        ]  # fmt: skip
        assert drawn[0] == drawn[1]
        assert drawn[0] != drawn[2]


def stop(way: Way) -> None:
    with way.openai() as client:
        reply = client.chat.completions.create(model="demo", messages=TASK, stop=['"steps"', "never"])
        assert reply.choices[0].finish_reason == "stop"
        assert '"steps"' not in reply.choices[0].message.content


def completions(way: Way) -> None:
    with way.openai() as client:
        reply = client.completions.create(model="demo", prompt="Bring the", max_tokens=5)
        stream = client.completions.create(model="demo", prompt="Bring the", max_tokens=5, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == reply.choices[0].text
        assert reply.usage.completion_tokens == 5


def conversation(way: Way) -> None:
    with way.openai() as client:
        name = f"conformance-{time.time_ns()}"
        extra = {"edge_dflash": {"session": name, "deadline_s": 30}}
        first = client.chat.completions.create(model="demo", messages=TASK, max_tokens=8, extra_body=extra)
        more = [{"role": "user", "content": "Now the plate."}]
        second = client.chat.completions.create(model="demo", messages=more, max_tokens=8, extra_body=extra)
        assert second.usage.prompt_tokens > first.usage.total_tokens
        assert second.usage.prompt_tokens_details.cached_tokens > 0


def cancel(way: Way) -> None:
    with way.openai() as client:
        stream = client.chat.completions.create(model="demo", messages=TASK, stream=True, extra_body=PLAIN)
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
    assert idle(way) < 1.0
    with way.openai() as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="demo", messages=TASK, timeout=0.15, extra_body=PLAIN)
    assert idle(way) < 1.0


PLAIN = {"edge_dflash": {"speculative": False}}


def bad_requests(way: Way) -> None:
    with way.openai() as client:
        for error, given, facts in (
            (openai.BadRequestError, {"n": 9}, ("n", None)),
            (openai.BadRequestError, {"max_tokens": 100_000}, (None, "context_length_exceeded")),
            (openai.NotFoundError, {"model": "gpt-4"}, (None, "model_not_found")),
            (openai.BadRequestError, {"messages": []}, ("messages", None)),
            (openai.BadRequestError, {"extra_body": {"unknown": 1}}, (None, "unknown_parameter")),
            (openai.BadRequestError, {"stream": True, "temperature": 9}, ("temperature", None)),
        ):
            with pytest.raises(error) as caught:
                client.chat.completions.create(**{"model": "demo", "messages": TASK, **given})
            for found, wanted in zip((caught.value.param, caught.value.code), facts, strict=True):
                assert wanted in (None, found), given


def wrong_key(way: Way) -> None:
    if way.key:
        with way.openai("wrong-key-0123456789") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


# curl -----------------------------------------------------------------------------------------------------------------


def curl_stream(way: Way) -> None:
    status, text, _ = way.curl(CHAT, {"messages": TASK, "max_tokens": 6, "stream": True})
    assert status == 200
    data = [line for line in text.split("\n\n") if line]
    assert data[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk" for line in data[:-1])


def curl_cancel(way: Way) -> None:
    _, _, code = way.curl(CHAT, {"messages": TASK, "stream": True, **PLAIN}, "--max-time", "0.2")
    assert code == 28  # operation timed out
    assert idle(way) < 1.0


def curl_bad_requests(way: Way) -> None:
    for body, wanted in (
        (b"{", 400), (b"\xff", 400), (b'{"messages": [NaN]}', 400), (b"[" * 100_000, 400),
        ({"messages": TASK, "n": 9}, 400),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 413),
    ):  # fmt: skip
        status, text, _ = way.curl(CHAT, body)
        assert status == wanted, (body[:20], status)
        assert json.loads(text)["error"]["message"]
    for path, wanted in (("/v1/nothing", 404), (CHAT, 405), ("/v1/edge_dflash/sessions/..%2f..%2fetc", 404)):
        status, text, _ = way.curl(path, None, "--path-as-is")
        assert status == wanted, (path, status)
        assert json.loads(text)["error"]


def curl_health(way: Way) -> None:
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert way.curl(path)[0] == 200


CHECKS = (
    *(models, chat, chat_stream, json_schema, json_schema_stream, sampling, stop, completions, conversation),
    *(cancel, bad_requests, wrong_key, curl_stream, curl_cancel, curl_bad_requests, curl_health),
)


def ways(process: Process) -> tuple[Way, Way]:
    """Both ways into a process."""
    return Way(str(process.socket)), Way(None, process.tcp, KEY)
