"""Files of prompts: what a line may hold, which one is wrong, and prompts that are held out."""

import hashlib
import json
import random

import pytest
from training_support import SCHEMA, TOOL

from edge_dflash.errors import RequestError
from edge_dflash.training.data import MOST_LINE, TrainingTask, read_mixture, read_tasks, spread


def read_data(path, **options):
    return read_mixture([path], **options)[0]


def said(text):
    return [{"role": "user", "content": text}]


def written(path, bodies, end="\n"):
    path.write_text("\n".join(body if isinstance(body, str) else json.dumps(body) for body in bodies) + end)
    return path


def many(count=40):
    return [{"messages": said(f"Take mug {number}."), "schema": SCHEMA} for number in range(count)]


def heldout_texts(data):
    return {json.dumps(task.asked) for task in data.heldout}


def test_a_line_is_a_task_and_the_hash_is_of_the_bytes(tmp_path):
    lines = [
        {"messages": said("a"), "schema": SCHEMA, "answer": "{}", "accept_length": 3.0, "temperature": 0.7},
        {"prompt": "b", "raw": True},
        {"prompt": "c", "regex": "[a-z]+", "whitespace": False, "thinking": None},
        {"messages": said("d"), "tools": [TOOL], "thinking": True, "temperature": 0.7},
    ]
    path = written(tmp_path / "plans.jsonl", lines)
    data = read_tasks(path)
    first, second, third, fourth = data.tasks
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (first.asked, first.options, first.answer, first.whole) == (said("a"), {"schema": SCHEMA}, "{}", True)
    assert (second.asked, second.raw, second.answer) == ("b", True, None)
    assert third.options == {"regex": "[a-z]+", "whitespace": False}
    assert fourth.options == {"tools": [TOOL], "thinking": True}
    assert [task.index for task in data.tasks] == [0, 1, 2, 3]
    assert not data.heldout


def test_the_hash_is_of_the_whole_file_however_few_tasks_are_read(tmp_path):
    path = written(tmp_path / "plans.jsonl", many())
    few = read_tasks(path, most=3)
    assert len(few.tasks) == 3
    assert few.sha256 == read_tasks(path).sha256


def test_lines_that_are_alike_share_their_schema(tmp_path):
    tasks = read_tasks(written(tmp_path / "plans.jsonl", many(3))).tasks
    assert tasks[0].options["schema"] is tasks[2].options["schema"]


@pytest.mark.parametrize(
    ("more", "answer", "whole"),
    [
        ({}, "done", True),
        ({"finish_reason": "stop"}, "done", True),
        ({"finish_reason": "length"}, "done", False),
        ({"finish_reason": "deadline"}, "done", False),
        ({"finish_reason": "stop", "stop": [";"]}, "done", False),
        ({"reasoning": "I think"}, None, True),
        ({"thinking": True}, None, True),
        ({"tool_calls": [{"id": "x"}]}, None, True),
        ({"answer": ""}, None, True),
    ],
)
def test_what_was_recorded_of_an_answer_says_how_it_is_used(tmp_path, more, answer, whole):
    path = written(tmp_path / "plans.jsonl", [{"messages": said("a"), "answer": "done", **more}])
    (task,) = read_tasks(path).tasks
    assert (task.answer, task.whole) == (answer, whole)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("3 4", "is not JSON (Extra data, column 3); correct or remove it"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "\xff', "is not JSON"),
        ("[]", "needs either messages or prompt"),
        ("3", "needs either messages or prompt"),
        ({"text": "a"}, "needs either messages or prompt"),
        ({"prompt": "a", "messages": said("a")}, "needs either messages or prompt"),
        ({"messages": []}, "no list of messages"),
        ({"messages": "a"}, "no list of messages"),
        ({"messages": ["a"]}, "no list of messages"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "content of message 0"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"prompt": [1, 2]}, "prompt is no text"),
        ({"prompt": "  "}, "the task is empty"),
        ({"prompt": "a", "answer": {"do": "a"}}, "answer is dict"),
        ({"prompt": "a", "raw": "yes"}, "raw is 'yes'"),
        ({"prompt": "a", "raw": True, "tools": [TOOL]}, "raw and tools"),
        ({"prompt": "a", "schema": [1]}, "schema is"),
        ({"prompt": "a", "thinking": "yes"}, "thinking is 'yes'; give true or false"),
        ({"prompt": "a", "schema": SCHEMA, "regex": "a"}, "schema and regex"),
        ({"prompt": "a", "tool_choice": "move"}, "tool_choice"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line, words):
    path = written(tmp_path / "plans.jsonl", [*many(4), line, *many(2)])
    with pytest.raises(RequestError) as refused:
        read_data(path)
    assert str(refused.value).startswith(f"{path}: line 5")
    assert words in str(refused.value)


