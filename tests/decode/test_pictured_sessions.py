"""Pictures in sessions: the same frame is found again, another pixel is not, and nothing of it changes a bit."""

from __future__ import annotations

import ast
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from fakes import SHAPE, FakeBackend
from golden_pairs import ENGINE, backend, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT
from pictures_support import IMAGE, ask, changed, filled, mixed, noise, picture
from session_support import forked, state_of, warm

from edge_dflash.decode.controls import Controls, Pace
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.gaze import SeenStore
from edge_dflash.decode.generation import collect
from edge_dflash.decode.loop import decode_steps
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.saved import SessionState, adopt
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore, Reuse
from edge_dflash.errors import BackendError, RequestError
from edge_dflash.pictures.pictured import Pictured, Placed
from tests.decode.test_sessions import Watched

FRAME, OTHER = picture(0), picture(2)
SYSTEM, ASKED, NEXT = [3, 1, 4, 1], [5, 9], [2, 6, 5]
FEW = Options(max_new_tokens=6)
EYES = replace(SHAPE, image_token_id=IMAGE, vocab_size=192, max_context=160)


class Eyes(Delegate):
    """Notes what is computed; ``broken`` is raised by the tower, after so many passes of it."""

    def __init__(self, inner=None, broken=None, passes=0):
        super().__init__(inner or backend("vision", ENGINE, prefill_chunk=5))
        self.towers, self.rows, self.broken, self.passes = 0, 0, broken, passes

    def see(self, picture):
        if self.broken is not None and self.towers == self.passes:
            raise self.broken
        self.towers += 1
        return super().see(picture)

    def prefill(self, ids, lane=0, sight=None):
        self.rows += len(ids)
        return super().prefill(ids, lane, sight)

    def done(self):
        """Towers and rows since the last time."""
        found = self.towers, self.rows
        self.towers = self.rows = 0
        return found


def tokens(session, said, options=FEW, **more):
    return collect(list(ask(session, said, options, **more))).tokens


def going_on(session, *parts):
    """A prompt that goes on from a session."""
    more, offset = mixed(*parts), len(session.tokens)
    placed = tuple(Placed(offset + one.at, one.picture) for one in more.pictures)
    return Pictured((*session.tokens, *more.ids), (*session.pictures, *placed))


def test_a_session_goes_on_behind_its_pictures_and_another_pixel_begins_anew():
    eyes = Eyes()
    manager = SessionManager(eyes)
    session, said = manager.open(), mixed(SYSTEM, FRAME, ASKED)
    tokens(session, said)
    assert eyes.done() == (1, 12)
    assert session.pictures == said.pictures
    held = len(session.tokens) - 1
    more = going_on(session, [7], OTHER, NEXT)
    tokens(session, more)
    assert session.reuse == Reuse(held, "session")
    assert eyes.done() == (1, len(more.ids) - held)
    assert (manager.seen.stats.hits, manager.seen.stats.misses) == (0, 2)
    for frame, reused in ((changed(OTHER), 0), (OTHER, 0)):  # the state of the second one is gone, its rows are not
        pictures = (*more.pictures[:1], Placed(more.pictures[1].at, frame))
        tokens(session, replace(more, pictures=pictures))
        assert session.reuse.tokens == reused
    assert eyes.done() == (1, 2 * len(more.ids))
    assert (manager.seen.stats.hits, manager.seen.stats.misses) == (3, 3)


