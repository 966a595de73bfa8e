"""A line of the log for each request: what it says, what it never says, and how systemd's journal gets it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from service_support import client_of, fake_service

from edge_dflash.serve import completions, logs
from edge_dflash.serve.logs import JournalFormatter, is_journal

CHAT = "/v1/chat/completions"
SECRET = "the-secret-of-the-prompt"
BODY = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
FIGURES = r"prompt=(\d+) reused=(\d+) generated=4 first_ms=\d+ accept=\d\.\d\d finish=length seconds=\d+\.\d{3}"


@pytest.fixture
def start(tmp_path, caplog):
    """A service, its client, and the lines of its log that are requests."""
    caplog.set_level(logging.INFO, "edge_dflash")
    begun = []

    def begin(key="", **sections):
        begun.append(service := fake_service(tmp_path, **sections))
        return client_of(service, key)

    begin.services = begun

    def lines():
        return [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "edge_dflash.requests"]

    yield begin, lines
    for service in begun:
        service.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line(start, stream):
    begin, lines = start
    client = begin()
    for _ in range(2):
        reply = client.post(CHAT, json={**BODY, "stream": stream, "edge_dflash": {"session": "hall"}})
        assert reply.is_success
    assert len(lines()) == 2
    level, line = lines()[1]
    found = re.fullmatch(rf"POST {CHAT} 200 id=([0-9a-f]{{24}}) caller=uid-\d+ {FIGURES}", line)
    assert level == "INFO"
    assert found, line
    assert reply.headers["x-request-id"] == found[1]
    assert f'"id":"chatcmpl-{found[1]}"' in reply.text
    assert int(found[3]) > 0  # reused
    assert SECRET not in line


def test_choices_are_counted_together(start):
    begin, lines = start
    assert begin().post(CHAT, json={**BODY, "n": 2, "temperature": 1.0}).is_success
    assert " generated=8 " in lines()[0][1]


def test_what_is_refused_is_said_without_what_it_held(start):
    begin, lines = start
    client = begin()
    client.post(CHAT, json={**BODY, "temperature": SECRET})
    client.post(CHAT, json={**BODY, SECRET: 1})
    client.post(CHAT, json={"messages": [{"role": SECRET, "content": "x"}]})
    client.post(CHAT, json={**BODY, "max_tokens": 10**6})
    client.post(CHAT, content=b"{" + SECRET.encode())
    client.get("/v1/models/gpt?key=" + SECRET)
    client.get("/health", headers={"host": "evil.example"})
    said = [re.sub(r" id=.*? seconds=\S+", "", line) for _, line in lines()]
    assert said == [
        f"POST {CHAT} 400 refused=invalid_request_error param=temperature",
        f"POST {CHAT} 400 refused=unknown_parameter",
        f"POST {CHAT} 400 refused=invalid_request_error param=messages[0].role",
        f"POST {CHAT} 400 refused=context_length_exceeded",
        f"POST {CHAT} 415 refused=content_type",
        "GET /v1/models/gpt 404 refused=model_not_found",
        "GET /health 403 refused=host",
    ]
    assert {level for level, _ in lines()} == {"WARNING"}
    assert SECRET not in str(lines())


def test_a_service_that_loads_has_refused_and_one_that_failed_has_failed(start):
    begin, lines = start
    client, (service,) = begin(), begin.services
    for service.state in ("loading", "draining", "failed"):
        client.post(CHAT, json=BODY)
    assert [level for level, _ in lines()] == ["WARNING", "WARNING", "ERROR"]


def test_a_key_is_never_said(start):
    begin, lines = start
    client = begin(key="k" * 20)
    assert client.get("/v1/models", headers={"authorization": "Bearer " + "k" * 20}).is_success
    assert client.get("/v1/models", headers={"authorization": "Bearer wrong-key-here"}).status_code == 401
    (_, good), (level, bad) = lines()
    assert " caller=key " in good
    assert " caller=- " in bad
    assert level == "WARNING"
    assert not [word for word in ("kkkk", "wrong-key") if word in good + bad]


@pytest.mark.parametrize("evil", ["a\nERROR x: fake", "a\r\n<3>fake", "a\x1b[31m", "a b=c", "\u2028fake", "x" * 5000])
def test_nobody_writes_a_line_of_their_own(start, evil):
    begin, lines = start
    client = begin()
    client.post(CHAT, json={**BODY, "user": evil})
    client.post(CHAT, json={**BODY, evil: 1})
    client.get("/v1/edge_dflash/sessions/" + quote(evil))
    client.request("FAKE", "/v1/models")
    for _, line in lines():
        assert line.isascii()
        assert line.isprintable()
        assert len(line) < 600
        assert re.fullmatch(r"[A-Z]+ /\S* \d{3}( [a-z_]+=\S+)+", line), line


def test_a_stream_that_fails_is_said_though_its_status_was_good(start, monkeypatch):
    begin, lines = start

    def broken(*args):
        raise RuntimeError(SECRET)

    monkeypatch.setattr(completions.Running, "_finish", broken)
    begin().post(CHAT, json={**BODY, "stream": True})
    level, line = lines()[0]
    assert (level, line.startswith(f"POST {CHAT} 200 ")) == ("ERROR", True)
    assert line.endswith(" refused=internal_error")


@pytest.mark.parametrize(("which", "count"), [("requests", 2), ("errors", 1), ("none", 0)])
def test_the_configuration_says_which_lines(start, which, count):
    begin, lines = start
    client = begin(service={"log": which})
    assert client.post(CHAT, json=BODY).is_success
    assert client.get("/health").is_success
    assert client.get("/metrics").is_success
    assert client.get("/nothing").status_code == 404
    assert len(lines()) == count


# The journal ----------------------------------------------------------------------------------------------------------


def test_each_line_of_a_record_has_its_priority():
    formatter = JournalFormatter("%(levelname)s %(message)s")
    for level, number in (("DEBUG", 7), ("INFO", 6), ("WARNING", 4), ("ERROR", 3), ("CRITICAL", 2)):
        record = logging.LogRecord("x", getattr(logging, level), "", 0, "one\ntwo", None, None)
        assert formatter.format(record) == f"<{number}>{level} one\n<{number}>two"
    try:
        raise ValueError("x")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed", None, sys.exc_info())
    assert all(line.startswith("<3>") for line in formatter.format(record).splitlines())


def test_the_journal_is_told_by_its_stream(tmp_path):
    with (tmp_path / "stream").open("w") as stream:
        found = os.fstat(stream.fileno())
        right = f"{found.st_dev}:{found.st_ino}"
        assert is_journal(stream.fileno(), {"JOURNAL_STREAM": right})
        for wrong in ("", "x", f"{found.st_dev}:{found.st_ino + 1}", right + ":1"):
            assert not is_journal(stream.fileno(), {"JOURNAL_STREAM": wrong})
        assert not is_journal(stream.fileno(), {})
    assert not is_journal(10**6, {"JOURNAL_STREAM": right})


PROGRAM = """
import logging, os, sys
from edge_dflash.serve.logs import log_to
log_to(2)
log = logging.getLogger("edge_dflash.serve")
for number in range(int(sys.argv[1])):
    log.info("line %d %s", number, "x" * 100)