def test_a_file_torn_at_any_byte_of_its_last_line_has_the_lines_before_it(tmp_path):
    path = written(tmp_path / "plans.jsonl", [*many(3), {"messages": said("Grüße \U0001f9be"), "answer": "ja"}])
    body = path.read_bytes()
    start = body[:-1].rindex(b"\n") + 1
    for end in range(start, len(body) + 1):
        path.write_bytes(body[:end])
        data = read_tasks(path)
        whole = end >= len(body) - 1  # only the newline is missing
        assert len(data.tasks) == 3 + whole
        assert data.skipped == (not whole and end > start)


def test_lines_with_images_are_left_out_and_empty_ones_count(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    seen = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]}
    data = read_tasks(written(tmp_path / "plans.jsonl", [*many(2), seen, "", *many(1)]))
    assert [task.index for task in data.tasks] == [0, 1, 4]
    assert data.skipped == 1


def test_a_line_without_end_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(RequestError, match="line 1 has more than 16 MB"):
        read_tasks(written(tmp_path / "long.jsonl", ["x" * (MOST_LINE + 1)]))
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(RequestError, match=f"cannot read {path}: "):
            read_tasks(path)


def test_what_is_held_out_does_not_depend_on_the_order_of_lines(tmp_path):
    lines = many(60)
    first = read_data(written(tmp_path / "one.jsonl", lines))
    random.Random(1).shuffle(lines)
    second = read_data(written(tmp_path / "two.jsonl", lines))
    assert len(first.heldout) == 6
    assert heldout_texts(first) == heldout_texts(second)
    assert len(first.training) + len(first.heldout) == 60


@pytest.mark.parametrize(("prompts", "asked", "count"), [(2, None, 1), (9, None, 1), (50, None, 5), (50, 7, 7)])
def test_how_many_are_held_out(tmp_path, prompts, asked, count):
    assert len(read_data(written(tmp_path / "plans.jsonl", many(prompts)), heldout=asked).heldout) == count


def test_most_two_hundred_are_held_out(tmp_path):
    path = written(tmp_path / "plans.jsonl", [{"prompt": str(number)} for number in range(2500)])
    data = read_data(path, most=2100)
    assert (len(data.tasks), len(data.heldout)) == (2100, 200)


def test_a_prompt_is_on_one_side_in_whatever_form_it_is_there(tmp_path):
    texts = [f"Take mug {number}." for number in range(30)]
    lines = [{"prompt": text} for text in texts] + [{"messages": said(text)} for text in texts]
    lines += [{"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]} for text in texts]
    data = read_data(written(tmp_path / "plans.jsonl", lines))
    assert len(data.heldout) == 9  # three prompts, three times
    assert len({task.index % 30 for task in data.heldout}) == 3


def test_a_prompt_of_two_files_is_on_one_side_in_both(tmp_path):
    one = written(tmp_path / "one.jsonl", many(40))
    two = written(tmp_path / "two.jsonl", many(200))
    alone = [read_data(path, heldout=8) for path in (one, two)]
    assert {json.dumps(t.asked) for t in alone[1].training} & heldout_texts(alone[0])  # so the test can fail
    first, second = read_mixture([one, two], heldout=8)
    out = heldout_texts(first) | heldout_texts(second)
    assert out >= heldout_texts(alone[0]) | heldout_texts(alone[1])
    assert not out & {json.dumps(task.asked) for task in (*first.training, *second.training)}


def test_too_few_prompts_are_refused(tmp_path):
    with pytest.raises(RequestError, match="has 1 different prompts"):
        read_data(written(tmp_path / "same.jsonl", many(1) * 3))
    path = written(tmp_path / "plans.jsonl", many(3))
    for count in (0, 3, -1):
        with pytest.raises(RequestError, match="give 1 to 2"):
            read_data(path, heldout=count)


def test_a_file_whose_prompts_are_all_held_out_is_refused(tmp_path):
    lines, order = many(3), []
    while len(lines) > 1:  # by hash
        (first,) = read_data(written(tmp_path / "plans.jsonl", lines), heldout=1).heldout
        order.append(lines.pop(first.index))
    first, second, third = *order, *lines
    one, two = written(tmp_path / "one.jsonl", [first, second]), written(tmp_path / "two.jsonl", [second, third])
    with pytest.raises(RequestError, match=f"all prompts of {one} are held out"):
        read_mixture([one, two], heldout=1)


def test_tasks_are_taken_from_all_over_a_file():
    tasks = [TrainingTask(index, "a") for index in range(10)]
    assert [task.index for task in spread(tasks, 4)] == [0, 3, 6, 9]
    assert [task.index for task in spread(tasks, 1)] == [0]
    assert spread(tasks, 20) == tasks
    assert spread([], 3) == []


def test_keys_that_nobody_expects_are_named(tmp_path):
    bodies = [{"prompt": "a", "shema": {}}, {"prompt": "b", "thinkng": True, "id": "b-1", "accept_length": 2.0}]
    assert read_tasks(written(tmp_path / "plans.jsonl", bodies)).unread == ("shema", "thinkng")
