"""Finished answers in a file: what a line holds and does not hold, its size, its repair, and a disk that refuses."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import stat
import threading
import time

import pytest
from fakes import TEXT_SHAPE, FakeBackend
from planner_support import Gate
from text_support import thinking_tokenizer, write_tokenizer

from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.runner import recording
from edge_dflash.runner.recording import LEAST, Recording
from edge_dflash.text.tokenizer import Tokenizer

MUG = [{"role": "user", "content": "Take the mug."}]
SCHEMA = {"type": "object", "properties": {"do": {"enum": ["a", "b"]}}, "required": ["do"]}


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer.open(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers.jsonl"


def opened(tokenizer, record, backend=None, **settings):
    backend = backend or FakeBackend(TEXT_SHAPE, right=lambda position: position % 3)
    return Planner(backend, tokenizer, [tokenizer.eos_token_id], record=record, fallback=False, **settings)


def scripted(tokenizer, answer, record):
    ids = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    return opened(tokenizer, record, FakeBackend(TEXT_SHAPE, script=ids, script_at=len(tokenizer.encode_chat(MUG))))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_for(planner, **counts):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if all(getattr(planner.recorded, name) == count for name, count in counts.items()):
            return
        time.sleep(0.01)
    raise AssertionError(planner.recorded)


def record(planner, *tasks):
    """Plans whose answers are written before this returns."""
    for task in tasks:
        before = planner.recorded
        planner.plan(task, max_new_tokens=2)
        wait_for(planner, written=before.written + 1)


def said(path):
    return [line["messages"][0]["content"] for line in lines(path)]


def test_nothing_is_written_unless_asked(tokenizer, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    with opened(tokenizer, None) as planner:
        planner.plan("Take the mug.", max_new_tokens=8)
        assert planner.recorded == recording.RecordStats()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_line_holds_prompt_form_and_answer_and_not_who_asked(tokenizer, path):
    with scripted(tokenizer, '{"do":"a"}', path) as planner:
        plan = planner.plan(MUG, schema=SCHEMA, caller="account/secret-name", priority=3, deadline=60.0, seed=77)
    (line,) = lines(path)
    assert line == {
        "messages": MUG,
        "schema": SCHEMA,
        "answer": '{"do":"a"}',
        "finish_reason": "stop",
        "accept_length": round(plan.accept_length, 3),
    }
    assert "secret-name" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_shapes_a_prompt_is_kept(tokenizer, tmp_path, path):
    thinking = thinking_tokenizer(tmp_path / "thinking")
    shape = dataclasses.replace(TEXT_SHAPE, vocab_size=262)
    ids = [*thinking.encode("a mug</think>\n\nTake it."), thinking.eos_token_id]
    prompt = thinking.encode_chat(MUG, enable_thinking=True)
    with opened(thinking, str(path), FakeBackend(shape, script=ids, script_at=len(prompt))) as planner:
        planner.plan(MUG, thinking=True, temperature=0.7, top_k=1, seed=1)
        planner.plan("Go on", raw=True, max_new_tokens=3, speculative=False)
    first, second = lines(path)
    assert (first["thinking"], first["temperature"], first["top_k"]) == (True, 0.7, 1)
    assert (first["reasoning"], first["answer"]) == ("a mug", "Take it.")
    assert (second["prompt"], second["raw"], second["finish_reason"]) == ("Go on", True, "length")
    assert second["accept_length"] is None  # plain
    assert "messages" not in second


def test_the_turns_of_a_session_hold_the_conversation_so_far_and_each_candidate_is_an_answer(tokenizer, path):
    with opened(tokenizer, path) as planner, planner.session(system="Be brief.") as session:
        for task in ("Take the mug.", "And the cup."):
            session.plan(task, max_new_tokens=4)
        said = [dict(message) for message in session.messages]
        best = planner.plan("Take the mug.", n=3, temperature=1.0, max_new_tokens=4)
    texts = [best.text, *(one.text for one in best.alternatives)]
    first, second, *candidates = lines(path)
    assert [line["messages"] for line in (first, second)] == [said[:2], said[:4]]
    assert [line["answer"] for line in (first, second)] == [said[2]["content"], said[4]["content"]]
    assert sorted(line["answer"] for line in candidates) == sorted(texts)


def test_failed_cancelled_and_wordless_requests_are_not_recorded(tokenizer, path):
    gate = Gate(FakeBackend(TEXT_SHAPE), free=1)
    with opened(tokenizer, path, gate) as planner:
        stream = planner.stream("Take the mug.", max_new_tokens=20)
        assert gate.reached.wait(60)
        stream.cancel()
        gate.open.set()
        assert stream.plan.finish_reason == "cancelled"
        with pytest.raises(RequestError):
            planner.plan("Take the mug.", max_new_tokens=10**6)
        planner.plan((3, 1, 4), max_new_tokens=4)  # token ids: no text says them
        planner.plan("Take the cup.", max_new_tokens=4)
    assert [line["messages"][0]["content"] for line in lines(path)] == ["Take the cup."]


def test_the_messages_are_those_of_the_call_whatever_happens_to_them_later(tokenizer, path):
    messages = [dict(MUG[0])]
    gate = Gate(FakeBackend(TEXT_SHAPE))
    with opened(tokenizer, path, gate) as planner:
        stream = planner.stream(messages, max_new_tokens=4)
        messages[0]["content"] = "changed"
        gate.open.set()
        _ = stream.plan
    assert lines(path)[0]["messages"] == MUG


def test_the_oldest_answers_go_and_both_files_stay_below_the_limit(tokenizer, path):
    with opened(tokenizer, Recording(path, LEAST)) as planner:
        for number in range(60):
            planner.plan(f"Take mug {number}.", max_new_tokens=8)
        wait_for(planner, written=60)
    older = path.with_name(path.name + ".1")
    assert path.stat().st_size + older.stat().st_size <= LEAST
    kept = [line["messages"][0]["content"] for line in [*lines(older), *lines(path)]]
    assert kept == [f"Take mug {number}." for number in range(60 - len(kept), 60)]
    assert stat.S_IMODE(older.stat().st_mode) == 0o600


def test_an_answer_larger_than_half_the_limit_is_dropped(tokenizer, path):
    with opened(tokenizer, Recording(path, LEAST), queue=4) as planner:
        planner.plan([{"role": "user", "content": "x", "note": "y" * LEAST}], max_new_tokens=2)
        planner.plan("Take the mug.", max_new_tokens=2)
        wait_for(planner, written=1, dropped=1)
    assert len(lines(path)) == 1


@pytest.mark.parametrize("whole", ['{"answer": "old"}\n', ""])
@pytest.mark.parametrize("torn", ['{"messages": [{"ro', "x" * 200_000, ""])
def test_what_a_crash_left_is_cut_and_what_was_whole_stays(tokenizer, path, whole, torn):
    path.write_text(whole + torn)
    path.chmod(0o644)
    with opened(tokenizer, path) as planner:
        planner.plan("Take the mug.", max_new_tokens=2)
    *old, found = lines(path)
    assert (old, found["messages"]) == ([{"answer": "old"}] if whole else [], MUG)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_refuses_is_told_once_and_fails_no_request(tokenizer, path, monkeypatch, caplog, code):
    real, broken = os.write, threading.Event()

    def write(file, data):
        if broken.is_set():
            raise OSError(code, os.strerror(code))
        return real(file, data)

    monkeypatch.setattr(recording.os, "write", write)
    with caplog.at_level(logging.INFO, "edge_dflash"), opened(tokenizer, path) as planner:
        broken.set()
        for _ in range(3):
            assert planner.plan("Take the mug.", max_new_tokens=2).finish_reason == "length"
        wait_for(planner, failed=3)
        assert os.strerror(code) in planner.recorded.error
        assert [r.levelname for r in caplog.records] == ["ERROR"]
        assert str(path) in caplog.text
        broken.clear()
        planner.plan("Take the cup.", max_new_tokens=2)
        wait_for(planner, written=1)
        assert planner.recorded.error == ""
    assert [line["messages"][0]["content"] for line in lines(path)] == ["Take the cup."]


def test_a_disk_that_hangs_holds_no_request_up(tokenizer, path, monkeypatch):
    going, real = threading.Event(), os.write

    def write(file, data):
        assert going.wait(60)
        return real(file, data)

    monkeypatch.setattr(recording.os, "write", write)
    monkeypatch.setattr(recording, "WAITING", 4)
    with opened(tokenizer, path) as planner:
        for _ in range(12):
            planner.plan("Take the mug.", max_new_tokens=2)
        wait_for(planner, dropped=7)  # one is being written, four wait
        going.set()
        wait_for(planner, written=5)
    assert len(lines(path)) == 5


def test_two_planners_do_not_write_into_one_file(tokenizer, tmp_path, path):
    with opened(tokenizer, path) as first:
        first.plan("Take the mug.", max_new_tokens=2)
        wait_for(first, written=1)
        other = Tokenizer.open(write_tokenizer(tmp_path / "other"))
        with opened(other, path) as second:
            second.plan("Take the mug.", max_new_tokens=2)
            wait_for(second, failed=1)
            assert "another process records in it" in second.recorded.error
    assert len(lines(path)) == 1


@pytest.mark.parametrize("given", [7, "", "/nowhere/at/all/answers.jsonl", Recording("x", 5), True])
def test_a_place_that_cannot_be_is_refused_at_open(tokenizer, given):
    with pytest.raises(RequestError, match=r"record is .*; give the path of a file in a directory that is there"):
        opened(tokenizer, given)


def test_a_file_that_was_renamed_removed_or_replaced_is_left_and_another_begun(tokenizer, path):
    """As logrotate does it."""
    rotated = path.with_name("rotated")
    with opened(tokenizer, path) as planner:
        record(planner, "one")
        path.rename(rotated)
        record(planner, "two", "three")
        assert (said(rotated), said(path)) == (["one"], ["two", "three"])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.unlink()
        record(planner, "four")
        assert said(path) == ["four"]
        path.unlink()
        path.write_text('{"answer": "old"}\ntorn')  # logrotate's "create"
        record(planner, "five")
    assert lines(path)[0]["answer"] == "old"
    assert len(lines(path)) == 2


def test_a_file_that_was_cut_goes_on_from_its_end(tokenizer, path):
    """As logrotate's copytruncate does it."""
    with opened(tokenizer, Recording(path, LEAST)) as planner:
        record(planner, "one", "two")
        os.truncate(path, 0)
        record(planner, "three")
        assert said(path) == ["three"]
        os.truncate(path, path.stat().st_size - 3)  # in the middle of a line
        record(planner, "four")
        assert said(path) == ["four"]
        size = path.stat().st_size
        for number in range(10 * LEAST // size):
            if number % 3 == 0:
                os.truncate(path, 0)
            record(planner, "five")
        assert not path.with_name(path.name + ".1").exists()  # what is there counts, not what was


def test_a_file_that_vanishes_while_a_line_is_written_gets_it_all_the_same(tokenizer, path, monkeypatch):
    real = os.write

    def write(file, data):
        if not moved:
            moved.append(path.unlink())
        return real(file, data)

    with opened(tokenizer, path) as planner:
        record(planner, "one")
        moved = []
        monkeypatch.setattr(recording.os, "write", write)
        record(planner, "two")
    assert said(path) == ["two"]


@pytest.mark.parametrize("cut", [False, True])
def test_a_part_of_a_line_is_taken_back_also_from_a_file_that_was_cut_meanwhile(tokenizer, path, monkeypatch, cut):
    real = os.write

    def write(file, data):
        if cut:
            os.truncate(path, 0)
        return real(file, data[:9])

    with opened(tokenizer, path) as planner:
        record(planner, "one")
        monkeypatch.setattr(recording.os, "write", write)
        planner.plan("two", max_new_tokens=2)
        wait_for(planner, failed=1)
        monkeypatch.undo()
        record(planner, "three")
    assert b"\0" not in path.read_bytes()
    assert said(path) == [*([] if cut else ["one"]), "three"]


def link(to):
    return lambda path: path.symlink_to(path.with_name(to))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, link("elsewhere"), link("other")])
def test_another_thing_of_that_name_is_refused_and_no_link_is_followed(tokenizer, tmp_path, path, make):
    (tmp_path / "other").write_text("mine")
    with opened(tokenizer, path) as planner:
        record(planner, "one")
        path.unlink()
        make(path)
        planner.plan("two", max_new_tokens=2)
        wait_for(planner, failed=1)
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "other").read_text() == "mine"