print("logged", flush=True)
sys.stdin.readline()
log.info("the last one")
"""


def logging_process(lines, **streams):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(lines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **streams
    )


def test_a_stream_that_takes_nothing_stops_nobody_and_what_was_dropped_is_said():
    with logging_process(20_000, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "logged\n"
        read = os.read(process.stderr.fileno(), 1 << 20).decode()
        time.sleep(0.5)
        said = process.communicate("go\n", timeout=60)[1]
    lines = (read + said).splitlines()
    dropped = re.findall(r"WARNING edge_dflash.serve: (\d+) lines of the log were dropped", read + said)
    assert dropped  # once, or by turns with lines that found a place
    assert lines[-1] == "INFO edge_dflash.serve: the last one"
    assert len(lines) - len(dropped) + sum(map(int, dropped)) == 20_000 + 1
    assert lines[0].startswith("INFO edge_dflash.serve: line 0 xxx")


@pytest.mark.parametrize("journal", [True, False])
def test_a_stream_of_the_journal_has_priorities(tmp_path, monkeypatch, journal):
    with (tmp_path / "log").open("wb") as stream:
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino + (not journal)}")
        with logging_process(1, stderr=stream) as process:
            process.communicate("go\n", timeout=60)
    last = "INFO edge_dflash.serve: the last one"
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"{'<6>' if journal else ''}{last}"


def test_a_process_ends_though_its_stream_takes_nothing():
    with logging_process(20_000, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "logged\n"
        process.stdin.close()
        assert process.wait(30) == 0


def test_a_flood_of_strangers_has_few_lines_and_the_rest_are_counted(start, monkeypatch):
    begin, lines = start
    clock = [100.0]
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=time.perf_counter))
    client = begin(key="right-key-of-the-test")
    for _ in range(30):
        assert client.post(CHAT, json=BODY).status_code == 401
        known = client.get("/nowhere", headers={"authorization": "Bearer right-key-of-the-test"})
        assert known.status_code == 404
    assert len(lines()) == 20
    assert client.post(CHAT, json={}, headers={"authorization": "Bearer right-key-of-the-test"}).status_code == 400
    assert len(lines()) == 21  # who is known, and asks for what is there, has a line
    clock[0] += 1
    assert client.post(CHAT, json=BODY).status_code == 401
    assert [line for _, line in lines()][21].startswith("40 more requests were refused")
    assert len(lines()) == 23
