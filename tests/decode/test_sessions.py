"""Sessions against unbroken runs: same tokens, same accept lengths, same state bits, whatever happens in between."""

from __future__ import annotations

import gc
import json
from functools import cache
from itertools import zip_longest

import pytest
from bundle_support import random_weights, write_bundle
from fakes import Grammar, Stepped
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits
from session_support import answer, forked, state_of, warm

from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.saved import SessionState, adopt
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore, Reuse
from edge_dflash.errors import BackendError, BundleError, ContextError, RequestError

PLENTY = 1 << 30
TURNS = ((7, 9), (3, 6), (11, 5))  # (new prompt tokens, answer tokens)


def prompt_of(name, which="p1"):
    return tuple(golden(name)[f"{which}.prompt"].tolist())


def user(turn, count):
    """What the user says in a turn: any ids will do."""
    return tuple((37 * turn + 11 * i) % 500 for i in range(count))


@cache
def unbroken(name, prompt, new, temperature=0.0, context=160):
    """Answer to a prompt on a backend of its own, and the state after it."""
    b = backend(name, ENGINE, context)
    result = generate(b, prompt, Options(max_new_tokens=new, temperature=temperature, seed=5))
    return result.tokens, result.accept_lengths, b.snapshot()


def manager_of(name, store=0):
    return SessionManager(backend(name, ENGINE), "bundle", store=PrefixStore(store))


def check(name, session, prompt, steps, temperature=0.0):
    """The finished steps, the session's tokens and its state are those of an unbroken run."""
    tokens, accept_lengths, state = unbroken(name, tuple(prompt), sum(len(s.tokens) for s in steps), temperature)
    assert tuple(t for step in steps for t in step.tokens) == tokens
    assert tuple(len(step.tokens) for step in steps if step.tokens)[1:] == accept_lengths
    assert session.tokens == (*prompt, *tokens)
    assert same_bits(state_of(session).snapshot, state)


def drain(stream, into):
    for step in stream:
        into.append(step)


class Watched(Delegate):
    """Counts what is computed, and fails when it is told to."""

    def __init__(self, inner):
        super().__init__(inner)
        self.prefilled = 0
        self.passes = 0
        self.restores = 0
        self.fail_at = None  # (name of the pass, how many of them to let through, the error)

    def _pass(self, name):
        self.passes += 1
        if self.fail_at is not None and self.fail_at[0] == name:
            _, left, error = self.fail_at
            self.fail_at = (name, left - 1, error) if left else None
            if not left:
                if not isinstance(error, RequestError):  # the pass was cut short: its state cannot be trusted
                    rows = self.length()
                    self._backend.reset()
                    self._backend.prefill([7] * rows)
                raise error

    def prefill(self, ids, lane=0, sight=None):
        rows = super().prefill(ids, lane, sight)  # the failure comes after the work: the worst moment
        self._pass("prefill")
        self.prefilled += len(ids)
        return rows

    def propose(self, anchor, lane=0):
        self._pass("propose")
        return super().propose(anchor, lane)

    def verify(self, ids, lane=0, parents=None):
        rows = super().verify(ids, lane)
        self._pass("verify")
        return rows

    def commit(self, rows, lane=0, path=None):
        super().commit(rows, lane, path)
        self._pass("commit")

    def restore(self, snapshot, lane=0):
        self.restores += 1
        super().restore(snapshot, lane)


def watched(name, store=0):
    b = Watched(backend(name, ENGINE))
    return b, SessionManager(b, "bundle", store=PrefixStore(store))


# turns, swaps, forks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_turns_go_on_where_the_last_ended(name, temperature):
    b, manager = watched(name)
    session, prompt = manager.open(), prompt_of(name)
    for turn, (more, new) in enumerate(TURNS):
        held = max(len(session.tokens) - 1, 0)
        stream = answer(session, prompt, Options(max_new_tokens=new, temperature=temperature, seed=5))
        steps = list(stream)
        assert session.reuse == Reuse(held, "session" if held else "nothing")
        assert b.length() == len(session.tokens) - 1  # the last token is the next anchor
        check(name, session, prompt, steps, temperature)
        prompt = (*session.tokens, *user(turn, more))
    assert b.prefilled == len(session.tokens) - sum(new for _, new in TURNS) + len(TURNS) - 1  # anchors once more
    assert b.restores == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0, 5, -2])
