from pathlib import Path

from tokenizers import Tokenizer

import edge_dflash.demo
from calib.demo.corpus import heldout_keys, task_key, tasks
from calib.demo.evaluate import Answer, evaluate, heldout_tasks
from calib.demo.tokenizer import MASK_ID, train_tokenizer
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
