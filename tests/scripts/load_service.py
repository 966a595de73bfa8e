"""A service under load: clients that ask one after another, for some minutes.

``python tests/scripts/load_service.py BUNDLE --minutes 5 --clients 4`` prints requests, failures, times to the first
token and the growth of memory after the first tenth, as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx2

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from service_support import Process

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/edge_dflash/sessions"
TASKS = (
    "Bring the red mug to the kitchen table.",
    "Close the fridge.",
    "Go to the hall and wait.",
    "Put the plate into the cabinet.",
)
SCHEMA = {
    "type": "object",
    "properties": {"goal": {"type": "string", "maxLength": 40}},
    "required": ["goal"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def body(draw: random.Random, number: int) -> dict:
    """A request of one of several kinds."""
    made = {"messages": [{"role": "user", "content": draw.choice(TASKS)}], "max_tokens": draw.choice((8, 24, 64))}
    made["stream"] = draw.random() < 0.7
    kind = draw.random()
    if kind < 0.2:
        made["response_format"] = FORM
        made["max_tokens"] = 200
    elif kind < 0.4:
        made |= {"temperature": 0.8, "seed": draw.randrange(1000)}
    elif kind < 0.5:
        made["edge_dflash"] = {"deadline_s": 0.5}
    elif kind < 0.6:
        made["edge_dflash"] = {"session": f"load-{number}-{draw.randrange(10_000)}"}
    return made


class Client(threading.Thread):
    """Asks until it is told to stop."""

    def __init__(self, process: Process, number: int, until: float) -> None:
        super().__init__()
        self.process = process
        self.number = number
        self.until = until
        self.first: list[float] = []  # seconds to the first piece of streams
        self.requests = self.cancelled = 0
        self.failures: list[str] = []

    def run(self) -> None:
        draw = random.Random(self.number)
        with self.process.client() as client:
            while time.monotonic() < self.until:
                self.requests += 1
                try:
                    request = body(draw, self.number)
                    self.ask(client, draw, request)
                    if (name := request.get("edge_dflash", {}).get("session")) is not None:
                        assert client.delete(f"{SESSIONS}/{name}").status_code in (200, 404)  # 404: nothing came of it
                except (httpx2.HTTPError, AssertionError, ValueError) as error:
                    self.failures.append(f"{type(error).__name__}: {error}")

    def ask(self, client: httpx2.Client, draw: random.Random, request: dict) -> None:
        began = time.perf_counter()
        with client.stream("POST", CHAT, json=request) as response:
            if not request["stream"]:
                reply = json.loads(response.read())
                assert response.status_code == 200, reply
                assert reply["choices"][0]["finish_reason"], reply
                return
            assert response.status_code == 200, response.read()
            leave, lines = draw.random() < 0.05, 0
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                lines += 1
                if lines == 2:  # the first says only whose turn it is
                    self.first.append(time.perf_counter() - began)
                    if leave:
                        self.cancelled += 1
                        return
                assert '"error"' not in line, line
            assert line == "" or line == "data: [DONE]", line


def load(bundle: Path, minutes: float, clients: int) -> dict:
    """The figures of a run."""
    with tempfile.TemporaryDirectory() as directory, Process(bundle, Path(directory)) as process:
        seconds = minutes * 60
        crowd = [Client(process, number, time.monotonic() + seconds) for number in range(clients)]
        for client in crowd:
            client.start()
        time.sleep(seconds / 10)
        before, peak = process.rss(), 0
        while any(client.is_alive() for client in crowd):
            time.sleep(0.5)
            peak = max(peak, process.rss())
        after = process.rss()
        metrics = process.client().get("/metrics").text
    first = sorted(value for client in crowd for value in client.first)
    failures = [failure for client in crowd for failure in client.failures]
    return {
        "minutes": minutes,
        "clients": clients,
        "requests": sum(client.requests for client in crowd),
        "left": sum(client.cancelled for client in crowd),
        "failures": len(failures),
        "first_failures": failures[:3],
        "first_token_p50": round(statistics.median(first), 4),
        "first_token_p99": round(first[int(len(first) * 0.99)], 4),
        "rss_after_tenth": before,
        "rss_end": after,
        "rss_growth": after - before,
        "outcomes": {line.split('outcome="')[1].split('"')[0]: float(line.split()[1])
                     for line in metrics.splitlines() if line.startswith("edge_dflash_requests_total{")},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=4)
    given = parser.parse_args()
    bundle = given.bundle.resolve()
    print(json.dumps(load(bundle, given.minutes, given.clients)))


if __name__ == "__main__":
    main()
