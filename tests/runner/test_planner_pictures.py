"""Requests with pictures through the planner: alone, as candidates, in lanes and sessions. The task's ids are given."""

import threading

import pytest
from golden_pairs import ENGINE, backend
from pictures_support import mixed, picture

from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.gaze import SeenStore
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.planner import Planner
from edge_dflash.text.prompt import Prompt, Prompter

FRAME, OTHER = picture(0), picture(1)
SAID = mixed([3, 1, 4], FRAME, [1, 5])
TWO = mixed([3, 1, 4], FRAME, [9], OTHER, [2, 6])
LAST = mixed([3, 1, 4], OTHER)
TEXT = mixed([7, 7, 3, 5])
DRAWN = {"max_new_tokens": 9, "temperature": 2.0, "seed": 5}


class Showing(Prompter):
    """Gives ids the pictures that they have in one of the prompts above."""

    def prompt(self, task, options, known=None, check=None):
        if known and known.tokens and tuple(task) not in (SAID.ids, TWO.ids):
            return super().prompt(task, options, known)
        said = next(one for one in (SAID, TWO, LAST, TEXT) if one.ids == tuple(task))
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


def test_a_plan_is_what_the_loop_makes_and_the_same_frame_is_seen_once(planner, eyes):
    for said in (SAID, TWO, TEXT, TWO):
        assert planner.plan(said.ids, max_new_tokens=9).tokens == alone(said, max_new_tokens=9)
    assert eyes.towers == 2
    assert (planner.pictures.hits, planner.pictures.misses, planner.pictures.entries) == (3, 2, 2)
    assert planner.pictures.bytes == (6 + 7) * 64 * 4


def test_candidates_share_the_prompt_and_have_the_tokens_that_they_have_alone(planner, eyes):
    plan = planner.plan(TWO.ids, n=3, **DRAWN)
    found = sorted((one.seed, one.tokens) for one in (plan, *plan.alternatives))
    assert found == [(seed, alone(TWO, **DRAWN | {"seed": seed})) for seed in (5, 6, 7)]
    assert eyes.towers == 2


@pytest.mark.parametrize("room", [True, False])
def test_candidates_of_a_prompt_that_ends_in_a_picture(planner, eyes, room):
    """Each of them computes its last row, for which the picture has to be there again."""
    if not room:
        planner._engine.manager.seen = SeenStore(0)
    streams = planner.streams(LAST.ids, 3, **DRAWN)
    assert [one.plan.tokens for one in streams] == [alone(LAST, **DRAWN | {"seed": seed}) for seed in (5, 6, 7)]
    assert eyes.towers == (1 if room else 4)


def test_lanes_with_pictures_beside_text(planner):
    asked = [(TEXT, {"max_new_tokens": 30}), (SAID, DRAWN), (TWO, {"max_new_tokens": 12})]
    streams = [planner.stream(said.ids, **options) for said, options in asked]
    assert [stream.plan.tokens for stream in streams] == [alone(said, **options) for said, options in asked]


def test_a_session_keeps_its_pictures_over_turns_forks_and_files(planner, eyes, tmp_path):
    with planner.session() as session:
        session.plan(TWO.ids, max_new_tokens=6)
        held = len(session.tokens) - 1
        session.save(tmp_path / "s")
        other, loaded = session.fork(), planner.load_session(tmp_path / "s")
        plans = [one.plan([8, 8], max_new_tokens=6) for one in (session, other, loaded)]
        assert len({plan.tokens for plan in plans}) == 1
        assert [plan.reused_tokens for plan in plans] == [held] * 3
        assert [one._state.pictures for one in (session, other)] == [TWO.pictures] * 2
        assert [one.key for one in loaded._state.pictures] == [one.key for one in TWO.pictures]
    assert eyes.towers == 2


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


def test_a_target_without_a_tower_refuses_pictures_by_name():
    with Planner(backend("qwen3_5"), None) as opened:
        opened._preparer.prompter = Showing(None)
        with pytest.raises(RequestError, match=r"images \(1\), and this target has no vision tower"):
            opened.plan(SAID.ids)