def test_prefixes_end_anywhere_and_are_found_by_what_the_pictures_show():
    eyes = Eyes()
    manager = SessionManager(eyes, store=PrefixStore(1 << 24))
    said, other = mixed(SYSTEM, FRAME, ASKED), mixed(SYSTEM, changed(FRAME), ASKED)
    cold = tokens(manager.open(), said, keep=(4, 7, 10))  # before it, inside it, behind it
    for length in (4, 7, 10):
        assert said.identities[:length] in manager.store
        assert (other.identities[:length] in manager.store) == (length == 4)
    eyes.done()
    found = manager.open()
    assert tokens(found, said) == cold
    assert (found.reuse, eyes.done()) == (Reuse(10, "store"), (0, 2))
    found = manager.open()
    tokens(found, other)
    assert (found.reuse, eyes.done()) == (Reuse(4, "store"), (1, 8))
    inside = manager.open()
    tokens(inside, mixed(SYSTEM, FRAME, NEXT).until(12))
    assert inside.reuse.tokens == 10
    placeholders = manager.open()
    tokens(placeholders, Pictured(said.ids))  # the ids alone are a text
    assert placeholders.reuse == Reuse(4, "store")
    assert manager.store.stats.misses == 1


@pytest.mark.parametrize("chunk", [4, 512])
def test_cold_is_warm_bit_for_bit(chunk):
    said, options = mixed(SYSTEM, FRAME, ASKED, OTHER, FRAME, NEXT), Options(max_new_tokens=9, logprobs=3)
    made = []
    managers = [
        SessionManager(backend("vision", ENGINE, prefill_chunk=chunk), store=PrefixStore(1 << 24)) for _ in "ab"
    ]
    for keep, manager in (((), managers[0]), ((12,), managers[1]), ((), managers[1]), ((), managers[1])):
        session = manager.open()
        steps = list(ask(session, said, options, keep=keep))
        logprobs = [one for step in steps for one in step.logprobs]
        made.append((collect(steps).tokens, logprobs, state_of(session).snapshot))
    assert all(one[:2] == made[0][:2] for one in made)
    assert all(same_bits(one[2], made[0][2]) for one in made)
    assert managers[1].store.stats.hits == 2
    assert managers[1].seen.stats.hits == 1 + 2 * 2  # the frame that is there twice; behind the prefix both are left


def test_without_room_every_picture_is_seen_once_a_request():
    said, eyes = mixed(SYSTEM, FRAME, ASKED, OTHER, NEXT), Eyes()
    roomy, tight = SessionManager(eyes), SessionManager(eyes)
    tight.seen = SeenStore(0)
    wanted = tokens(roomy.open(), said)
    eyes.done()
    assert tokens(tight.open(), said) == wanted
    assert eyes.done() == (2, len(said.ids))  # not once a chunk
    assert tokens(roomy.open(), said) == wanted
    assert eyes.done() == (0, len(said.ids))


def test_a_lost_state_is_computed_again_with_its_pictures():
    eyes = Eyes()
    manager = SessionManager(eyes)
    manager.seen = SeenStore(0)
    session = manager.open()
    tokens(session, mixed(SYSTEM, FRAME, ASKED, OTHER, NEXT))
    state = state_of(session)
    session.snapshot = None
    manager.failed(BackendError("a pass failed"))
    eyes.done()
    again = state_of(session)
    assert same_bits(again.snapshot, state.snapshot)
    assert eyes.done() == (2, len(session.tokens) - 1)
    assert SessionState(state.tokens, state.snapshot, "", pictures=state.pictures) == state
    with pytest.raises(RequestError, match="snapshot has delta -6, its images make -3"):
        replace(state, pictures=state.pictures[:1])
    with pytest.raises(RequestError, match=r"image 1 has 6 rows from token 5 on"):
        adopt(manager, replace(state, pictures=(Placed(5, FRAME), state.pictures[1])))


# the tower's passes --------------------------------------------------------------------------------------------------


