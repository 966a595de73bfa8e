"""A service whose engine fails: requests are answered, no watchdog is fed, and the process ends to be restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx2
import pytest
from service_support import client_of, fake_service

from edge_dflash.serve import service as service_module
from tests.runner.test_engine import Failing
from tests.serve.test_serve_lifecycle import CHAT, HELLO, Recorder

SECONDS = 30.0  # after which what hangs fails
TOKENS = {"prompt": [5] * 7, "max_tokens": 2}
OTHER = {"messages": HELLO, "max_tokens": 2}


def test_requests_are_answered_and_the_watchdog_goes_hungry(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "TICK", 0.02)
    backend = Failing(MemoryError("no memory"))
    service = fake_service(tmp_path, backend)
    notifier, replies = Recorder(), []
    service.notifier = notifier
    with client_of(service) as client:

        def ask(path, body):
            replies.append(client.post(path, json=body))

        asking = [threading.Thread(target=ask, args=("/v1/completions", TOKENS))]
        asking[0].start()
        assert backend.inside.wait(SECONDS)
        asking.append(threading.Thread(target=ask, args=(CHAT, OTHER)))
        asking[1].start()
        until = time.monotonic() + SECONDS
        while service.planner.waiting < 1 and time.monotonic() < until:
            time.sleep(0.005)
        backend.go.set()
        for thread in asking:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for reply in (*replies, client.post(CHAT, json=OTHER)):
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "engine_failed"
            assert "MemoryError: no memory" in reply.json()["error"]["message"]
        failure = asyncio.run(asyncio.wait_for(service.watch(), SECONDS))
        assert isinstance(failure, MemoryError)
        assert "WATCHDOG" not in notifier.said
        assert notifier.said[-1] == "failed: MemoryError: no memory"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").json()["status"] == "failed"
        late = client.post(CHAT, json=OTHER)
        assert (late.status_code, late.json()["error"]["code"]) == (503, "failed")
    service.close()


PROGRAM = """
import sys
from fakes import FakeBackend
from service_support import TEXT_SHAPE
from tests.runner.test_engine import Failing
from edge_dflash.cli import main
from edge_dflash.planner import Planner

def open_fake(bundle, observer, **options):
    backend = Failing(MemoryError("no memory"))
    backend.go.set()
    return Planner(backend, None, observer=observer)

Planner.open = open_fake
main(sys.argv[1:])
"""


@pytest.fixture
def process(tmp_path):
    """A service on a Unix socket whose engine fails at a prompt of 7 tokens; its manager's socket."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(SECONDS)
    command = [sys.executable, "-c", PROGRAM, "serve", "fake", "--socket", str(tmp_path / "api.sock")]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "state")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, text=True,
    )  # fmt: skip
    try:
        while manager.recv(4096) != b"READY=1":
            continue
        yield running, manager
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
        running.communicate()
        manager.close()


def test_the_process_ends_so_that_systemd_starts_it_again(process, tmp_path):
    running, manager = process
    transport = httpx2.HTTPTransport(uds=str(tmp_path / "api.sock"), verify=False)
    with httpx2.Client(transport=transport, base_url="http://edge-dflash", timeout=SECONDS) as client:
        assert client.post("/v1/completions", json={"prompt": [3, 1], "max_tokens": 2}).status_code == 200
        reply = client.post("/v1/completions", json=TOKENS)
    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_failed"
    assert running.wait(SECONDS) == 10  # a failure: Restart=on-failure, and not among RestartPreventExitStatus
    said = running.stderr.read().splitlines()
    assert said[-1] == "error: the engine failed (MemoryError: no memory); start the service again"
    assert any("the engine's worker failed; 1 requests fail with it" in line for line in said)
    assert not (tmp_path / "api.sock").exists()
    manager.setblocking(False)
    messages = []
    while True:
        try:
            messages.append(manager.recv(4096).decode())
        except BlockingIOError:
            break
    assert messages[-1] == "STATUS=failed: MemoryError: no memory"