@pytest.mark.parametrize("more", [0, 1, 20])
def test_a_prompt_that_parts_from_what_is_held_is_computed_whole_however_long(name, at, more):
    """``at``: the token that differs, of those whose state is held; ``more``: tokens behind all that is held."""
    b, manager = watched(name)
    session = manager.open()
    list(answer(session, prompt_of(name), Options(max_new_tokens=9)))
    prompt = [*session.tokens, *user(1, more)]
    prompt[at if at >= 0 else len(session.tokens) + at] += -1 if prompt[at] else 1
    b.prefilled = 0
    steps = list(answer(session, prompt, Options(max_new_tokens=6)))
    assert session.reuse == Reuse(0, "nothing")
    assert b.prefilled == len(prompt)
    check(name, session, prompt, steps)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_take_turns_in_the_middle_of_their_answers(name):
    b, manager = watched(name)
    prompts = [prompt_of(name, which) for which in ("p0", "p1", "p2")]
    sessions = [manager.open() for _ in prompts]
    streams = [
        answer(session, prompt, Options(max_new_tokens=12)) for session, prompt in zip(sessions, prompts, strict=True)
    ]
    rounds = list(zip_longest(*streams))
    for session, prompt, steps in zip(sessions, prompts, zip(*rounds, strict=True), strict=True):
        check(name, session, prompt, [step for step in steps if step is not None])
    assert b.prefilled == sum(map(len, prompts))
    assert b.restores > 7


def test_the_state_stays_in_the_backend_until_the_place_is_needed():
    b, manager = watched("qwen3_5")
    one, other = manager.open(), manager.open()
    for turn in range(3):
        list(answer(one, (*(one.tokens or prompt_of("qwen3_5")), *user(turn, 3)), Options(max_new_tokens=4)))
    assert (b.restores, one.snapshot) == (0, None)
    list(answer(other, prompt_of("qwen3_5"), Options(max_new_tokens=4)))
    assert b.restores == 0
    assert one.snapshot is not None
    list(answer(one, one.tokens, Options(max_new_tokens=4)))
    assert b.restores == 1


@pytest.mark.parametrize("name", NAMES)
def test_forks_share_their_state_and_go_their_own_ways(name):
    b, manager = watched(name)
    trunk, prompt = manager.open(), prompt_of(name)
    list(answer(trunk, prompt, Options(max_new_tokens=10)))
    before = b.prefilled
    forks = [forked(trunk) for _ in range(2)]
    forks.append(forked(forks[0]))
    shared = state_of(trunk).snapshot
    assert all(state_of(fork).snapshot is shared for fork in forks)
    assert all(session.snapshot is shared for session in (trunk, *forks))
    for turn, session in enumerate([forks[2], trunk, forks[0], forks[1]]):
        longer = (*session.tokens, *user(turn, 4))
        check(name, session, longer, list(answer(session, longer, Options(max_new_tokens=6))))
    assert b.prefilled == before + 4 * 5
    assert len({session.tokens for session in (trunk, *forks)}) == 4


def test_snapshots_cannot_be_written():
    session = manager_of("qwen3_5").open()
    list(answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=3)))
    for array in state_of(session).snapshot.arrays.values():
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


