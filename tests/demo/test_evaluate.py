import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import edge_dflash.demo
from calib.demo import evaluate as module
from calib.demo.corpus import heldout_keys, task_key, tasks
from calib.demo.evaluate import Answer, evaluate, heldout_tasks, planner_generate
from calib.demo.tokenizer import MASK_ID, train_tokenizer
from edge_dflash.errors import BundleError
from edge_dflash.model.registry import read_pair

MODELS = Path(edge_dflash.demo.__file__).parent / "models"


def test_right_answers_have_full_marks():
    shown = heldout_tasks()[:5]
    right = {str(task.messages): task.answer for task in shown}
    quality = evaluate(lambda messages: Answer(right[str(messages)], (4, 2)), shown, log=lambda line: None)
    assert (quality.tasks, quality.valid, quality.success, quality.equal) == (5, 1.0, 1.0, 1.0)
    assert quality.accept_length == 3.0
    assert quality.acceptance == (1.0, 1.0, 1.0)  # the verify of 2 had no more to commit


def test_wrong_answers_are_counted_and_told():
    lines = []
    shown = heldout_tasks()[:4]
    said = iter([shown[0].answer, "no", '{"goal":"","steps":[],"notes":""}', shown[3].answer + " "])
    quality = evaluate(lambda messages: Answer(next(said)), shown, log=lines.append)
    assert (quality.valid, quality.success, quality.equal) == (0.75, 0.5, 0.25)
    assert quality.accept_length == 0.0
    assert [line.split("-> ")[1].split(":")[0] for line in lines] == ["done", "invalid", "misses", "done"]


def test_a_planner_is_asked_with_the_messages():
    class Plan:
        text, accept_lengths = None, (2,)

    class Planner:
        def plan(self, messages, **options):
            self.seen = (messages, options["speculative"])
            return Plan()

    planner = Planner()
    assert planner_generate(planner, speculative=False)([{"role": "user", "content": "x"}]) == Answer("", (2,))
    assert planner.seen == ([{"role": "user", "content": "x"}], False)


def test_a_path_that_is_no_bundle_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["evaluate", str(tmp_path / "none")])
    with pytest.raises(BundleError):
        module.main()


def test_shipped_tasks_are_those_of_the_generator():
    assert heldout_tasks() == tuple(tasks("heldout", 0, 64))
    assert {task_key(task) for task in heldout_tasks()} <= heldout_keys()


def test_shipped_tokenizer_is_what_training_makes():
    shipped = Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))
    assert shipped.to_str() == train_tokenizer().to_str()


def test_shipped_models_belong_together_and_are_small():
    pair = read_pair(MODELS / "target", MODELS / "drafter")
    assert pair.drafter.mask_token_id == MASK_ID
    assert len(pair.drafter.target_layer_ids) != pair.drafter.num_layers
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= 24e6
