"""Measures of a drafter on tasks: accept lengths, and the comparison with plain decoding, which finds a wrong token."""

import dataclasses
import json

import pytest
from fakes import TEXT_SHAPE, FakeBackend
from text_support import write_tokenizer
from training_support import SCHEMA

from calib import measure_acceptance
from edge_dflash.planner import Planner
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.training.data import read_tasks
from edge_dflash.training.evaluate import accepted, evaluate, ways


class Watched(Planner):
    """Remembers what it was asked; plain decoding of one task says something else, if it is to."""

    wrong = ""

    def plan(self, task, **options):
        plan = super().plan(task, **options)
        self.__dict__.setdefault("seen", []).append((task, options, plan))
        if options.get("speculative", True) or task != self.wrong:
            return plan
        return dataclasses.replace(plan, tokens=(*plan.tokens[:-1], plan.tokens[-1] ^ 1))


@pytest.fixture
def planner(tmp_path):
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path / "tokenizer"))
    backend = FakeBackend(TEXT_SHAPE, right=lambda position: 2)
    with Watched(backend, tokenizer, [tokenizer.eos_token_id], fallback=False) as planner:
        yield planner


def tasks_of(folder, *bodies):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return read_tasks(path).tasks


def test_figures_of_verifies():
    found = accepted([(3, 1, 2), (), (1, 4)])
    assert (found.tokens, found.cycles, found.mean) == (11, 5, 2.2)
    assert found.by_position == (3 / 5, 2 / 4, 1 / 3)
    assert accepted([]).mean == 0.0


def test_free_tasks_are_answered_greedily_and_drawn(planner, tmp_path):
    tasks, told = tasks_of(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"}), []
    found = evaluate(planner, tasks, new_tokens=13, plain=2, progress=lambda *step: told.append(step))
    assert tuple(found) == ways(tasks) == ("greedy", "sampled")
    for one in found.values():
        assert (one.compared, one.equal) == (2, 2)
        assert one.tokens_per_second > 0
        assert one.plain_tokens_per_second > 0
    assert found["greedy"].accept_length == 3.0
    assert found["greedy"].acceptance == (1.0, 1.0)
    assert found["greedy"].tokens == 39
    assert told == [("evaluation", done, 10) for done in range(1, 11)]
    assert {options["temperature"] for _, options, _ in planner.seen} == {0.0, 0.7}


def test_a_wrong_token_of_plain_decoding_is_found(planner, tmp_path):
    tasks = tasks_of(tmp_path, *({"prompt": text} for text in "abc"))
    planner.wrong = "b"
    found = evaluate(planner, tasks, new_tokens=13, plain=3)
    assert {(one.compared, one.equal) for one in found.values()} == {(3, 2)}
    found = evaluate(planner, tasks, new_tokens=13, plain=1)
    assert {(one.compared, one.equal) for one in found.values()} == {(1, 1)}


@pytest.mark.parametrize("form", [{"schema": SCHEMA}, {"regex": r'\{"do":"[ab]"\}'}])
def test_tasks_of_a_form_are_answered_in_it_and_free(planner, tmp_path, form):
    tasks = tasks_of(tmp_path, {"prompt": "a", **form}, {"prompt": "b"})
    found = evaluate(planner, tasks, new_tokens=40, plain=1)
    assert tuple(found) == ("greedy", "sampled", "greedy, schema", "sampled, schema")
    assert {one.equal for one in found.values()} == {1}
    shaped = [plan for _, options, plan in planner.seen if set(form) & set(options)]
    free = [plan for task, options, plan in planner.seen if task == "a" and not set(form) & set(options)]
    assert len(shaped) == len(free) == 4
    assert {plan.text for plan in shaped} <= {'{"do":"a"}', '{"do":"b"}'}
    assert not {plan.text for plan in free} & {'{"do":"a"}', '{"do":"b"}'}


def test_the_context_cuts_answers_and_leaves_out_longer_prompts(planner, tmp_path):
    usable = planner.shape.usable_context
    tasks = tasks_of(tmp_path, *({"prompt": "x" * count, "raw": True} for count in (usable + 9, usable - 5, 10)))
    found = evaluate(planner, tasks, new_tokens=20, plain=2)
    assert found["greedy"].tokens == 5 + 20
    assert (found["greedy"].compared, found["greedy"].equal) == (2, 2)


def test_a_bundle_is_measured_and_the_script_prints_it(demo_bundle, tmp_path, monkeypatch, capsys):
    tasks = tasks_of(tmp_path, {"prompt": "Bring the mug."}, {"prompt": "Open the door."})
    with Planner.open(demo_bundle, fallback=False, self_test="off") as planner:
        found = evaluate(planner, tasks, new_tokens=6, plain=1)
    assert {(one.compared, one.equal) for one in found.values()} == {(1, 1)}
    path = tmp_path / "tasks.jsonl"
    monkeypatch.setattr("sys.argv", ["measure", str(demo_bundle), str(path), "--new-tokens", "6", "--plain", "1"])
    measure_acceptance.main()
    printed = json.loads(capsys.readouterr().out)
    assert printed["tasks"] == 2
    assert printed["greedy"]["accept_length"] == found["greedy"].accept_length
    assert printed["sampled"]["equal"] == 1