# what ends early -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["cancelled", "left", "overtaken"])
def test_a_request_that_ends_early_leaves_the_session_at_its_last_step(name, way):
    b, manager = watched(name)
    session, prompt, seen = manager.open(), prompt_of(name), []
    controls = Controls(cancelled=lambda: way == "cancelled" and len(seen) >= 4)
    stream = answer(session, prompt, Options(max_new_tokens=30), controls=controls)
    for step in stream:
        seen.append(step)
        if len(seen) == 4 and way != "cancelled":
            break
    if way == "left":
        stream.close()
        assert list(stream) == []
    check(name, session, prompt, seen)
    assert b.length() == len(session.tokens) - 1
    before = b.prefilled
    longer = (*session.tokens, *user(1, 2))
    check(name, session, longer, list(answer(session, longer, Options(max_new_tokens=8))))
    assert b.prefilled == before + 3
    assert list(stream) == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_request_that_never_starts_touches_nothing(elsewhere):
    b, manager = watched("qwen3_5", PLENTY)
    session = manager.open()
    list(answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=9), keep=(5,)))
    if elsewhere:
        list(answer(manager.open(), user(1, 4), Options(max_new_tokens=2)))
    tokens, passes = session.tokens, b.passes
    for prompt in ((*tokens, 1), user(3, 9), (*tokens[:7], 9)):
        steps = list(answer(session, prompt, Options(max_new_tokens=5), controls=Controls(cancelled=lambda: True)))
        assert [(step.tokens, step.finish_reason) for step in steps] == [((), "cancelled")]
        answer(session, prompt, Options(max_new_tokens=5))  # asked for no step
    assert (session.tokens, b.passes, b.restores) == (tokens, passes, 0)


@pytest.mark.parametrize(
    ("name", "pass_", "after", "error"),
    [
        ("qwen3_5", "prefill", 0, BackendError("lost")),
        ("qwen3", "prefill", 0, RequestError("no")),
        ("qwen3", "propose", 1, KeyboardInterrupt()),
        ("qwen3_5", "verify", 1, RuntimeError("boom")),
        ("qwen3_5", "commit", 2, RequestError("no")),
        ("qwen3_5", "commit", 0, BackendError("lost")),
    ],
)
def test_a_failed_request_leaves_the_session_at_its_last_step(name, pass_, after, error):
    b, manager = watched(name)
    session, prompt = manager.open(), prompt_of(name)
    done = list(answer(session, prompt, Options(max_new_tokens=6)))
    longer, steps = (*session.tokens, *user(1, 4)), []
    stream = answer(session, longer, Options(max_new_tokens=20))
    b.fail_at = (pass_, after, error)
    with pytest.raises(type(error)):
        drain(stream, steps)
    assert list(stream) == []
    if steps:
        check(name, session, longer, steps)
    else:
        check(name, session, prompt, done)
    again = (*session.tokens, 3)
    check(name, session, again, list(answer(session, again, Options(max_new_tokens=4))))


class Broken(Grammar):
    def allowed(self):
        if len(self.path) > 3:
            raise RequestError("the grammar is too large")


def test_a_refusal_between_passes_costs_no_prefill():
    b, manager = watched("qwen3_5")
    session, prompt, steps = manager.open(), prompt_of("qwen3_5"), []
    controls = Controls(constraint=Stepped(Broken()))
    with pytest.raises(RequestError, match="too large"):
        drain(answer(session, prompt, Options(max_new_tokens=20), controls=controls), steps)
    assert steps
    check("qwen3_5", session, prompt, steps)
    list(answer(session, session.tokens, Options(max_new_tokens=5)))
    assert b.prefilled == len(prompt) + 1


@pytest.mark.parametrize(
    ("prompt", "options", "more", "error", "text"),
    [
        ((), {}, {}, RequestError, "no tokens"),
        ((1, 512), {}, {}, RequestError, "token id 512 is outside the vocabulary of 512"),
        ((1, -1), {}, {}, RequestError, "token id -1"),
        ((1, 1 << 70), {}, {}, RequestError, "outside the vocabulary"),
        ((1,), {}, {"stop": (9999,)}, RequestError, "stop token id 9999"),
        ((1,), {"temperature": -1.0}, {}, RequestError, "temperature is -1.0"),
        ((1,), {"max_new_tokens": 0}, {}, RequestError, "max_new_tokens is 0"),
        ((1, 2), {}, {"keep": (2,)}, RequestError, "keep names length 2 of a prompt of 2; give 1 to 1"),
        ((1,) * 152, {}, {}, ContextError, "ends at token 152, the usable context is 152 tokens"),
        ((1,) * 150, {"max_new_tokens": 3}, {}, ContextError, "at most 2 new tokens fit"),
    ],
)
def test_bad_requests_change_nothing_and_end_no_stream(prompt, options, more, error, text):
    b, manager = watched("qwen3_5")
    session = manager.open()
    stream = answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=9))
    steps = [next(stream)]
    passes = b.passes
    with pytest.raises(error, match=text):
        answer(session, prompt, Options(**options), **more)
    assert b.passes == passes
    check("qwen3_5", session, prompt_of("qwen3_5"), steps + list(stream))


