"""The service as a process: who may come in, slow and vanishing clients, stops; and what the real clients get."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import conformance
import pytest
from service_support import Process

from edge_dflash.errors import ServiceError
from edge_dflash.serve.config import from_table
from edge_dflash.serve.server import listening
from edge_dflash.serve.state_dir import held

CHAT = "/v1/chat/completions"
TASK = [{"role": "user", "content": "Bring the red mug to the kitchen table."}]
PLAIN = {"messages": TASK, "edge_dflash": {"speculative": False}}
SETTINGS = "[timeouts]\nheader = 0.5\nbody = 0.5\nwrite = 2.0\n[limits]\nconnections = 12\n"
ON_TCP = ("chat_stream", "cancel", "wrong_key", "curl_bad_requests", "curl_health")


@pytest.fixture(scope="module")
def process(demo_bundle, tmp_path_factory):
    directory = tmp_path_factory.mktemp("service")
    with Process(demo_bundle, directory, tcp=True, key=conformance.KEY, settings=SETTINGS) as process:
        yield process


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_clients_over_the_unix_socket(process, check):
    check(conformance.ways(process)[0])


@pytest.mark.parametrize("check", [c for c in conformance.CHECKS if c.__name__ in ON_TCP], ids=lambda c: c.__name__)
def test_clients_over_tcp(process, check):
    check(conformance.ways(process)[1])


def test_the_program_of_the_readme_runs_on_the_service_as_on_a_bundle(process, capsys):
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    program = next(body for body in programs if 'Planner.open("demo-bundle")' in body)
    there = program.replace('Planner.open("demo-bundle")', f'Planner.connect("unix:{process.socket}")')
    exec(compile(there, "README.md", "exec"), {})
    assert re.fullmatch(r"known tokens: \d+", capsys.readouterr().out.splitlines()[-1])


def test_the_log_says_what_is_loaded_and_where_it_is_served(process):
    lines = (process.directory / "log").read_text().splitlines()[:5]
    size = sum(path.stat().st_size for path in process.bundle.rglob("*") if path.name != "manifest.json")
    said = [f"opening {process.bundle}", f"checking files, {size / 1e6:,.1f} MB", "loading", "self-test"]
    said.append(f"serving demo on unix:{process.socket}, {process.tcp}")
    assert lines == [f"INFO edge_dflash.serve: {line}" for line in said]


def test_the_socket_is_for_its_user_and_group(process):
    assert stat.S_IMODE(process.socket.stat().st_mode) == 0o660


def talk(process, data, seconds=5.0):
    """Send bytes; return what comes until the end."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(seconds)
        one.connect(str(process.socket))
        if data:  # even nothing cannot be sent to who has closed already
            one.sendall(data)
        received = b""
        while chunk := one.recv(65536):
            received += chunk
        return received


def error_in(reply, status):
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), reply[:200]
    assert b"content-type: application/json" in head
    return json.loads(body)["error"]


def test_what_is_no_http_is_answered_in_the_same_form(process):
    for data in (
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"\xff" * 40 + b"\r\n\r\n",
    ):
        assert "no HTTP" in error_in(talk(process, data), 400)["message"]
    long = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"y" * 40_000
    assert "too long" in error_in(talk(process, long), 400)["message"]
    assert "16384 bytes" in error_in(talk(process, long + b"\r\n\r\n"), 431)["message"]


def test_slow_clients_are_let_go(process):
    began, late = time.monotonic(), "the headers did not end within 0.5 s"
    for begin in (b"", b"GET /health HTTP/1.1\r\n"):
        assert error_in(talk(process, begin), 408)["message"] == late
    with socket.socket(socket.AF_UNIX) as one:  # the second request of a connection
        one.settimeout(30)
        one.connect(str(process.socket))
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        first = b""
        while b"}" not in first:  # head and body come apart
            first += one.recv(65536)
        assert first.startswith(b"HTTP/1.1 200")
        one.sendall(b"GET /h")
        assert error_in(one.recv(65536), 408)["message"] == late
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n"
    assert "body did not end within 0.5 s" in error_in(talk(process, head + b"\r\n{"), 408)["message"]
    assert time.monotonic() - began < 28  # by default it would be 40 s


