"""Files of prompts: what is read, what is held out, what is refused."""

import hashlib
import json

import pytest

from edge_dflash.errors import RequestError
from edge_dflash.training.data import read_data

SCHEMA = {"type": "object"}


def written(path, bodies, tail=""):
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies) + tail, encoding="utf-8")
    return path


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_lines_of_a_recording_and_of_others_are_tasks(tmp_path):
    bodies = [
        chat("one", schema=SCHEMA, answer="{}", finish_reason="stop", accept_length=3.2),
        {"prompt": "two", "raw": True},
        chat("three", answer="text", reasoning="long"),
        chat("four", tools=[{"type": "function"}], thinking=True, temperature=0.7),
    ]
    path = written(tmp_path / "plans.jsonl", bodies)
    data = read_data(path, heldout=1)
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [task.index for task in data.tasks] == [0, 1, 2, 3]
    one, two, three, four = data.tasks
    assert (one.options, one.answer) == ({"schema": SCHEMA}, "{}")
    assert (two.asked, two.raw, two.answer) == ("two", True, None)
    assert three.answer is None  # a part of what was said, so no answer to learn as it is
    assert four.options == {"tools": [{"type": "function"}], "thinking": True}


def test_what_is_held_out_does_not_depend_on_the_order_and_never_stands_on_both_sides(tmp_path):
    bodies = [chat(f"task {i % 40}") for i in range(120)]
    data = read_data(written(tmp_path / "a.jsonl", bodies))
    assert len({str(task.asked) for task in data.heldout}) == 4
    assert {str(task.asked) for task in data.heldout}.isdisjoint(str(task.asked) for task in data.training)
    again = read_data(written(tmp_path / "b.jsonl", bodies[::-1]))
    assert {str(task.asked) for task in again.heldout} == {str(task.asked) for task in data.heldout}
    assert len(read_data(tmp_path / "a.jsonl", heldout=11).heldout) == 33
    many = read_data(written(tmp_path / "c.jsonl", [chat(f"{i}") for i in range(3000)]), most=2500)
    assert (len(many.tasks), len(many.heldout)) == (2500, 200)


def test_lines_with_images_and_a_torn_one_are_left_out(tmp_path):
    seen = {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}
    data = read_data(written(tmp_path / "a.jsonl", [chat("one"), seen, chat("two")], tail='{"messages": [{"ro'))
    assert (len(data.tasks), data.skipped) == (2, 2)
    assert data.tasks[1].index == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 needs either messages or prompt"),
        ('{"text": "x"}', "line 2 needs either messages or prompt"),
        ('{"messages": [], "prompt": "x"}', "line 2 needs either messages or prompt"),
        ('{"messages": []}', "line 2: messages is no list"),
        ('{"messages": ["x"]}', "line 2: messages is no list"),
        ('{"prompt": 3}', "line 2: prompt is no text"),
        ('{"prompt": "x", "answer": 3}', "line 2: answer is int"),
    ],
)
def test_what_is_no_task_is_named_by_its_line(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat("one")) + "\n" + line + "\n" + json.dumps(chat("two")) + "\n")
    with pytest.raises(RequestError, match=said):
        read_data(path)


def test_too_few_prompts_and_no_file_are_refused(tmp_path):
    with pytest.raises(RequestError, match="1 different prompts"):
        read_data(written(tmp_path / "a.jsonl", [chat("one"), chat("one")]))
    with pytest.raises(RequestError, match="2 of 2 prompts are to be held out"):
        read_data(written(tmp_path / "a.jsonl", [chat("one"), chat("two")]), heldout=2)
    with pytest.raises(RequestError, match="cannot read"):
        read_data(tmp_path / "none.jsonl")
