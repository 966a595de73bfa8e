"""Tasks of the harbour: the same every time, their answers right, wrong ones found."""

import json

import pytest

from calib.harbour import HELDOUT, TRAIN, HarbourTask, harbour_tasks, order_problems, right_answer
from calib.harbour import write_tasks as write


def changed(task: HarbourTask, **changes) -> str:
    return json.dumps(json.loads(right_answer(task)) | changes)


def test_right_answers_have_no_problems_and_splits_share_no_task():
    train, heldout = list(harbour_tasks("train")), list(harbour_tasks("heldout"))
    assert (len(train), len(heldout)) == (TRAIN, HELDOUT)
    assert not [task.seed for task in train + heldout if order_problems(task, right_answer(task))]
    texts = {json.dumps(task.messages) for task in train}
    assert not texts & {json.dumps(task.messages) for task in heldout}
    stays = [task for task in train if json.loads(right_answer(task))["stays"]]
    assert 0.1 < len(stays) / len(train) < 0.6


def test_wrong_orders_are_found():
    task = next(task for task in harbour_tasks("train") if json.loads(right_answer(task))["moves"])
    order = json.loads(right_answer(task))
    first, *rest = order["moves"]
    for text, words in (
        ("lift it", "no JSON"),
        (changed(task, more=1), "unknown key"),
        (changed(task, ship="Nowhere"), "ship is"),
        (changed(task, moves=rest), "is missing"),
        (changed(task, moves=[*order["moves"], first]), "is there twice"),
        (changed(task, tonnes=-1), "tonnes is"),
        (changed(task, moves=[first | {"crane": "Q9"}, *rest]), "does not lift"),
        (changed(task, moves=[first | {"truck": "T99"}, *rest]), "is no truck"),
        (changed(task, moves=[first | {"from": "B9"}, *rest]), "is at"),
        (changed(task, moves=[first | {"tier": 9}, *rest]), "tier of"),
        (changed(task, moves=[first | {"to": "B9"}, *rest]), "B9"),
        (
            changed(task, moves=rest, stays=[*order["stays"], {"unit": first["unit"], "because": "too heavy"}]),
            "need not stay",
        ),
    ):
        assert any(words in problem for problem in order_problems(task, text)), text


@pytest.mark.parametrize("answers", [True, False])
def test_files_hold_prompt_and_schema_and_answers_if_asked(tmp_path, answers):
    assert write(tmp_path, answers=answers) == {"train": TRAIN, "heldout": HELDOUT}
    line = json.loads((tmp_path / "heldout.jsonl").read_text().splitlines()[0])
    assert set(line) == {"messages", "schema"} | ({"answer"} if answers else set())