def test_a_caller_without_the_key_loses_its_connection(process):
    with socket.create_connection(("127.0.0.1", int(process.tcp.rpartition(":")[2])), timeout=30) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        received = b""
        while chunk := one.recv(65536):
            received += chunk
    assert received.startswith(b"HTTP/1.1 401")
    assert received.count(b"HTTP/1.1") == 1


def test_a_client_that_leaves_ends_its_request_within_a_cycle(process):
    """Seen from outside: the tokens that are generated after it left are those of a cycle or two."""
    with process.client() as client:

        def generated():
            text = client.get("/metrics").text
            lines = [line for line in text.splitlines() if line.startswith("edge_dflash_inter_token_seconds_count")]
            return float(lines[0].split()[1])

        for stream in (True, False):
            thread = threading.Thread(target=vanish, args=(process, stream))
            thread.start()
            thread.join()
            at_leaving = generated()
            conformance.idle(conformance.ways(process)[0], 2.0)
            assert generated() - at_leaving <= 3
        text = client.get("/metrics").text
        assert float(text.partition("\nedge_dflash_disconnects_total ")[2].split()[0]) >= 2


def vanish(process, stream):
    body = json.dumps({**PLAIN, "stream": stream}).encode()
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(process.socket))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        one.sendall(head.encode() + body)
        time.sleep(0.25)


def test_a_second_service_is_refused_and_a_dead_ones_socket_is_taken_over(process, tmp_path):
    config = from_table({"service": {"bundle": "x", "socket": str(process.socket)}})
    with pytest.raises(ServiceError, match="another service listens"), listening(config, ()):
        pass
    pid = process.process.pid
    with pytest.raises(ServiceError, match=f"another server, process {pid}, has"), held(process.state):
        pass
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = from_table({"service": {"bundle": "x", "socket": str(path), "socket_mode": "0600"}})
    with listening(config, ()) as sockets:
        assert len(sockets) == 1
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ServiceError, match="is no socket"), listening(config, ()):
        pass
    assert path.read_text() == "precious"


def test_a_bundle_that_cannot_be_opened_is_one_line_and_its_exit_code(tmp_path, refused):
    code, line = refused("serve", tmp_path / "none", "--socket", tmp_path / "s", "--state-dir", tmp_path / "state")
    assert code == 6
    assert "none" in line
    assert list(tmp_path.iterdir()) == []
    code, line = refused("serve", "--config", tmp_path / "none.toml")
    assert code == 4


def test_a_stop_while_it_loads_ends_it_at_once(demo_bundle, tmp_path):
    process = Process(demo_bundle, tmp_path).start(state=503)
    with process.client() as client:
        assert client.post(CHAT, json=PLAIN).json()["error"]["code"] == "loading"
        assert client.get("/health").status_code == 200
    assert process.stop(signal.SIGTERM) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "log"}


def test_a_stop_finishes_what_runs_saves_sessions_and_leaves_no_socket(process):
    """The last test of the process."""
    replies = []

    def ask():
        with process.client() as client:
            body = {**PLAIN, "max_tokens": 40, "edge_dflash": {"speculative": False, "session": "hall"}}
            replies.append(client.post(CHAT, json=body).json())

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    assert process.stop(signal.SIGTERM) == 0
    thread.join()
    assert replies[0]["usage"]["completion_tokens"] == 40
    assert "stopping: what runs has 20 s to end" in (process.directory / "log").read_text()
    assert not process.socket.exists()
    saved = [path.name for path in process.state.rglob("*") if path.is_file()]
    assert "hall.session" in saved
    assert all(name.endswith(".session") for name in saved)  # by default no answer is recorded
    assert {path.name for path in process.directory.iterdir()} == {"state", "config.toml", "key", "log"}
