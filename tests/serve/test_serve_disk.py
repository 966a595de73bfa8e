"""The state directory when the disk is full, read-only, failing or closed, and when two servers want it."""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import signal
import subprocess
import sys

import pytest
from service_support import client_of, fake_service, live

from edge_dflash.decode import saved
from edge_dflash.errors import ServiceError, StorageError
from edge_dflash.planner import Planner
from edge_dflash.serve.state_dir import LOCK, held
from tests.serve.test_serve_lifecycle import Recorder
from tests.serve.test_serve_sessions import SESSIONS, files, turn

FULL = (errno.ENOSPC, errno.EDQUOT)
FAULTS = (*FULL, errno.EROFS, errno.EIO, errno.EACCES)


def failing(monkeypatch, where, code, part="state"):
    """Let a function of the system fail with this error for paths of the state directory, or for any descriptor."""
    owner, name = where
    real = getattr(owner, name)

    def fail(first, *rest, **named):
        if isinstance(first, int) or part in str(first):
            raise OSError(code, os.strerror(code), str(first))
        return real(first, *rest, **named)

    monkeypatch.setattr(owner, name, fail)


def told(reply, code):
    error = reply.json()["error"]
    full = code in FULL
    assert reply.status_code == (507 if full else 503), reply.text
    assert error["code"] == ("storage_full" if full else "storage_failed")
    assert os.strerror(code) in error["message"]
    assert ("make room on the disk" if full else "permissions") in error["message"]
    return error["message"]


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("where", [(os, "open"), (os, "fsync"), (pathlib.Path, "replace"), (os, "scandir")])
def test_a_save_that_fails_is_told_and_done_later(service, tmp_path, monkeypatch, where, code):
    client = client_of(service)
    tokens = turn(client, "hall").json()["usage"]["total_tokens"]
    (tmp_path / "state" / "sessions").mkdir(parents=True)
    with monkeypatch.context() as broken:
        failing(broken, where, code)
        reply = client.post(f"{SESSIONS}/hall/save", json={})
        assert "hall.session" in told(reply, code) or where[1] == "scandir"
        (problem,) = service.sessions.save_all()
        assert problem.startswith("session hall: cannot ")
        after = turn(client, "hall").json()["usage"]["total_tokens"]
        assert after > tokens  # it goes on in memory
    assert files(tmp_path) == []
    assert service.sessions.save_all() == []
    assert files(tmp_path) == ["hall.session"]


@pytest.mark.parametrize("code", FAULTS)
def test_a_directory_that_cannot_be_made_is_told(service, monkeypatch, code):
    client = client_of(service)
    turn(client, "hall")
    failing(monkeypatch, (pathlib.Path, "mkdir"), code)
    assert "cannot make the state directory" in told(client.post(f"{SESSIONS}/hall/save", json={}), code)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_reading_listing_and_deleting_are_told(service, tmp_path, monkeypatch, code):
    client = client_of(service)
    for name in ("open", "closed"):
        turn(client, name)
        assert client.post(f"{SESSIONS}/{name}/save", json={}).is_success
    service.close()
    service = fake_service(tmp_path)
    client = client_of(service)
    turn(client, "open")
    with monkeypatch.context() as broken:
        failing(broken, (os, "scandir"), code)
        assert "cannot list" in told(client.get(SESSIONS), code)
    with monkeypatch.context() as broken:
        failing(broken, (os, "unlink"), code)
        for name in ("open", "closed"):
            assert f"cannot delete {tmp_path}" in told(client.delete(f"{SESSIONS}/{name}"), code)
    with monkeypatch.context() as broken:
        failing(broken, (pathlib.Path, "stat"), code)
        for reply in (
            client.get(f"{SESSIONS}/closed"),
            turn(client, "closed"),
            client.post(f"{SESSIONS}/open/fork", json={"to": "x"}),
        ):
            assert "cannot read" in told(reply, code)
        assert turn(client, "open").is_success
    with monkeypatch.context() as broken:
        failing(broken, (saved, "_array"), code, part="")
        assert "closed.session" in told(turn(client, "closed"), code)
    with monkeypatch.context() as broken:
        failing(broken, (pathlib.Path, "open"), code)
        assert "closed.session" in told(turn(client, "closed"), code)
    assert [entry["id"] for entry in client.get(SESSIONS).json()["data"]] == ["closed", "open"]
    for name in ("open", "closed"):
        assert turn(client, name).json()["usage"]["prompt_tokens"] > 20
        assert client.delete(f"{SESSIONS}/{name}").is_success
    service.close()