def test_a_failed_tower_loses_nothing():
    eyes = Eyes(backend("vision", ENGINE, prefill_chunk=5, lanes=2))
    manager = SessionManager(eyes)
    sessions = [manager.open() for _ in range(2)]
    for session, frame in zip(sessions, (FRAME, OTHER), strict=True):
        tokens(session, mixed(SYSTEM, frame, ASKED))
    before = [(session.tokens, session.pictures) for session in sessions]
    held = len(sessions[0].tokens) - 1
    broken = going_on(sessions[0], noise(1), NEXT, noise(2))
    eyes.done()
    eyes.broken, eyes.passes = BackendError("the tower failed"), 1  # its second pass, after chunks of the prompt
    with pytest.raises(BackendError, match="the tower failed"):
        tokens(sessions[0], broken)
    assert [(session.tokens, session.pictures) for session in sessions] == before
    assert manager.lanes.of(sessions[1]) is not None  # the other lane has its state
    eyes.broken = None
    assert eyes.done()[0] == 1
    tokens(sessions[1], going_on(sessions[1], NEXT))
    assert sessions[1].reuse.source == "session"
    tokens(sessions[0], broken)
    assert sessions[0].reuse.tokens >= held  # what was computed of the prompt is of use
    assert manager.seen.stats.misses == 4
    manager.failed(BackendError("a pass of a lane failed"))
    assert [manager.lanes.of(session) for session in sessions] == [None, None]


@pytest.mark.parametrize("asked", range(6))
def test_cancelling_is_asked_before_each_pass_of_the_tower(asked):
    eyes, said = Eyes(FakeBackend(EYES)), mixed(FRAME, OTHER, [1])  # chunks of 8: two towers, a chunk, a chunk
    manager = SessionManager(eyes)
    session, left = manager.open(), iter([False] * asked)
    steps = list(ask(session, said, FEW, Controls(cancelled=lambda: next(left, True))))
    assert (eyes.towers, eyes.rows) == [(0, 0), (1, 0), (2, 0), (2, 8), (2, 13), (2, 13)][asked]
    assert steps[-1].finish_reason == "cancelled"
    assert sum(step.chunk for step in steps) == min(asked, 3)
    eyes.done()
    assert tokens(session, said) == tokens(SessionManager(FakeBackend(EYES)).open(), said)
    assert eyes.towers == max(0, 2 - asked)  # what was seen is kept


def test_a_deadline_that_the_tower_would_miss_refuses_it():
    eyes, pace = Eyes(FakeBackend(EYES)), Pace()
    manager = SessionManager(eyes)
    pace.towers.append(6, 6.0)  # 1 s a row
    for left, reason, towers in ((60.0, "length", 2), (10.0, "length", 0), (0.0, "deadline", 0)):
        controls = Controls(deadline=time.perf_counter() + left, pace=pace)
        steps = list(ask(manager.open(), mixed(FRAME, OTHER, [1]), FEW, controls))
        assert (steps[-1].finish_reason, eyes.done()[0]) == (reason, towers)
    pace.towers.append(6, 6.0)
    pace.towers.append(6, 6.0)
    controls = Controls(deadline=time.perf_counter() + 10.0, pace=pace)
    steps = list(ask(manager.open(), mixed(noise(1), noise(2), noise(3), [1]), FEW, controls))  # 12 rows: 12 s
    assert (steps[-1].finish_reason, eyes.towers) == ("deadline", 0)


@pytest.mark.parametrize("lost", [False, True])
def test_others_may_use_the_lane_while_pictures_are_seen(lost):
    eyes = Eyes(FakeBackend(EYES))
    manager = SessionManager(eyes)
    session, other = manager.open(), manager.open()
    tokens(session, mixed(SYSTEM, FRAME, ASKED))
    more = going_on(session, OTHER, NEXT)
    alone = FakeBackend(EYES)
    wanted = tokens(SessionManager(alone).open(), more)
    run = decode_steps(session, admit(eyes.shape, more.ids, FEW, pictures=more.pictures))
    assert next(run).chunk  # the tower ran, and no chunk
    tokens(other, mixed(NEXT, FRAME))
    if lost:
        session.snapshot = None
    found = []
    for step in run:
        cycle = step
        while not hasattr(cycle, "tokens"):
            cycle = run.send(eyes.cycle(cycle))
        found += cycle.tokens
    assert tuple(found) == wanted
    assert session.reuse.source == ("nothing" if lost else "session")