# prompts that part from the session ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_parts_from_the_session_goes_back_to_the_nearest_kept_state(name):
    b, manager = watched(name, PLENTY)
    session, prompt = manager.open(), prompt_of(name)
    check(name, session, prompt, list(answer(session, prompt, Options(max_new_tokens=5), keep=(5, 17, 17))))
    assert manager.store.stats.entries == 2
    for cut, kept in ((19, 17), (17, 17), (16, 5)):
        before, parted = b.prefilled, (*prompt[:cut], *user(cut, 6))
        stream = answer(session, parted, Options(max_new_tokens=4))
        check(name, session, parted, list(stream))
        assert session.reuse == Reuse(kept, "store")
        assert b.prefilled - before == len(parted) - kept


@pytest.mark.parametrize("back", [0, 1, 2])
def test_a_prompt_may_be_the_session_itself_or_end_before_it(back):
    manager = manager_of("qwen3_5")
    session, prompt = manager.open(), prompt_of("qwen3_5")
    list(answer(session, prompt, Options(max_new_tokens=6)))
    again = session.tokens[: len(session.tokens) - back]
    stream = answer(session, again, Options(max_new_tokens=4))
    check("qwen3_5", session, again, list(stream))
    assert session.reuse.tokens == (0 if back else len(again) - 1)


@pytest.mark.parametrize("name", NAMES)
def test_sessions_share_a_warm_prefix(name):
    b, manager = watched(name, PLENTY)
    prefix = prompt_of(name, "p2")
    running = manager.open()
    stream = answer(running, prompt_of(name), Options(max_new_tokens=12))
    steps = [next(stream) for _ in range(3)]
    assert warm(manager, prefix)
    before = b.prefilled
    assert warm(manager, prefix)
    assert b.prefilled == before
    for turn in range(3):
        session, prompt = manager.open(), (*prefix, *user(turn, 5))
        check(name, session, prompt, list(answer(session, prompt, Options(max_new_tokens=5))))
    assert b.prefilled == before + 15
    session = manager.open()
    stream = answer(session, prefix, Options(max_new_tokens=3))  # all of it is stored, and its last row is wanted
    check(name, session, prefix, list(stream))
    assert session.reuse.source == "nothing"
    check(name, running, prompt_of(name), steps + list(stream))
    assert not warm(manager_of(name, store=100), prefix)


# memory --------------------------------------------------------------------------------------------------------------


def test_the_state_of_a_forgotten_session_is_not_parked():
    b, manager = watched("qwen3_5")
    session = manager.open()
    list(answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=4)))
    b.snapshot = None  # would fail
    del session
    gc.collect()
    other = manager.open()
    list(answer(other, prompt_of("qwen3_5"), Options(max_new_tokens=4)))
    other.close()
    list(answer(manager.open(), prompt_of("qwen3_5"), Options(max_new_tokens=4)))
    assert other.snapshot is None


def test_a_closed_session_refuses():
    manager = manager_of("qwen3_5")
    session = manager.open()
    stream = answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=9))
    next(stream)
    session.close()
    assert list(stream) == []
    for use in (
        lambda: forked(session),
        lambda: state_of(session),
        lambda: list(answer(session, (1,), Options(max_new_tokens=1))),
    ):
        with pytest.raises(RequestError, match="the session is closed; open a new one"):
            use()