def test_a_session_that_cannot_be_put_away_stays_and_another_one_goes(tmp_path, monkeypatch):
    service = fake_service(tmp_path, limits={"sessions": 2})
    client = client_of(service)
    turn(client, "unsaved")
    turn(client, "saved")
    assert client.post(f"{SESSIONS}/saved/save", json={}).is_success
    with monkeypatch.context() as broken:
        failing(broken, (os, "fsync"), errno.ENOSPC)
        assert turn(client, "new").is_success  # in the place of the saved one
        told(turn(client, "newer"), errno.ENOSPC)
        assert [entry["id"] for entry in client.get(SESSIONS).json()["data"] if entry["open"]] == ["new", "unsaved"]
        assert turn(client, "unsaved").is_success
    assert turn(client, "newer").is_success
    service.close()


def test_a_turn_whose_session_is_not_saved_is_answered_and_says_so(tmp_path, monkeypatch):
    service = fake_service(tmp_path, sessions={"save": "turn"})
    client = client_of(service)
    with monkeypatch.context() as broken:
        failing(broken, (os, "fsync"), errno.EIO)
        reply = turn(client, "hall")
        assert reply.is_success
        assert os.strerror(errno.EIO) in reply.json()["edge_dflash"]["session_error"]
    assert "session_error" not in turn(client, "hall").json()["edge_dflash"]
    assert files(tmp_path) == ["hall.session"]
    service.close()


def test_a_reload_ends_with_ready_whatever_a_save_raises(service, monkeypatch):
    def defect(**options):
        raise RuntimeError("a defect")

    service.notifier = recorder = Recorder()
    monkeypatch.setattr(service.sessions, "save_all", defect)
    asyncio.run(service.reload())
    assert recorder.said == ["RELOADING", "READY"]


def test_a_client_is_told_what_the_disk_says(tmp_path, monkeypatch):
    service = fake_service(tmp_path)
    with live(service, tmp_path) as url, Planner.connect(url) as remote:
        session = remote.session()
        assert session.plan("go", max_new_tokens=2).tokens
        with monkeypatch.context() as broken:
            for code in (errno.ENOSPC, errno.EROFS):
                failing(broken, (os, "fsync"), code)
                with pytest.raises(StorageError, match=os.strerror(code)) as refused:
                    session.save("hall")
                assert refused.value.full == (code in FULL)
        assert session.save("hall") > 0
    service.close()


# two servers ---------------------------------------------------------------------------------------------------------


def test_a_state_directory_has_one_server(tmp_path, caplog):
    state = tmp_path / "state"
    with held(state):
        message = rf"another server, process {os.getpid()}, has the state directory {state}; stop it, or give another"
        with pytest.raises(ServiceError, match=message), held(state):
            pass
        with held(tmp_path / "other"):
            pass
    assert list(tmp_path.iterdir()) == []  # nothing was saved, nothing is left
    with held(state):
        (state / "sessions").mkdir()
    assert [path.name for path in state.iterdir()] == ["sessions"]
    (tmp_path / "file").write_text("")
    with held(tmp_path / "file"):
        assert "sessions may not be saved" in caplog.text
    assert (tmp_path / "file").exists()


def test_a_holder_that_was_killed_leaves_no_lock(tmp_path):
    code = "import sys,time,pathlib;from edge_dflash.serve.state_dir import held\n"
    code += "with held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ServiceError, match=f"another server, process {other.pid}, has"), held(tmp_path):
            pass
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / LOCK).exists()
    with held(tmp_path):
        assert int((tmp_path / LOCK).read_text()) == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_a_lock_file_that_is_removed_lets_no_second_server_in(tmp_path):
    state = tmp_path / "state"
    with held(state):
        (state / LOCK).unlink()
        message = f"another server, process unknown, has the state directory {state}"
        with pytest.raises(ServiceError, match=message), held(state):
            pass
        assert not (state / LOCK).exists()
    with held(state):
        pass
