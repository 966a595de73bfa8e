"""The target's answers in a file: each once, of the form that was asked for, whatever killed the call before."""

import json

import pytest

from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.training.answers import make_answers, prompt_ids, read_answers
from edge_dflash.training.data import read_data
from edge_dflash.training.evaluate import accepted, evaluate, ways

SCHEMA = {
    "type": "object",
    "properties": {"x": {"enum": ["left", "right"]}},
    "required": ["x"],
    "additionalProperties": False,
}
GIVEN = '{"steps": []}'


@pytest.fixture(scope="module")
def planner(demo_bundle):
    with Planner.open(demo_bundle, self_test="off", fallback=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    bodies = [
        {"messages": [{"role": "user", "content": "Which way?"}], "schema": SCHEMA},
        {"messages": [{"role": "system", "content": "Plan."}, {"role": "user", "content": "Go to the dock."}]},
        {"prompt": "Goal: wait", "raw": True},
        {"prompt": "Goal: Check black_vial.", "answer": GIVEN},
    ]
    path = tmp_path_factory.mktemp("data") / "plans.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return read_data(path, heldout=1)


@pytest.fixture(scope="module")
def whole(planner, data, tmp_path_factory):
    """The file of a call that nothing stopped."""
    file = tmp_path_factory.mktemp("whole") / "answers.jsonl"
    made = make_answers(planner, data, file, new_tokens=8)
    assert made == sum(len(one.tokens) for one in read_answers(file))
    return file


def test_every_task_is_answered_greedily_and_drawn_and_a_held_out_one_greedily(planner, data, whole):
    found = read_answers(whole)
    wanted = set()
    for task in data.tasks:
        if task.answer is not None and not task.heldout:
            wanted.add((task.index, "given", 0))
            continue
        wanted.add((task.index, "greedy", 0))
        if not task.heldout:
            wanted.add((task.index, "sampled", 0))
    assert {(one.task, one.way, one.number) for one in found} == wanted
    for one in found:
        task = data.tasks[one.task]
        assert one.heldout == task.heldout
        assert one.prompt == prompt_ids(planner.tokenizer, task)
        if one.way == "greedy":
            plan = planner.plan(task.asked, raw=task.raw, max_new_tokens=8, **task.options)
            assert (plan.tokens, plan.prompt_tokens) == (one.tokens, len(one.prompt))
        if one.way == "given":
            assert planner.tokenizer.decode(one.tokens) == GIVEN
            assert one.tokens[-1] in planner.stop_token_ids
        if "schema" in task.options:
            assert planner.tokenizer.decode(one.tokens).startswith('{"x"')


def test_a_call_that_was_killed_is_gone_on_with(planner, data, whole, tmp_path):
    text = whole.read_bytes()
    for cut in (0, 1, len(text) // 2, len(text) - 1):
        file = tmp_path / f"{cut}.jsonl"
        file.write_bytes(text[:cut])
        make_answers(planner, data, file, new_tokens=8)
        assert read_answers(file) == read_answers(whole)
        assert [one.tokens for one in read_answers(file)] == [one.tokens for one in read_answers(whole)]
    assert make_answers(planner, data, whole, new_tokens=8) == 0
    assert whole.read_bytes() == text


def test_a_damaged_file_is_told_by_its_line(whole, tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_bytes(b'{"task": 0}\n' + whole.read_bytes())
    with pytest.raises(RequestError, match="line 1 is damaged"):
        read_answers(file)
    assert read_answers(tmp_path / "none.jsonl") == ()


def test_a_task_that_cannot_be_asked_is_told_by_its_line(planner, tmp_path):
    path = tmp_path / "plans.jsonl"
    bad = {"prompt": "x", "schema": {"type": 7}}
    path.write_text(json.dumps(bad) + "\n" + json.dumps({**bad, "prompt": "y"}) + "\n")
    with pytest.raises(RequestError, match=r"plans.jsonl: line [12]: "):
        make_answers(planner, read_data(path), tmp_path / "answers.jsonl", new_tokens=4)


def test_prompts_that_all_leave_no_room_are_told(planner, tmp_path):
    path, long = tmp_path / "plans.jsonl", "go " * planner.shape.usable_context
    path.write_text("".join(json.dumps({"prompt": long + str(i)}) + "\n" for i in range(3)))
    with pytest.raises(RequestError, match=r"no prompt of .* leaves room .* \d+ tokens of context"):
        make_answers(planner, read_data(path), tmp_path / "answers.jsonl", new_tokens=4)


def test_a_bundle_is_measured_every_way_and_compared_with_plain_decoding(demo_bundle, data, monkeypatch):
    tasks, told = data.tasks[:2], []
    found = evaluate(demo_bundle, tasks, new_tokens=8, plain=1, progress=lambda *now: told.append(now))
    assert tuple(found) == ways(tasks) == ("greedy", "sampled", "greedy, schema", "sampled, schema")
    for one in found.values():
        assert (one.compared, one.equal) == (1, 1)
        assert one.accept_length >= 1
        assert one.plain_tokens_per_second > 0
    assert told[-1][1:] == (12, 12)
    real = Planner.plan

    def wrong(self, *given, **options):
        """Other tokens without the drafter."""
        more = {"temperature": 2.0, "seed": 99} if options.get("speculative") is False else {}
        return real(self, *given, **{**options, **more})

    monkeypatch.setattr(Planner, "plan", wrong)
    assert any(one.equal == 0 for one in evaluate(demo_bundle, tasks, new_tokens=8, plain=1).values())


def test_acceptance_counts_drafts_that_could_have_been_accepted():
    found = accepted([(3, 1, 2), (1,)])
    assert (found.tokens, found.cycles, found.mean) == (7, 4, 1.75)
    assert found.by_position == (2 / 3, 0.5)