# states from elsewhere -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_state_goes_on_in_another_backend(name):
    prompt = prompt_of(name)
    session = manager_of(name).open()
    list(answer(session, prompt, Options(max_new_tokens=10)))
    state = state_of(session)
    b, manager = watched(name)
    for form in (state, SessionState(state.tokens, None, "bundle")):
        other = adopt(manager, form)
        assert other.tokens == session.tokens
        longer = (*state.tokens, *user(1, 3))
        check(name, other, longer, list(answer(other, longer, Options(max_new_tokens=8))))
    assert b.prefilled == 4 + len(state.tokens) + 3


def test_the_fingerprint_is_the_checksum_of_the_manifest(tmp_path):
    manifest = write_bundle(tmp_path / "bundle", random_weights())
    assert fingerprint(manifest) == json.loads((tmp_path / "bundle" / "manifest.json").read_text())["checksum"]


def test_states_that_do_not_fit_are_refused():
    manager = manager_of("qwen3_5")
    session = manager.open()
    list(answer(session, prompt_of("qwen3_5"), Options(max_new_tokens=4)))
    state = state_of(session)
    with pytest.raises(BundleError, match="fingerprint is another, this bundle's is bundle"):
        adopt(manager, SessionState(state.tokens, state.snapshot, "another"))
    with pytest.raises(RequestError, match="token id 512, outside the vocabulary of 512"):
        adopt(manager, SessionState((*state.tokens[:-1], 512), state.snapshot, "bundle"))
    with pytest.raises(ContextError, match="has 161 tokens, the context holds 160"):
        adopt(manager, SessionState((1,) * 161, None, "bundle"))
    with pytest.raises(RequestError, match=r"snapshot holds 24 tokens, wanted 23"):
        SessionState(state.tokens[:-1], state.snapshot, "bundle")


def test_a_snapshot_that_the_backend_refuses_is_given_up():
    foreign = manager_of("qwen3").open()
    prompt = prompt_of("qwen3_5")
    list(answer(foreign, prompt, Options(max_new_tokens=4)))
    manager = manager_of("qwen3_5")
    loaded = adopt(manager, state_of(foreign))
    for session in (forked(loaded), loaded):
        longer = (*session.tokens, 1)
        with pytest.raises(BackendError, match="of another pair"):
            list(answer(session, longer, Options(max_new_tokens=4)))
        check("qwen3_5", session, longer, list(answer(session, longer, Options(max_new_tokens=4))))


# long runs -----------------------------------------------------------------------------------------------------------


def test_thirty_turns_with_forks_and_cancels_equal_an_unbroken_run():
    """Thirty turns; at every third a fork goes astray, at every fourth the state is saved and adopted elsewhere, at
    every fifth the answer is cancelled inside and goes on."""
    name, new = "qwen3_5", 3
    alone = backend(name, ENGINE, 640)
    managers = [SessionManager(backend(name, ENGINE, 640), "bundle", store=PrefixStore(1 << 20)) for _ in range(2)]
    session, history = managers[0].open(), ()
    for turn in range(30):
        said = user(turn, 1 + turn % 5)
        alone.reset()
        truth = generate(alone, [*history, *said], Options(max_new_tokens=new))
        prompt = (*history, *said)
        if turn % 5 == 4:
            stream = answer(session, prompt, Options(max_new_tokens=new))
            next(stream)
            missing = len(prompt) + new - len(session.tokens)
            if missing:
                list(answer(session, session.tokens, Options(max_new_tokens=missing)))
        else:
            steps = list(answer(session, prompt, Options(max_new_tokens=new)))
            assert tuple(len(step.tokens) for step in steps[1:]) == truth.accept_lengths
        history = (*prompt, *truth.tokens)
        assert session.tokens == history
        if turn % 3 == 0:
            list(answer(forked(session), (*history, 7), Options(max_new_tokens=2)))
        if turn % 4 == 0:
            session = adopt(managers[turn // 4 % 2], state_of(session))
    assert same_bits(state_of(session).snapshot, alone.snapshot())
    assert len(history) == 180
