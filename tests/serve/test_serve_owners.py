"""Who asks: sessions that belong to one caller, shares of the queue, and when to come back."""

from __future__ import annotations

import os
import socket
import struct
import threading
from unittest.mock import MagicMock

import httpx2
import pytest
from fakes import FakeBackend
from planner_support import Gate
from service_support import TEXT_SHAPE, client_of, fake_service, live, until
from starlette.testclient import TestClient

from edge_dflash.serve import connection
from edge_dflash.serve.app import make_app
from edge_dflash.serve.limits import own, peer
from tests.serve.test_serve_lifecycle import CHAT, HELLO
from tests.serve.test_serve_sessions import SESSIONS, turn

KEYS = {"0123456789abcdef": "key-arm", "0123456789abcdeg": "key-desk"}
MANY = 18


def user(service, account):
    """A client at the Unix socket."""
    app = make_app(service)

    async def through(scope, receive, send):
        await app({**scope, "server": None, "state": {"peer": account}}, receive, send)

    return TestClient(through, base_url="http://localhost", raise_server_exceptions=False)


def keyed(service, key):
    headers = {"authorization": f"Bearer {key}"}
    return TestClient(make_app(service, KEYS), "http://robot", raise_server_exceptions=False, headers=headers)


def test_a_session_is_there_for_its_owner_alone(service, tmp_path):
    arm, desk = (keyed(service, key) for key in KEYS)
    callers = {"arm": arm, "desk": desk, "uid": user(service, "uid-1001"), "own": client_of(service)}
    tokens = turn(arm, "hall").json()["usage"]["total_tokens"]
    assert arm.post(f"{SESSIONS}/hall/save", json={}).is_success
    unknown = desk.get(f"{SESSIONS}/none").json()["error"]
    for name, client in callers.items():
        if name == "arm":
            continue
        assert client.get(SESSIONS).json()["data"] == []
        for method, path, body in (
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/save", {}),
            ("POST", "/save", {"to": "mine"}),
            ("POST", "/fork", {"to": "mine"}),
        ):
            reply = client.request(method, f"{SESSIONS}/hall{path}", json=body)
            assert reply.status_code == 404, (name, method, path)
            assert reply.json()["error"] | {"message": ""} == unknown | {"message": ""}
        mine = turn(client, "hall").json()  # a conversation of that name, and another one
        assert mine["usage"]["total_tokens"] == tokens
        assert client.post(f"{SESSIONS}/hall/save", json={}).is_success
        assert client.delete(f"{SESSIONS}/hall").is_success
    assert turn(arm, "hall").json()["usage"]["prompt_tokens"] > tokens
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.session")] == [
        "state/sessions/key-arm/hall.session"
    ]


def test_saved_sessions_keep_their_owner_over_a_restart(service, tmp_path):
    clients = {"uid-1001": user(service, "uid-1001"), "uid-1002": user(service, "uid-1002"), "own": client_of(service)}
    for name, client in clients.items():
        assert turn(client, name).is_success
    assert len(service.sessions) == 3
    assert service.sessions.save_all() == []
    saved = {str(path.relative_to(tmp_path / "state")) for path in tmp_path.rglob("*.session")}
    assert saved == {f"sessions/{own}.session" for own in ("own", "uid-1001/uid-1001", "uid-1002/uid-1002")}
    again = fake_service(tmp_path)
    for name in clients:
        client = client_of(again) if name == "own" else user(again, name)
        assert [entry["id"] for entry in client.get(SESSIONS).json()["data"]] == [name]
        assert turn(client, name).json()["usage"]["prompt_tokens"] > 20
    again.close()


def test_limits_are_those_of_one_owner(tmp_path):
    service = fake_service(tmp_path, limits={"sessions": 1, "saved_sessions": 1}, sessions={"save": "never"})
    for account in ("uid-1001", "uid-1002"):
        client = user(service, account)
        assert turn(client, "a").is_success
        assert turn(client, "b").status_code == 429
        assert client.post(f"{SESSIONS}/a/save", json={}).is_success
        assert client.post(f"{SESSIONS}/a/save", json={"to": "b"}).json()["error"]["code"] == "session_limit"
    service.close()


