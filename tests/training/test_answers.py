"""Answers of the target: what is asked, what a file holds after a kill at any time, how given ones end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import TEXT_SHAPE, FakeBackend
from text_support import write_tokenizer
from training_support import SCHEMA, TOOL

from edge_dflash.common.progress import unheard
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner
from edge_dflash.text.prompt import Prompter
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.training.answers import make_answers, prompt_ids, read_answers
from edge_dflash.training.data import read_mixture, read_tasks
from edge_dflash.training.settings import TrainingRun

CHILD = """
import sys
sys.path[:0] = {path!r}
import {module} as here
from pathlib import Path
folder = Path(sys.argv[1])
with here.opened(folder, here.Slow()) as planner:
    here.asked(planner, here.read_mixture([folder / "plans.jsonl"])[0], folder / "killed.jsonl")
"""


class Slow(FakeBackend):
    def __init__(self):
        super().__init__(TEXT_SHAPE)

    def verify(self, ids, lane=0, parents=None):
        time.sleep(0.02)
        return super().verify(ids, lane)


def lines():
    plain = [{"prompt": f"Take mug {number}."} for number in range(5)]
    shaped = [{"messages": [{"role": "user", "content": f"Choose {number}"}], "schema": SCHEMA} for number in range(3)]
    return [*plain, *shaped, {"prompt": "Say it.", "raw": True}, {"prompt": "x", "answer": "done"}]


def written(folder, bodies=None):
    path = folder / "plans.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies or lines()))
    return path


def opened(folder, backend=None, **settings):
    tokenizer = Tokenizer.open(write_tokenizer(folder / "tokenizer"))
    backend = backend or FakeBackend(TEXT_SHAPE)
    return Planner(backend, tokenizer, [5, tokenizer.eos_token_id], fallback=False, **settings)


def asked(planner, data, file, new_tokens=8, progress=unheard, **changes):
    run = TrainingRun(Path(), (), Path(), new_tokens=new_tokens, **{"sampled": 2, **changes})
    return make_answers(planner, data, file, run, progress)


@pytest.fixture
def planner(tmp_path):
    with opened(tmp_path) as planner:
        yield planner


@pytest.fixture
def data(tmp_path):
    return read_mixture([written(tmp_path)])[0]


def test_training_tasks_are_answered_greedily_and_drawn_heldout_ones_greedily(planner, data, tmp_path):
    told = []
    made = asked(planner, data, tmp_path / "a.jsonl", progress=lambda *step: told.append(step))
    answers = read_answers(tmp_path / "a.jsonl")
    wanted = {(task.index, "greedy", 0) for task in data.tasks if task.heldout or task.answer is None}
    wanted |= {(task.index, "given", 0) for task in data.training if task.answer is not None}
    wanted |= {(task.index, "sampled", n) for task in data.training if task.answer is None for n in range(2)}
    assert [one.key for one in answers] == sorted(wanted)
    assert {one.task for one in answers if one.heldout} == {task.index for task in data.heldout}
    assert made == sum(len(one.tokens) for one in answers)
    assert told[0] == ("answers", 0, len(wanted))
    assert told[-1] == ("answers", len(wanted), len(wanted))


def test_answers_are_those_of_plan(planner, data, tmp_path):
    asked(planner, data, tmp_path / "a.jsonl")
    for one in read_answers(tmp_path / "a.jsonl"):
        task = data.tasks[one.task]
        if one.way == "given":
            continue
        drawn = {"temperature": 0.7, "seed": one.task * 1009 + one.number} if one.way == "sampled" else {}
        plan = planner.plan(one.prompt, max_new_tokens=8, **task.options, **drawn)
        assert plan.tokens == one.tokens
        assert one.prompt == planner.encode(task.asked, raw=task.raw)
    drawn = [one.tokens for one in read_answers(tmp_path / "a.jsonl") if one.way == "sampled"]
    assert len(set(drawn)) > len(drawn) // 2


@pytest.mark.parametrize(("more", "ended"), [({}, True), ({"finish_reason": "length"}, False)])
def test_a_given_answer_ends_with_the_stop_token_unless_it_was_cut(planner, tmp_path, more, ended):
    line = {"prompt": "x", "answer": "done<|end|>", **more}
    data = read_tasks(written(tmp_path, [line]))
    assert asked(planner, data, tmp_path / "a.jsonl") > 0
    (one,) = read_answers(tmp_path / "a.jsonl")
    assert one.way == "given"
    assert one.prompt == planner.encode("x")
    text = planner.tokenizer.encode_text("done<|end|>")
    assert planner.tokenizer.eos_token_id not in text  # what an answer says is text
    assert one.tokens == (*text, *([planner.tokenizer.eos_token_id] if ended else []))


def test_the_end_of_the_context_cuts_answers_and_leaves_out_longer_prompts(planner, tmp_path):
    room = planner.shape.usable_context
    bodies = [
        {"prompt": "x" * (room - 5), "raw": True},
        {"prompt": "y" * 300, "raw": True},
        {"prompt": "z" * 245, "raw": True, "answer": "w" * 40},
    ]
    data = read_tasks(written(tmp_path, bodies))
    asked(planner, data, tmp_path / "a.jsonl", new_tokens=200, sampled=0)
    greedy, given = read_answers(tmp_path / "a.jsonl")
    usable = planner.shape.usable_context
    assert (greedy.task, given.task) == (0, 2)
    assert len(greedy.prompt) + len(greedy.tokens) <= usable
    assert len(given.prompt) + len(given.tokens) == usable


def test_prompts_that_all_leave_no_room_are_told(planner, tmp_path):
    long = "go " * planner.shape.usable_context
    data = read_mixture([written(tmp_path, [{"prompt": long + str(i)} for i in range(3)])])[0]
    with pytest.raises(RequestError, match=r"no prompt of .* leaves room .* \d+ tokens of context"):
        asked(planner, data, tmp_path / "a.jsonl", new_tokens=4)


def test_prompts_are_those_of_requests(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}T{{ tools | length }}{% endif %}"
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path / "tokenizer", template))
    bodies = [{"prompt": "x", "tools": [TOOL]}, {"prompt": "x", "tools": [TOOL], "tool_choice": "none"}]
    with Planner(FakeBackend(TEXT_SHAPE), tokenizer, [tokenizer.eos_token_id], fallback=False) as planner:
        for task, text in zip(read_tasks(written(tmp_path, bodies)).tasks, ("xT1", "x"), strict=True):
            assert tokenizer.decode(prompt_ids(Prompter(tokenizer), task)) == text
            assert planner.plan(task.asked, max_new_tokens=1, **task.options).prompt_tokens == len(text)


def test_a_file_cut_at_any_byte_of_its_last_lines_becomes_what_it_was(planner, data, tmp_path):
    whole = tmp_path / "whole.jsonl"
    asked(planner, data, whole, sampled=0)
    body, answers = whole.read_bytes(), read_answers(whole)
    cut = tmp_path / "cut.jsonl"
    two = body[:-1].rindex(b"\n", 0, body[:-1].rindex(b"\n")) + 1
    for end in range(two, len(body) + 1):
        cut.write_bytes(body[:end])
        kept = read_answers(cut)
        assert set(kept) <= set(answers)
        assert len(answers) - len(kept) == body.count(b"\n", end)
        if end % 50 == 0:
            asked(planner, data, cut, sampled=0)
            assert read_answers(cut) == answers
    for end in (0, 1, body.index(b"\n"), body.index(b"\n") + 1):  # inside the first line, and behind it
        cut.write_bytes(body[:end])
        asked(planner, data, cut, sampled=0)
        assert read_answers(cut) == answers


def test_a_killed_process_is_gone_on_with(data, tmp_path):
    with opened(tmp_path) as planner:
        asked(planner, data, tmp_path / "whole.jsonl")
        killed = tmp_path / "killed.jsonl"
        here = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path]
        child = subprocess.Popen([sys.executable, "-c", CHILD.format(path=here, module=__name__), str(tmp_path)])
        until = time.monotonic() + 60
        while not killed.exists() or killed.read_bytes().count(b"\n") < 4:
            assert child.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        whole = read_answers(tmp_path / "whole.jsonl")
        found = read_answers(killed)
        assert 3 <= len(found) < len(whole)
        asked(planner, data, killed)
        assert read_answers(killed) == whole


def test_what_is_there_is_not_asked_again(data, tmp_path):
    backend = FakeBackend(TEXT_SHAPE)
    with opened(tmp_path, backend) as planner:
        asked(planner, data, tmp_path / "a.jsonl")
        body, passes = (tmp_path / "a.jsonl").read_bytes(), len(backend.passes)
        assert asked(planner, data, tmp_path / "a.jsonl") == 0
        assert len(backend.passes) == passes
        assert (tmp_path / "a.jsonl").read_bytes() == body


def test_answers_to_other_data_are_refused_and_stay(planner, data, tmp_path):
    asked(planner, data, tmp_path / "a.jsonl")
    body = (tmp_path / "a.jsonl").read_bytes()
    changed = read_mixture([written(tmp_path, [*lines(), {"prompt": "one more"}])])[0]
    with pytest.raises(RequestError, match="has answers to other data"):
        asked(planner, changed, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == body


@pytest.mark.parametrize("line", ["{}", "[1]", "x", '{"task": 1, "prompt": [1], "tokens": "a"}'])
def test_a_damaged_line_is_named(planner, data, tmp_path, line):
    asked(planner, data, tmp_path / "a.jsonl", sampled=0)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(line + "\n")
    count = (tmp_path / "a.jsonl").read_bytes().count(b"\n")
    with pytest.raises(RequestError, match=f"line {count} is damaged"):
        read_answers(tmp_path / "a.jsonl")


def test_a_flipped_bit_of_an_answer_is_named_by_its_line(planner, data, tmp_path):
    path = tmp_path / "a.jsonl"
    asked(planner, data, path, sampled=0)
    first, line, *rest = path.read_bytes().splitlines(keepends=True)
    at = line.index(b"[", line.index(b'"tokens"')) + 1
    for place in (at, line.index(b'"task": ') + 8, line.index(b'"sha256": "') + 12):  # a digit becomes another one
        flipped = bytes((*line[:place], line[place] ^ 1, *line[place + 1 :]))
        path.write_bytes(b"".join((first, flipped, *rest)))
        with pytest.raises(RequestError, match="line 2 is damaged; remove it and run again"):
            read_answers(path)
    path.write_bytes(b"".join((first, *rest)))  # as it says
    assert asked(planner, data, path, sampled=0) > 0


def test_a_task_that_cannot_be_asked_is_named_and_the_others_stay(planner, tmp_path):
    bad = {"prompt": "b", "schema": {"type": "nothing"}}
    data = read_tasks(written(tmp_path, [*lines(), bad]))
    with pytest.raises(RequestError, match=rf"plans.jsonl: line {len(lines()) + 1}: "):
        asked(planner, data, tmp_path / "a.jsonl", sampled=0)
    assert read_answers(tmp_path / "a.jsonl")


def test_a_bundle_without_tokenizer_is_refused(data, tmp_path):
    with Planner(FakeBackend(TEXT_SHAPE), None) as planner, pytest.raises(RequestError, match="has no tokenizer"):
        asked(planner, data, tmp_path / "a.jsonl")
