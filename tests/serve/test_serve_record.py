"""Answers that the service records: their file, what it never holds, and a disk that refuses."""

from __future__ import annotations

import json
import stat

from service_support import Process, until

from edge_dflash.runner.recording import Recording
from edge_dflash.serve.state_dir import recording_in

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_a_service_records_what_it_answered_and_not_who_asked(demo_bundle, tmp_path):
    settings = 'self_test = "off"\nrecord = true\n'
    with Process(demo_bundle, tmp_path, tcp=True, key="robot-one a-very-secret-key", settings=settings) as process:
        with process.client() as client:
            body = {"messages": HELLO, "max_tokens": 8, "user": "Ines-of-the-lab", "metadata": {"note": "n-o-t-e"}}
            reply = client.post(CHAT, json=body).json()
            assert client.post(CHAT, json={"messages": []}).status_code == 400
        path = process.state / "answers.jsonl"
        until(path.exists)
        log = (tmp_path / "log").read_text()
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert line["messages"] == HELLO
    assert line["answer"] == reply["choices"][0]["message"]["content"]
    assert line["finish_reason"] == "length"
    assert line["accept_length"] >= 1.0
    text = path.read_text()
    assert not [word for word in ("Ines", "secret", "robot-one", "n-o-t-e", str(tmp_path)) if word in text]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "not recorded" not in log


def test_a_state_directory_that_cannot_be_made_is_an_error_of_the_log_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert recording_in(tmp_path / "file" / "state", 1 << 20) is None  # and requests go on
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "answers are not recorded in" in caplog.text
    assert recording_in(tmp_path / "state", 1 << 20) == Recording(tmp_path / "state" / "answers.jsonl", 1 << 20)
