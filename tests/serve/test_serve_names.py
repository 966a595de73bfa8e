"""A conversation that was acknowledged is never written over: not by a save, a fork, a race, or a file put there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time

import pytest
from service_support import Process

from edge_dflash import session as session_module
from edge_dflash.serve.limits import own

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/edge_dflash/sessions"


def turn(client, name, text="go"):
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "edge_dflash": {"session": name}}
    reply = client.post(CHAT, json=body)
    assert reply.is_success, reply.text


def save(client, name, **body):
    return client.post(f"{SESSIONS}/{name}/save", json=body)


def said(client, name):
    """What its user said, after one more turn, which opens it."""
    turn(client, name, "and?")
    messages = client.get(f"{SESSIONS}/{name}").json()["messages"]
    return [one["content"] for one in messages if one["role"] == "user"]


def exists(reply):
    assert reply.status_code == 409, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("session_exists", "to")
    assert "'b' exists; give a new name, or delete it" in error["message"]


@pytest.mark.parametrize("way", ["open", "put away", "after a restart", "a copy"])
@pytest.mark.parametrize("call", ["save", "fork"])
def test_a_name_that_exists_is_refused_open_or_not(start, way, call):
    _, client = start(limits={"sessions": 2}, sessions={"save": "shutdown"})
    turn(client, "b", "precious")
    assert save(client, "b").is_success
    if way == "after a restart":
        _, client = start()
    if way == "put away":
        turn(client, "x")
    turn(client, "a", "other")
    if way == "a copy":
        assert client.delete(f"{SESSIONS}/b").is_success
        assert save(client, "a", to="b").is_success
        turn(client, "a", "later")
    exists(client.post(f"{SESSIONS}/a/{call}", json={"to": "b"}))
    assert save(client, "a", to="a").is_success  # its own name
    assert said(client, "b") == ["other" if way == "a copy" else "precious", "and?"]


def test_replace_takes_an_earlier_state_of_the_same_conversation_and_nothing_else(start):
    _, client = start()
    turn(client, "a", "one")
    assert save(client, "a", to="b").is_success
    turn(client, "a", "two")
    assert save(client, "a", to="b", replace=True).is_success
    assert said(client, "b") == ["one", "two", "and?"]
    exists(save(client, "a", to="b", replace=True))  # open, and further than its file
    assert save(client, "b").is_success
    _, client = start()
    turn(client, "a", "another")
    exists(save(client, "a", to="b", replace=True))
    assert said(client, "b")[:2] == ["one", "two"]


def test_of_two_saves_to_one_name_one_is_acknowledged(start):
    for round in range(8):
        _, client = start()
        for name in ("a", "c"):
            turn(client, name, f"from {name}")
        replies = {}
        ready = threading.Barrier(2)

        def ask(name, to, client=client, replies=replies, ready=ready):
            ready.wait()
            replies[name] = save(client, name, to=to)

        threads = [threading.Thread(target=ask, args=(name, f"b{round}")) for name in ("a", "c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(reply.status_code for reply in replies.values()) == [200, 409]
        winner = next(name for name, reply in replies.items() if reply.is_success)
        assert said(client, f"b{round}")[0] == f"from {winner}"
        for name in ("a", "c"):
            client.delete(f"{SESSIONS}/{name}")


def test_a_turn_of_a_name_that_is_being_written_goes_on_from_what_is_written(start, monkeypatch):
    service, client = start()
    turn(client, "a", "one")
    writing, going = threading.Event(), threading.Event()
    real = type(service.sessions.of("x"))._written

    def slowly(self, name, slot, to, *more, **options):
        if name == "a":
            writing.set()
            assert going.wait(10)
        return real(self, name, slot, to, *more, **options)

    monkeypatch.setattr(type(service.sessions.of("x")), "_written", slowly)
    saving = threading.Thread(target=save, args=(client, "a"), kwargs={"to": "b"})
    saving.start()
    assert writing.wait(10)
    turning = threading.Thread(target=turn, args=(client, "b", "two"))
    turning.start()
    time.sleep(0.1)
    going.set()
    saving.join()
    turning.join()
    monkeypatch.undo()
    assert said(client, "b") == ["one", "two", "and?"]


class SlowDisk:
    """A disk that takes its time with a session's file."""

    def __init__(self, monkeypatch):
        self.writing, self.going, self.real = threading.Event(), threading.Event(), session_module.save_session
        monkeypatch.setattr(session_module, "save_session", self)

    def __call__(self, path, state):
        self.writing.set()
        assert self.going.wait(30)
        return self.real(path, state)


@pytest.mark.parametrize("way", ["save", "save_all"])
def test_a_turn_that_ends_while_its_session_is_written_is_saved_next_time(start, tmp_path, monkeypatch, way):
    service, client = start()
    turn(client, "a", "one")
    sessions = service.sessions.of(own())
    disk = SlowDisk(monkeypatch)
    session = sessions.acquire("a")  # of a request whose turn has not begun
    saving = threading.Thread(target=lambda: sessions.save("a") if way == "save" else sessions.save_all())
    saving.start()
    assert disk.writing.wait(10)
    session.plan("two", max_new_tokens=3)
    disk.going.set()
    saving.join()
    sessions.release("a")
    assert service.sessions.save_all() == []
    _, client = start()
    assert said(client, "a") == ["one", "two", "and?"]


def test_a_delete_while_all_are_saved_leaves_no_file(start, tmp_path, monkeypatch):
    service, client = start()
    for name in ("a", "b"):
        turn(client, name, "one")
    disk = SlowDisk(monkeypatch)
    saving = threading.Thread(target=service.sessions.save_all)
    saving.start()
    assert disk.writing.wait(10)
    assert client.delete(f"{SESSIONS}/b").is_success  # its turn has not come
    deleted = []
    deleting = threading.Thread(target=lambda: deleted.append(client.delete(f"{SESSIONS}/a")))
    deleting.start()
    time.sleep(0.1)
    disk.going.set()
    saving.join()
    deleting.join()
    assert deleted[0].is_success
    assert list((tmp_path / "state").rglob("*.session")) == []
    assert client.get(SESSIONS).json()["data"] == []


