"""The card of a trained drafter: whether it is better than what the training began with."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cli_support import PAIR

from edge_dflash.builder.card import CardCheck, CardLengths
from edge_dflash.bundle.reader import Bundle
from edge_dflash.training.evaluate import Measure, card_of, warnings
from edge_dflash.training.settings import TrainingRun
from edge_dflash.training.workdir import TrainingState

CHECKS = (CardCheck((1, 2), (3, 4)),)


@pytest.fixture
def card(golden, ids_bundle, tmp_path):
    """``card(begun, measures)``: of a training that began with a drafter's ``begun``, and accept lengths by name."""
    target, drafter = (golden / name for name in PAIR)

    def made(begun, **measures):
        start = None if begun == "nothing" else tmp_path / begun
        if begun == "weights":
            shutil.copytree(drafter, start)
        elif begun == "sizes":
            start.mkdir()
            shutil.copyfile(drafter / "config.json", start / "config.json")
        run = TrainingRun(target=target, data=(), output=tmp_path / "out", drafter=start)
        found = {name.replace("_", ", "): Measure(one, (), 9, 9.0, None, 0, 0) for name, one in measures.items()}
        return card_of(run, ids_bundle, Bundle.open(ids_bundle), (), (), TrainingState(), found)

    return made


@pytest.mark.parametrize(
    ("begun", "after", "better"),
    [
        ("weights", 2.9, False),
        ("weights", 3.0, True),
        ("weights", 3.1, True),
        ("sizes", 2.9, True),
        ("sizes", 3.1, True),
        ("nothing", 2.9, True),
    ],
)
def test_a_drafter_is_worse_only_than_one_that_somebody_trained(card, begun, after, better):
    found = card(begun, before_greedy=3.0, after_greedy=after)
    assert found.better is better
    assert found.accept_length == CardLengths(3.0 if begun == "weights" else None, after)


@pytest.mark.parametrize(("after", "better"), [((9.0, 2.9), False), ((1.0, 3.1), True)])
def test_answers_of_the_schema_decide_where_tasks_have_one(card, after, better):
    found = card(
        "weights", before_greedy=3.0, before_greedy_schema=3.0, after_greedy=after[0], after_greedy_schema=after[1]
    )
    assert found.better is better
    assert found.accept_length == CardLengths(3.0, after[1])


def measured(accept_length):
    return {"accept_length": accept_length, "compared": 8.0, "equal": 8.0}


def test_what_a_drafter_lacks_is_said(card):
    better = replace(card("weights", before_greedy=3.0, after_greedy=3.1), best_step=7, checks=CHECKS)

    def said(**changes):
        return list(warnings(replace(better, **changes), Path("out")))

    assert said() == []
    for words, changes in {
        "worse than its start on the held-out prompts; it is kept in out": {"better": False},
        "no step was better than the start": {"best_step": 0},
        "accept length 1.10: the drafter has learnt little": {"accept_length": CardLengths(None, 1.1)},
        "which is a defect: report it": {"measures": {"after, greedy": measured(3.1) | {"equal": 7.0}}},
        "greedy: accept length fell from 3.00 to 2.60": {
            "measures": {"before, greedy": measured(3.0), "after, greedy": measured(2.6)}
        },
        "card.json has 0 free answers, of accept length 0.00": {"checks": ()},
    }.items():
        (line,) = said(**changes)
        assert words in line
