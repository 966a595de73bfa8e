"""The card of a trained drafter: whether it is better than what the training began with."""

import shutil

import pytest
from cli_support import PAIR

from edge_dflash.builder.card import CardLengths
from edge_dflash.bundle.reader import Bundle
from edge_dflash.training.card import card_of
from edge_dflash.training.evaluate import Measure
from edge_dflash.training.trainer import TrainingState
from edge_dflash.training.workdir import TrainingRun


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