def test_the_socket_says_which_user_is_at_the_other_end(service, tmp_path, monkeypatch):
    ends = socket.socketpair()
    assert peer(ends[0]) == own() == f"uid-{os.getuid()}"
    for end in ends:
        end.close()
    with socket.socket() as tcp:
        assert peer(tcp) == peer(None) == own()
    distant = MagicMock(family=socket.AF_UNIX)
    distant.getsockopt.return_value = struct.pack("iII", 7, 3_000_000_000, 7)  # a user of a container
    assert peer(distant) == "uid-3000000000"
    found = []

    def seen(one):
        found.append(peer(one))
        return "uid-4711"

    monkeypatch.setattr(connection, "peer", seen)
    with live(service, tmp_path) as url:
        transport = httpx2.HTTPTransport(uds=url.removeprefix("unix:"), verify=False)
        with httpx2.Client(transport=transport, base_url="http://planner") as client:
            assert turn(client, "hall").is_success
    assert found == [own()]
    assert [entry["id"] for entry in user(service, "uid-4711").get(SESSIONS).json()["data"]] == ["hall"]


# the queue -----------------------------------------------------------------------------------------------------------


def ask(client, replies, caller="", priority=0, **more):
    body = {"messages": HELLO, "max_tokens": 2, "edge_dflash": {"priority": priority, "caller": caller}, **more}
    thread = threading.Thread(target=lambda: replies.append(client.post(CHAT, json=body)))
    thread.start()
    return thread


def test_one_callers_flood_leaves_places_and_gives_way_to_what_is_urgent(tmp_path):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    service = fake_service(tmp_path, backend, queue=16)
    flood, robot = user(service, "uid-1001"), user(service, "uid-1002")
    with flood, robot:
        first = service.planner.stream(HELLO, max_new_tokens=2)
        assert backend.reached.wait(60)
        replies, urgent, normal = [], [], []
        threads = [ask(flood, replies) for _ in range(MANY)]
        until(lambda: len(replies) == MANY - 8)  # half of the queue
        assert {reply.status_code for reply in replies} == {429}
        assert "caller 'uid-1001' has 8 requests waiting, the limit for one caller is 8" in replies[0].text
        threads += [ask(flood, replies, caller=f"name {n}") for n in range(6)]
        until(lambda: len(replies) == MANY - 8 + 2)  # three quarters of it, whatever the names
        assert "account 'uid-1001' has 12 requests waiting, the limit for one account is 12" in replies[-1].text
        threads += [ask(robot, normal, caller="arm") for _ in range(4)]
        until(lambda: service.planner.waiting == 16)
        threads.append(ask(robot, urgent, priority=100))
        until(lambda: len(replies) == MANY - 8 + 3)
        displaced = replies[-1]
        assert displaced.status_code == 429
        assert displaced.json()["error"]["code"] == "queue_full"
        assert int(displaced.headers["retry-after"]) >= 1
        assert "gave its place in the queue to one of priority 100" in displaced.text
        assert service.planner.waiting == 16
        backend.open.set()
        for thread in threads:
            thread.join(60)
    assert [reply.status_code for reply in (*urgent, *normal)] == [200] * 5
    assert [reply.status_code for reply in replies[-11:]] == [200] * 11
    assert first.plan.tokens
    service.close()


def test_saving_needs_no_place_in_a_full_queue(start):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    backend.open.set()
    service, client = start(backend, queue=1)
    assert turn(client, "hall").is_success
    backend.open.clear()
    backend.reached.clear()
    running = service.planner.stream(HELLO, max_new_tokens=2)
    assert backend.reached.wait(60)
    waiting = service.planner.stream(HELLO, max_new_tokens=2)
    saved = []
    thread = threading.Thread(target=lambda: saved.append(client.post(f"{SESSIONS}/hall/save", json={})))
    thread.start()
    until(lambda: service.planner._engine._calls)  # it waits between two turns, and takes no place
    backend.open.set()
    thread.join(60)
    assert saved[0].is_success
    assert running.plan.tokens == waiting.plan.tokens


def test_retry_after_is_the_time_in_which_what_waits_is_served(service, monkeypatch):
    for seconds, waiting, expected in (
        ([], 0, 1.0),
        ([0.1, 0.3], 0, 0.2),
        ([0.1, 0.3], 16, 3.2),
        ([2.0] * 15 + [5.2], 10, 22.0),
        ([90.0], 16, 600.0),
    ):
        monkeypatch.setattr(type(service.planner), "waiting", waiting)
        service.seconds.clear()
        service.seconds.extend(seconds)
        assert service.retry_after() == pytest.approx(expected)
