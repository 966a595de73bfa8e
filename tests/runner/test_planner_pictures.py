"""Prompts that end in a picture, and sessions that end in the tower. The task's ids are given."""

import threading

import pytest
from golden_pairs import ENGINE, backend
from pictures_support import mixed, picture

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.gaze import SeenStore
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError
from edge_dflash.planner import Planner
from edge_dflash.text.prompt import Prompt, Prompter

FRAME, OTHER = picture(0), picture(1)
TWO = mixed([3, 1, 4], FRAME, [9], OTHER, [2, 6])
LAST = mixed([3, 1, 4], OTHER)
TEXT = mixed([7, 7, 3, 5])
DRAWN = {"max_new_tokens": 9, "temperature": 2.0, "seed": 5}


class Showing(Prompter):
    """Gives ids the pictures that they have in one of the prompts above."""

    def prompt(self, task, options, known=None, check=None):
        said = next(one for one in (TWO, LAST, TEXT) if one.ids == tuple(task))
        return Prompt(said.ids, pictures=said.pictures)


class Eyes(Delegate):
    """Counts the tower's passes, which wait until they may go; and fails when it is told to."""

    def __init__(self, **options):
        super().__init__(backend("vision", ENGINE, prefill_chunk=8, **options))
        self.towers, self.broken = 0, None
        self.inside, self.go = threading.Event(), threading.Event()
        self.go.set()

    def see(self, picture):
        self.inside.set()
        assert self.go.wait(60)
        if self.broken is not None:
            raise self.broken
        self.towers += 1
        return super().see(picture)


@pytest.fixture
def eyes():
    return Eyes(lanes=3)


@pytest.fixture
def planner(eyes):
    with Planner(eyes, None) as opened:
        opened._preparer.prompter = Showing(None)
        yield opened


def alone(said, **options):
    return generate(backend("vision", ENGINE), said.ids, Options(**options), pictures=said.pictures).tokens


@pytest.mark.parametrize("room", [True, False])
def test_candidates_of_a_prompt_that_ends_in_a_picture(planner, eyes, room):
    """Each of them computes its last row, for which the picture has to be there again."""
    if not room:
        planner._engine.manager.seen = SeenStore(0)
    streams = planner.streams(LAST.ids, 3, **DRAWN)
    assert [one.plan.tokens for one in streams] == [alone(LAST, **DRAWN | {"seed": seed}) for seed in (5, 6, 7)]
    assert eyes.towers == (1 if room else 4)


def test_a_session_that_is_cancelled_in_the_tower_is_as_it_was(planner, eyes):
    with planner.session() as session:
        first = session.plan(TEXT.ids, max_new_tokens=4)
        before = session.tokens
        eyes.go.clear()
        eyes.inside.clear()
        stream = session.stream(TWO.ids, max_new_tokens=4)
        assert eyes.inside.wait(60)
        stream.cancel()
        eyes.go.set()
        assert stream.plan.finish_reason == "cancelled"
        assert stream.plan.tokens == ()
        assert eyes.towers == 1
        assert session.tokens == before
        eyes.broken = BackendError("the tower failed")
        with pytest.raises(BackendError, match="the tower failed"):
            session.plan(TWO.ids, max_new_tokens=4)
        assert session.tokens == before
        eyes.broken = None
        assert session.plan(TWO.ids, max_new_tokens=4).tokens == alone(TWO, max_new_tokens=4)
        assert first.tokens == alone(TEXT, max_new_tokens=4)
