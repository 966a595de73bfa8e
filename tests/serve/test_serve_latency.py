"""The event loop beside bodies of 1 MB: no more than 100 ms of anybody's work stay on it."""

from __future__ import annotations

import asyncio
import os

import pytest
from event_loop_latency import COMPLETIONS, chat, head, kinds, measure, send, served

from edge_dflash.serve.errors import Refusal
from edge_dflash.serve.limits import CONTAINERS, parse_object

KINDS = kinds()


@pytest.fixture(scope="module")
def service():
    with served() as service:
        send(service, [chat()])
        yield service


@pytest.mark.parametrize("name", KINDS)
def test_no_body_holds_the_loop(service, name):
    maxima = []
    for _ in range(4):
        found = measure(service, KINDS[name], times=1)
        maxima.append(found["loop"][2])
        bound = 100 * max(1, os.getloadavg()[0] / os.cpu_count())  # other work of the machine takes its share
        if maxima[-1] < bound:
            break
    assert min(maxima) < bound, maxima


def answer(service, pieces):
    """The whole answer."""
    with service.connect() as one:
        for piece in pieces:
            one.sendall(piece)
        return b"".join(iter(lambda: one.recv(65536), b""))


def chunked(data, size):
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(("length", "size", "status"), [(400, 1, 200), (100_000, 128, 400), (5_000, 1, 400)])
def test_a_body_comes_in_few_chunks(service, length, size, status):
    data = b'{"prompt": "red", "max_tokens": 2' + b" " * (length - 34) + b"}"
    data = data if status == 200 or size == 1 else b'{"prompt": "' + b"x" * (length - 14) + b'"}'
    said = answer(service, [head(COMPLETIONS, "transfer-encoding: chunked"), chunked(data, size)])
    assert said.startswith(b"HTTP/1.1 %d" % status)
    assert (b"tiny chunks" in said) == (length == 5_000)


@pytest.mark.parametrize(("lines", "status"), [(240, 200), (300, 431)])
@pytest.mark.parametrize("cut", [0, 60, -1, -3])
def test_a_request_has_few_headers(service, lines, status, cut):
    data = b'{"prompt": "x",' + b"\n" * 500 + b'"max_tokens": 2}'
    start = head(COMPLETIONS, f"content-length: {len(data)}", *["x: y"] * lines)
    said = answer(service, [start[:cut], start[cut:] + data])
    assert said.startswith(b"HTTP/1.1 %d" % status), said


def test_a_body_has_a_bounded_number_of_objects():
    most = CONTAINERS - 2
    inside = b'"[[[\\"{{{\\\\"'  # brackets of a text do not count
    assert parse_object(b'{"a": [' + b",".join([b"[]"] * most) + b"]}", 64)
    assert parse_object(b'{"a": [' + b",".join([inside] * most) + b"]}", 64)
    with pytest.raises(Refusal, match="65536 objects"):
        parse_object(b'{"a": [' + b",".join([b"{}"] * (most + 1)) + b"]}", 64)


def test_large_bodies_take_turns_and_small_ones_do_not_wait(service):
    large = KINDS["many messages"]

    async def ask():
        sending = [asyncio.create_task(asyncio.to_thread(send, service, large)) for _ in range(5)]
        await asyncio.sleep(0.1)
        small = await asyncio.to_thread(send, service, [chat()])
        late = sum(not one.done() for one in sending)
        return small, late, await asyncio.gather(*sending)

    small, late, statuses = asyncio.run(ask())
    assert small == "200"
    assert late >= 3
    assert set(statuses) == {"400"}  # of 512 tokens


def test_an_encoded_text_is_the_same_in_the_batch_call(service):
    from event_loop_latency import ROOT
    from tokenizers import Tokenizer as Words

    from edge_dflash.text.tokenizer import Tokenizer

    directory = ROOT / "edge_dflash/demo/models/target"
    words, plain = Tokenizer.open(directory), Words.from_file(str(directory / "tokenizer.json"))
    for text in ("", " ", "Take the red mug.", "a<|im_end|>b", "\u00e9\U0001f600\n\t", "x" * 5000):
        assert list(words.encode(text)) == plain.encode(text, add_special_tokens=False).ids