# any history ---------------------------------------------------------------------------------------------------------

FRAMES = [noise(seed, grid) for seed, grid in enumerate([(2, 2), (2, 4), (4, 4)])]
PASSES = ("prefill", "propose", "verify", "commit")
OPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # which session
        st.sampled_from(["append", "part", "fork", "adopt", "fail", "blind", "close", "vacate", "warm", "lose"]),
        st.integers(0, 30),  # where to part, what to say and to show
        st.integers(1, 6),  # steps to take
    ),
    max_size=25,
)


def said_next(session, op, number):
    """What a session has, or the first part of it, and a frame or a word more."""
    length = len(session.tokens)
    if op == "part":
        length = min(number, length)
        length = next((one.end for one in session.pictures if one.at < length < one.end), length)
    kept = Pictured(session.tokens, session.pictures).until(length)
    frames = [FRAMES[number % 3]] if number % 2 else []
    more = mixed(*frames, [number])
    placed = tuple(Placed(length + one.at, one.picture) for one in more.pictures)
    return Pictured((*kept.ids, *more.ids), (*kept.pictures, *placed))


@settings(max_examples=100)
@given(OPS, st.sampled_from([0, 300, 5000]), st.sampled_from([0, 1500, 1 << 20]))
def test_any_history_of_sessions_gives_the_toy_targets_own_tokens(ops, store, seen):
    """The toy target's next token depends on all tokens, pictures and the delta: a wrong state shows at once."""
    watched = Watched(FakeBackend(EYES, right=lambda position: position % 4))
    eyes = Eyes(watched)
    manager = SessionManager(eyes, "bundle", store=PrefixStore(store))
    manager.seen = SeenStore(seen)
    sessions = [manager.open() for _ in range(3)]
    for who, op, number, steps in ops:
        session = sessions[who]
        before = session.tokens, session.pictures
        if op == "fork":
            sessions[(who + number) % 3] = forked(session)
        elif op == "adopt":
            sessions[who] = adopt(manager, state_of(session))
        elif op == "close":
            session.close()
            sessions[who] = manager.open()
        elif op == "vacate":
            manager.lanes.evict_all()
        elif op == "lose":
            manager.release(session)
        elif op == "warm":
            warm(manager, (*session.tokens[: number + 1], number))
        elif len((said := said_next(session, op, number)).ids) < 120:
            if op == "fail":
                watched.fail_at = (PASSES[number % 4], steps - 1, RuntimeError())
            elif op == "blind":
                eyes.broken, eyes.passes = RuntimeError(), eyes.towers + steps // 4
            keep, new = (number,) if 0 < number < len(said.ids) else (), ()
            with suppress(RuntimeError):
                for _, step in zip(range(steps), ask(session, said, FEW, keep=keep), strict=False):
                    new += step.tokens
            eyes.broken = watched.fail_at = None
            assert (session.tokens, session.pictures) == ((said.ids + new, said.pictures) if new else before)
            toy = tokens(SessionManager(FakeBackend(EYES)).open(), said)
            assert new == toy[: len(new)]
        assert manager.store.stats.bytes <= store
        for other in sessions if number % 2 else ():
            if other.tokens:
                fresh = FakeBackend(EYES)
                filled(fresh, Pictured(other.tokens, other.pictures).until(len(other.tokens) - 1))
                assert same_bits(state_of(other).snapshot, fresh.snapshot())


def test_no_backend_or_wrapper_loses_what_a_chunk_shows():
    """Whoever takes over a prefill takes its sight."""
    found = 0
    for path in (*(ROOT / "edge_dflash").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        if "def prefill(self, ids" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.name == "prefill":
                names = [one.arg for one in node.args.args]
                if "ids" in names:
                    assert names == ["self", "ids", "lane", "sight"], path
                    found += ast.unparse(node).count("sight") > 1
    assert found > 15