def test_a_file_that_was_touched_or_restored_as_it_was_is_the_sessions_own(start, tmp_path):
    service, client = start()
    turn(client, "a", "one")
    assert save(client, "a").is_success
    file = tmp_path / "state" / "sessions" / "a.session"
    for change in (os.utime, lambda path: (shutil.copy(path, tmp_path / "copy"), (tmp_path / "copy").replace(path))):
        change(file)
        turn(client, "a", "more")
        assert save(client, "a").is_success
    os.utime(file)
    turn(client, "a", "last")
    assert service.sessions.save_all() == []
    assert [path.name for path in file.parent.iterdir()] == ["a.session"]


@pytest.mark.parametrize("when", ["new", "loaded", "saved"])
def test_a_file_that_was_put_there_meanwhile_is_kept(start, tmp_path, when):
    """Somebody restores b from a copy while a conversation of that name is open: both stay."""
    place = tmp_path / "state" / "sessions"
    service, client = start(sessions={"save": "turn"})
    turn(client, "other", "precious")
    restored = place / "other.session"
    if when != "new":
        turn(client, "b", "first")
    if when == "loaded":
        service, client = start(sessions={"save": "turn"})
    if when == "new":
        service, client = start()
        turn(client, "b", "first")
    elif when == "loaded":
        turn(client, "b", "second")
    shutil.copy(restored, place / "b.session")
    body = {"messages": [{"role": "user", "content": "third"}], "max_tokens": 4, "edge_dflash": {"session": "b"}}
    reply = client.post(CHAT, json=body).json()["edge_dflash"]
    if when != "new":
        assert "is not the one that this session wrote or came from" in reply["session_error"]
    assert save(client, "b").json()["error"]["code"] == "session_exists"
    assert (place / "b.session").read_bytes() == restored.read_bytes()
    (told,) = service.sessions.save_all()
    beside = re.search("saved as '(b-[0-9a-f]{12})'", told)[1]
    assert service.sessions.save_all() == [told]  # under the same name
    _, client = start()
    assert said(client, "b") == ["precious", "and?"]
    assert said(client, beside)[0] == "first"


@pytest.mark.parametrize("kind", ["link", "directory", "fifo"])
def test_what_is_no_file_is_not_written_over(start, tmp_path, kind):
    _, client = start()
    for name in ("a", "b"):
        turn(client, name)
    place = tmp_path / "state" / "sessions"
    place.mkdir(parents=True)
    make = {"link": lambda p: p.symlink_to("nowhere"), "directory": lambda p: p.mkdir(), "fifo": lambda p: os.mkfifo(p)}
    for name in ("b", "c"):
        make[kind](place / f"{name}.session")
    assert save(client, "b").json()["error"]["code"] == "session_exists"
    assert save(client, "a", to="c").json()["error"]["code"] == "session_exists"
    assert client.post(f"{SESSIONS}/a/fork", json={"to": "c"}).json()["error"]["code"] == "session_exists"


def test_a_session_that_is_put_away_meets_no_other_file(start, tmp_path):
    _, client = start(limits={"sessions": 1})
    turn(client, "a", "mine")
    place = tmp_path / "state" / "sessions"
    place.mkdir(parents=True)
    (place / "a.session").write_bytes(b"another's")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "edge_dflash": {"session": "c"}}
    assert client.post(CHAT, json=body).status_code == 409  # nothing is lost in silence
    assert (place / "a.session").read_bytes() == b"another's"
    assert client.get(f"{SESSIONS}/a").json()["open"]


def test_a_kill_in_the_middle_of_saves_loses_nothing_that_was_acknowledged(demo_bundle, tmp_path):
    process = Process(demo_bundle, tmp_path, settings='[sessions]\nsave = "never"\n').start()
    acknowledged = {}
    try:
        with process.client() as client:
            for name in ("a", "b"):
                turn(client, name, f"Take {name}.")
            assert save(client, "b").is_success
        for round in range(3):
            with process.client() as client:
                turn(client, "a" if round == 0 else f"a{round}", "Take a.")
                stop = threading.Event()

                def ask(client=client, round=round, stop=stop):
                    for number in range(1000):
                        name = f"copy-{round}-{number}"
                        for to in (name, "b"):
                            try:
                                reply = save(client, "a" if round == 0 else f"a{round}", to=to)
                            except Exception:
                                return
                            acknowledged[(to, round, number)] = reply.status_code
                        if stop.is_set():
                            return

                thread = threading.Thread(target=ask)
                thread.start()
                time.sleep(0.3)
                process.stop(signal.SIGKILL)
                thread.join()
            process.start()
        good = [to for (to, *_), status in acknowledged.items() if status == 200]
        assert len(good) > 3
        assert "b" not in good
        with process.client() as client:
            listed = {entry["id"] for entry in client.get(SESSIONS).json()["data"]}
            assert {*good, "b"} <= listed
            assert said(client, "b")[0] == "Take b."
            assert said(client, good[-1])[0] == "Take a."
    finally:
        process.stop()


def test_a_delete_removes_what_a_kill_left_of_a_save(start, tmp_path):
    _, client = start()
    turn(client, "a")
    assert save(client, "a").is_success
    left = tmp_path / "state" / "sessions" / "a.session.partial"
    left.write_bytes(b"half of what was said")
    assert client.delete(f"{SESSIONS}/a").is_success
    assert not left.exists()
