"""The whole service as systemd runs it: ready when told, fed while it lives, on a socket that it was given."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import pytest

TASK = {"messages": [{"role": "user", "content": "Close the fridge."}], "max_tokens": 8}


class Systemd:
    """Starts the service with a notify socket and a listening one, as the units ask for."""

    def __init__(self, bundle, directory):
        self.api, self.state = directory / "api.sock", directory / "state"
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(directory / "notify"))
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(self.api))
        listening.listen()
        command = [sys.executable, "-m", "edge_dflash", "serve", str(bundle), "--state-dir", str(self.state)]
        start = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); "
            "os.execv(sys.argv[2], sys.argv[2:])"
        )
        environment = {"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(directory / "notify"), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, str(listening.fileno()), *command],
            env={**os.environ, **environment},
            pass_fds=[listening.fileno()],
        )
        listening.close()
        self.heard = []

    def until(self, message, seconds=60.0):
        """Receive until a message comes."""
        end = time.monotonic() + seconds
        while not self.heard or not self.heard[-1].startswith(message):
            self.notify.settimeout(max(0.01, end - time.monotonic()))
            self.heard.append(self.notify.recv(4096).decode())
        return self.heard[-1]

    def silent(self, seconds):
        """Whether nothing comes for so long, after what is on its way already."""
        self.notify.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            while True:
                self.notify.recv(4096)
        self.notify.settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            self.notify.recv(4096)
            return False
        return True

    def client(self):
        return httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self.api), verify=False), base_url="http://x", timeout=60
        )

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self.notify.close()


@pytest.fixture
def systemd(demo_bundle, tmp_path):
    made = Systemd(demo_bundle, tmp_path)
    yield made
    made.close()


def test_the_life_of_a_service(systemd):
    with systemd.client() as early:  # the socket is there before the planner: clients wait or are told
        assert early.get("/ready").status_code in (200, 503)
    systemd.until("READY=1")
    flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{systemd.process.pid}/fdinfo/3").read_text())[1]
    assert int(flags, 8) & os.O_CLOEXEC  # no child has the socket
    assert any(message.startswith("STATUS=") for message in systemd.heard[:-1])  # what it does until then
    systemd.until("STATUS=serving")
    systemd.until("WATCHDOG=1")
    with systemd.client() as client:
        assert client.get("/ready").status_code == 200
        reply = client.post("/v1/chat/completions", json=TASK)
        assert reply.status_code == 200
        systemd.heard.clear()
        systemd.until("WATCHDOG=1", 5.0)  # at work or idle, it is fed
        saved = {**TASK, "edge_dflash": {"session": "hall"}}
        assert client.post("/v1/chat/completions", json=saved).status_code == 200
    systemd.process.send_signal(signal.SIGHUP)
    assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", systemd.until("RELOADING=1", 10.0))
    systemd.until("READY=1", 10.0)
    assert (systemd.state / "sessions" / "hall.session").is_file()
    os.kill(systemd.process.pid, signal.SIGSTOP)
    assert systemd.silent(2.5)  # a process that stands still feeds nobody: systemd ends it
    os.kill(systemd.process.pid, signal.SIGCONT)
    systemd.until("WATCHDOG=1", 10.0)
    systemd.process.send_signal(signal.SIGTERM)
    systemd.until("STOPPING=1", 20.0)
    assert systemd.process.wait(60) == 0
    assert systemd.api.exists()  # it is systemd's, not the service's to remove
