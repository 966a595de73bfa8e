"""Conversations that the service keeps: by name, in memory and in one directory, never anywhere else."""

from __future__ import annotations

import threading

import pytest
from fakes import FakeBackend
from planner_support import Gate
from service_support import TEXT_SHAPE

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/edge_dflash/sessions"


def turn(client, name, text="go", **more):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
    return client.post(CHAT, json={**body, "edge_dflash": {"session": name}})


def files(tmp_path):
    return sorted(path.name for path in (tmp_path / "state").rglob("*") if path.is_file())


def test_turns_go_on_from_each_other(start):
    _, client = start()
    first = turn(client, "hall").json()
    second = turn(client, "hall").json()
    assert second["usage"]["prompt_tokens"] > first["usage"]["total_tokens"]
    assert second["edge_dflash"]["reused_tokens"] > 0
    info = client.get(f"{SESSIONS}/hall").json()
    assert [message["role"] for message in info["messages"]] == ["user", "assistant"] * 2
    assert info["tokens"] == len(info["token_ids"]) == second["usage"]["total_tokens"]
    other = turn(client, "kitchen").json()
    assert other["usage"] == first["usage"] | {"prompt_tokens_details": other["usage"]["prompt_tokens_details"]}


def test_a_saved_session_is_there_after_a_restart(start, tmp_path):
    _, client = start()
    turn(client, "hall")
    assert client.post(f"{SESSIONS}/hall/save", json={}).json()["bytes"] > 0
    assert client.post(f"{SESSIONS}/hall/save", json={"to": "copy"}).is_success
    before = client.get(f"{SESSIONS}/hall").json()
    assert files(tmp_path) == ["copy.session", "hall.session"]
    _, client = start()
    listed = {entry["id"]: entry for entry in client.get(SESSIONS).json()["data"]}
    assert {name: (entry["open"], entry["saved"]) for name, entry in listed.items()} == {
        "hall": (False, True),
        "copy": (False, True),
    }
    assert turn(client, "hall").json()["usage"]["prompt_tokens"] > before["tokens"]
    assert client.delete(f"{SESSIONS}/hall").json()["deleted"]
    assert client.delete(f"{SESSIONS}/hall").status_code == 404
    assert files(tmp_path) == ["copy.session"]


def test_nothing_is_written_where_nothing_may_be(start, tmp_path):
    service, client = start(sessions={"save": "never"}, limits={"sessions": 2})
    for name in ("a", "b"):
        turn(client, name)
    assert service.sessions.save_all() == []
    refused = turn(client, "c")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "session_limit"
    assert files(tmp_path) == []
    assert client.delete(f"{SESSIONS}/a").is_success
    assert turn(client, "c").is_success


def test_sessions_used_longest_ago_make_room_and_come_back(start, tmp_path):
    _, client = start(limits={"sessions": 2})
    tokens = {name: turn(client, name).json()["usage"]["total_tokens"] for name in ("a", "b", "c")}
    assert files(tmp_path) == ["a.session"]
    assert turn(client, "a").json()["usage"]["prompt_tokens"] > tokens["a"]
    assert files(tmp_path) == ["a.session", "b.session"]


def test_forks_go_their_own_way(start):
    _, client = start()
    turn(client, "a")
    assert client.post(f"{SESSIONS}/a/fork", json={"to": "b"}).is_success
    assert client.post(f"{SESSIONS}/a/fork", json={"to": "b"}).status_code == 409
    assert client.post(f"{SESSIONS}/a/fork", json={"to": "a"}).status_code == 409
    assert client.post(f"{SESSIONS}/a/fork", json={}).status_code == 400
    assert client.post(f"{SESSIONS}/none/fork", json={"to": "c"}).status_code == 404
    assert client.post(f"{SESSIONS}/a/save", json={"to": "b"}).status_code == 409  # another one's file
    ours, theirs = turn(client, "a", "left").json(), turn(client, "b", "left").json()
    assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
    assert [entry["id"] for entry in client.get(SESSIONS).json()["data"]] == ["a", "b"]


def test_a_session_in_use_is_refused_a_second_turn(start):
    backend = Gate(FakeBackend(TEXT_SHAPE))
    _, client = start(backend)
    thread = threading.Thread(target=turn, args=(client, "a"))
    thread.start()
    assert backend.reached.wait(60)
    for refused in (
        turn(client, "a"),
        client.delete(f"{SESSIONS}/a"),
        client.post(f"{SESSIONS}/a/save", json={"to": "b"}),
    ):
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "session_busy"
    backend.open.set()
    thread.join()
    assert turn(client, "a").is_success


def test_a_session_of_another_bundle_is_refused(start, tmp_path):
    _, client = start()
    turn(client, "a")
    client.post(f"{SESSIONS}/a/save", json={})
    service, client = start()
    service.planner._engine.manager.bundle = "e" * 64
    refused = turn(client, "a")
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "session_mismatch"
    (tmp_path / "state" / "sessions" / "a.session").write_bytes(b"damaged")
    assert turn(client, "a").status_code == 400


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "a%2fb", "..%2f..%2fetc", "%00", "a b", "x" * 65, "-a", "%c3%a9", "a\\b"]
)
def test_names_that_are_paths_reach_no_file(start, tmp_path, name):
    _, client = start()
    before = sorted(tmp_path.rglob("*"))
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/save"), ("POST", "/fork")):
        reply = client.request(method, f"{SESSIONS}/{name}{path}", json={"to": "x"})
        assert reply.status_code in (400, 404, 405), (method, path, reply.text)
    turn(client, "good")
    for bad in ("../x", "/tmp/x", "a/../b", ""):
        assert client.post(f"{SESSIONS}/good/save", json={"to": bad}).status_code == 400
    assert sorted(tmp_path.rglob("*")) == before


def test_a_session_that_came_to_nothing_is_not_kept(start):
    _, client = start()
    for extra, status in (({"regex": "("}, 400), ({"deadline_s": 0}, 200)):
        body = {"messages": [{"role": "user", "content": "go"}], "edge_dflash": {"session": "empty", **extra}}
        assert client.post(CHAT, json=body).status_code == status
        assert client.get(SESSIONS).json()["data"] == []
