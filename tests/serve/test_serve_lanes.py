"""A service of several lanes: what is counted of them, and clients whose answers are those that they have alone."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from builder_support import add_tokenizer
from golden_pairs import ENGINE, backend, pair
from service_support import client_of, config_for

from edge_dflash.board.state import BoardState
from edge_dflash.errors import ConfigError
from edge_dflash.planner import Planner
from edge_dflash.serve.limits import own
from edge_dflash.serve.metrics import ACCOUNTS, OTHERS, RATE_SECONDS, Metrics, Rate
from edge_dflash.serve.service import Service
from edge_dflash.text.tokenizer import Tokenizer

LANES = 3
NAME = "qwen3_5"


def lane_service(directory):
    """A service with a small pair on the reference backend."""
    words = Tokenizer.open(add_tokenizer(directory / "tokenizer", pair(NAME).target.vocab_size))
    service = Service(config_for(directory))
    lanes = backend(NAME, ENGINE, lanes=LANES, prefill_chunk=16)
    options = {"bundle": "f" * 64, "fallback": False, "queue": 32, "prompt_share": 1.0}
    service.take(Planner(lanes, words, [words.eos_token_id], observer=service.observer, **options))
    service.open_doors()
    return service


def request_of(number):
    """A request of a client: random, the same for the same number."""
    pick = random.Random(number)
    content = " ".join(pick.choice(("go", "to", "the", "mug", "door")) for _ in range(pick.randint(1, 6)))
    sampled = {"temperature": 0.9, "seed": pick.randrange(9)} if pick.random() < 0.5 else {}
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": pick.randint(1, 20), **sampled}
    return body | {"user": f"client-{number % 4}", "edge_dflash": {"priority": pick.randint(-1, 1)}}


def test_answers_of_several_clients_are_those_that_each_has_alone(tmp_path):
    """A short soak: threads that ask without a pause, every answer compared with the one that came alone."""
    service, wrong, made = lane_service(tmp_path), [], []

    def asked(client, number):
        reply = client.post("/v1/chat/completions", json=request_of(number)).json()
        return reply["choices"][0], reply["usage"]["completion_tokens"]

    with client_of(service) as client:
        alone = [asked(client, number) for number in range(10)]

        def soak(start):
            for turn in range(4):
                number = (start * 5 + turn * 3) % len(alone)
                found = asked(client, number)
                made.append(found[1])
                if found != alone[number]:
                    wrong.append((number, found))

        threads = [threading.Thread(target=soak, args=(start,)) for start in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        text = client.get("/metrics").text
    service.close()
    assert wrong == []
    assert len(made) == 20
    assert f"edge_dflash_lanes {LANES}.0" in text
    assert "edge_dflash_lanes_in_use 0.0" in text
    tokens = sum(made) + sum(count for _, count in alone)
    assert f'edge_dflash_tokens_total{{kind="generated"}} {tokens:.1f}' in text
    assert f'edge_dflash_account_tokens_total{{account="{own()}"}} {tokens:.1f}' in text
    value = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}
    passes, alone_passes = value["edge_dflash_pass_lanes_count"], value['edge_dflash_pass_lanes_bucket{le="1.0"}']
    assert passes > alone_passes  # some cycles were shared
    assert value["edge_dflash_pass_lanes_sum"] <= LANES * passes
    assert value["edge_dflash_pass_rows_count"] == passes


def test_accounts_beyond_the_bound_are_counted_together():
    """Whoever asks under ever more names makes no more series."""
    metrics = Metrics(BoardState)
    timings = SimpleNamespace(queue_seconds=0.0, first_token_seconds=0.0)
    plan = SimpleNamespace(timings=timings, prompt_tokens=1, reused_tokens=0, prompt_logprobs=(), tokens=(1, 2))
    for number in (*range(ACCOUNTS + 20), 0):
        metrics.plan(plan, f"key-{number}")
    lines = metrics.text().decode().splitlines()
    lines = [line for line in lines if line.startswith("edge_dflash_account_tokens_total")]
    assert len(lines) == ACCOUNTS + 1
    assert f'edge_dflash_account_tokens_total{{account="{OTHERS}"}} 40.0' in lines
    assert 'edge_dflash_account_tokens_total{account="key-0"} 4.0' in lines


def test_tokens_a_second_are_those_of_the_last_seconds():
    now = [100.2]
    rate = Rate(lambda: now[0])
    assert rate() == 0.0
    for _ in range(4):
        rate(5)
    now[0] += 3.0
    rate(10)
    assert rate() == 30 / RATE_SECONDS
    now[0] += RATE_SECONDS - 3.0
    assert rate() == 10 / RATE_SECONDS
    now[0] += RATE_SECONDS
    assert rate() == 0.0


def test_a_service_opens_its_bundle_with_its_lanes(tmp_path, monkeypatch):
    given = {}

    def opened(path, **options):
        given.update(options)
        raise ConfigError("enough")

    monkeypatch.setattr(Planner, "open", opened)
    for engine, lanes in (({}, None), ({"lanes": 4, "prompt_share": 0.25}, 4)):
        with pytest.raises(ConfigError, match="enough"):
            Service(config_for(tmp_path, engine=engine)).load()
        assert (given["lanes"], given["prompt_share"]) == (lanes, engine.get("prompt_share", 0.5))
