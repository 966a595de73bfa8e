"""A service whose engine fails: requests are answered, no watchdog is fed, and the process ends to be restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx2
from service_support import until

from edge_dflash.serve import service as service_module
from tests.runner.test_engine import Failing
from tests.serve.test_serve_lifecycle import CHAT, HELLO, Recorder

SECONDS = 30.0  # after which what hangs fails
TOKENS = {"prompt": [5] * 7, "max_tokens": 2}
OTHER = {"messages": HELLO, "max_tokens": 2}


def test_requests_are_answered_and_the_watchdog_goes_hungry(start, monkeypatch):
    monkeypatch.setattr(service_module, "TICK", 0.02)
    backend = Failing(MemoryError("no memory"))
    service, client = start(backend)
    service.notifier = notifier = Recorder()
    replies, asking = [], []
    for path, body, reached in (
        ("/v1/completions", TOKENS, backend.inside.is_set),
        (CHAT, OTHER, lambda: service.planner.waiting),
    ):
        ask = threading.Thread(target=lambda path=path, body=body: replies.append(client.post(path, json=body)))
        asking.append(ask)
        ask.start()
        until(reached, SECONDS)
    backend.go.set()
    for thread in asking:
        thread.join(SECONDS)
    assert len(replies) == 2
    for reply in (*replies, client.post(CHAT, json=OTHER)):
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")
        assert "MemoryError: no memory" in reply.json()["error"]["message"]
    failure = asyncio.run(asyncio.wait_for(service.watch(), SECONDS))
    assert isinstance(failure, MemoryError)
    assert "WATCHDOG" not in notifier.said
    assert notifier.said[-1] == "failed: MemoryError: no memory"
    assert client.get("/ready").status_code == 503
    assert client.get("/health").json()["status"] == "failed"
    late = client.post(CHAT, json=OTHER)
    assert (late.status_code, late.json()["error"]["code"]) == (503, "failed")


PROGRAM = """
import sys
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


def test_the_process_ends_so_that_systemd_starts_it_again(tmp_path):
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(SECONDS)
    command = [sys.executable, "-c", PROGRAM, "serve", "fake", "--socket", str(tmp_path / "api.sock")]
    command += ["--state-dir", str(tmp_path / "state")]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "PYTHONPATH": os.pathsep.join(sys.path)}
    running = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    transport = httpx2.HTTPTransport(uds=str(tmp_path / "api.sock"), verify=False)
    try:
        while manager.recv(4096) != b"READY=1":
            continue
        with httpx2.Client(transport=transport, base_url="http://edge-dflash", timeout=SECONDS) as client:
            assert client.post("/v1/completions", json={"prompt": [3, 1], "max_tokens": 2}).status_code == 200
            reply = client.post("/v1/completions", json=TOKENS)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")
        assert running.wait(SECONDS) == 10  # a failure: Restart=on-failure, and not among RestartPreventExitStatus
        said = running.stderr.read().splitlines()
        assert said[-1] == "error: the engine failed (MemoryError: no memory); start the service again"
        assert any("the engine's worker failed; 1 requests fail with it" in line for line in said)
        assert not (tmp_path / "api.sock").exists()
        while manager.recv(4096) != b"STATUS=failed: MemoryError: no memory":
            continue
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
        running.communicate()
        manager.close()
