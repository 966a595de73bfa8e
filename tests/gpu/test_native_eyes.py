"""The demo that sees on the native backend: its tower's rows, plain tokens with pictures, reuse, lanes."""

import json
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("tokenizers")

from golden_pairs import same_bits
from native_backend_support import ENGINE, checkpoint, native, reference, rms
from pictures_support import ask
from session_support import state_of

from edge_dflash.checks.lossless import Adversary, noise, oracle_until, staircase
from edge_dflash.checks.mixes import Watching
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.gaze import SeenStore
from edge_dflash.decode.generation import collect, generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.session import SessionManager
from edge_dflash.decode.store import PrefixStore
from edge_dflash.demo.checking import plan_schema
from edge_dflash.demo.tasks import EYES, HELDOUT, PICTURED, check_plan, messages, picture, task_from_json
from edge_dflash.pictures.picture import picture_of
from edge_dflash.pictures.pictured import Pictured
from edge_dflash.planner import Planner
from edge_dflash.text.images import ImageReader
from edge_dflash.text.prompt import Prompter
from edge_dflash.text.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu
NAME, CONTEXT, CHUNK, LANES = "eyes", 640, 64, 4


def tasks(file, count):
    return [task_from_json(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()[:count]]


TASKS = tasks(PICTURED, 6)
FRAME, OTHER = (picture(task) for task in TASKS[:2])
TEXT = TASKS[0].messages[0]["content"]
PLACES = {
    "first": (FRAME, TEXT),
    "last": (TEXT, FRAME),
    "two": ("Before: ", FRAME, "Now: ", OTHER, TEXT),
    "twice": (FRAME, TEXT, FRAME),
    "adjacent": (OTHER, FRAME, FRAME, TEXT),
}
MODES = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "seed": 7, "logprobs": 2},
    "schema": {"schema": plan_schema()},
    "sampled schema": {"schema": plan_schema(), "temperature": 1.2, "seed": 3},
}


@cache
def words():
    return Tokenizer.open(EYES)


def backend(kind="nvfp4", chunk=CHUNK, lanes=1):
    """Loaded once, with empty sequences."""
    found = native(NAME, kind, ENGINE, CONTEXT, chunk, lanes)
    for lane in range(lanes):
        found.reset(lane)
    return found


def vision():
    return checkpoint(NAME)[0].target.vision


@contextmanager
def planner(lanes=1, kind="nvfp4", **settings):
    """Around a backend that outlives it."""
    stop = checkpoint(NAME)[0].target.eos_token_ids
    made = Planner(backend(kind, lanes=lanes), words(), stop, vision=vision(), fallback=False, **settings)
    try:
        yield made
    finally:
        made._engine.close()


def shown(*parts):
    """One message of a user: texts, and arrays as images."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def said(*parts):
    """The prompt of :func:`shown`."""
    prompt = Prompter(words(), (), ImageReader(vision())).prompt(shown(*parts), Options())
    assert len(prompt.pictures) == sum(not isinstance(part, str) for part in parts)
    return Pictured(prompt.ids, prompt.pictures)


def changed(frame):
    """The frame with another value of one pixel."""
    other = frame.copy()
    other[100, 100, 1] ^= 1
    return other


class Cut(Delegate):
    """The backend given prompts in other chunks."""

    def __init__(self, inner, chunk):
        super().__init__(inner)
        self._chunk = chunk

    @property
    def shape(self):
        return replace(self._backend.shape, prefill_chunk=self._chunk)


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])  # with nvfp4 the tower is FP8
def test_rows_of_the_tower_are_those_of_the_reference(kind):
    theirs, squares = reference(NAME, kind, max_context=CONTEXT), []
    exact = reference(NAME, kind, Precision("float32", ENGINE.kv), max_context=CONTEXT)
    for frame in (picture(task) for task in TASKS):
        one = picture_of(frame, vision().patches)
        found, rounded, wanted = (each.see(one).host() for each in (backend(kind), theirs, exact))
        assert found.shape == wanted.shape == (one.tokens, vision().out)
        assert np.isfinite(found).all()
        squares.append([rms(a - b) ** 2 for a, b in ((found, rounded), (found, wanted), (rounded, wanted))])
    to_rounded, to_exact, allowed = np.sqrt(np.sum(squares, axis=0))
    assert allowed > 0
    assert to_rounded <= 2.0 * allowed
    assert to_exact <= 2.0 * allowed


def test_plans_from_pictures_are_valid():
    with planner(kind="bf16") as planned:
        plans = [planned.plan(messages(task), thinking=False) for task in TASKS]
    problems = [check_plan(task, plan.text) for task, plan in zip(TASKS, plans, strict=True)]
    assert sum(not found for found in problems) >= len(TASKS) - 1, problems
    assert all(plan.accept_length > 1.5 for plan in plans)


@pytest.mark.parametrize("mode", MODES)
def test_plans_of_pictured_tasks_are_those_of_plain_decoding(mode):
    with planner() as planned:
        for task in TASKS[:3]:
            options = {"max_new_tokens": 200, "thinking": False, **MODES[mode]}
            plain = planned.plan(messages(task), speculative=False, **options)
            found = planned.plan(messages(task), **options)
            assert (found.tokens, found.finish_reason) == (plain.tokens, plain.finish_reason)
            assert found.logprobs == plain.logprobs
            assert len(found.accept_lengths) < len(plain.accept_lengths)
            if "schema" in mode and found.finish_reason == "stop":
                assert found.object is not None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", PLACES)
def test_every_place_of_a_picture(place, mode):
    with planner() as planned:
        options = {"max_new_tokens": 40, **MODES[mode]}
        plain = planned.plan(shown(*PLACES[place]), speculative=False, **options)
        found = planned.plan(shown(*PLACES[place]), **options)
        assert (found.tokens, found.logprobs) == (plain.tokens, plain.logprobs)


@pytest.mark.parametrize("place", ["two", "twice"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_every_accept_length_leaves_tokens_and_state_of_plain_decoding(place, mode):
    prompt, ours = said(*PLACES[place]), backend()
    options = Options(max_new_tokens=40, **MODES[mode])
    plain = generate(ours, prompt.ids, replace(options, speculative=False), pictures=prompt.pictures)
    state = ours.snapshot()
    assert state.delta == prompt.delta(len(prompt.ids)) < 0
    for right in (None, *range(ours.shape.verify_rows), staircase(), noise()):
        ours.reset()
        drafter = oracle_until(right) if isinstance(right, int) else right
        around = Adversary(ours, [*prompt.ids, *plain.tokens], drafter) if drafter else ours
        found = generate(around, prompt.ids, options, pictures=prompt.pictures)
        assert found.tokens == plain.tokens
        assert same_bits(ours.snapshot(), state)
        if isinstance(right, int):
            assert set(found.accept_lengths[:-1]) <= {right + 1}


@pytest.mark.parametrize("place", ["two", "adjacent"])
def test_no_chunk_boundary_changes_a_token_or_a_bit(place):
    prompt, found = said(*PLACES[place]), []
    for around in (backend(), backend(chunk=48), backend(chunk=512), Cut(backend(), 7), Cut(backend(), 33)):
        around.reset()
        tokens = generate(around, prompt.ids, Options(max_new_tokens=12), pictures=prompt.pictures).tokens
        found.append((tokens, around.snapshot()))
    assert {tokens for tokens, _ in found} == {found[0][0]}
    assert all(same_bits(state, found[0][1]) for _, state in found)


def answer(manager, prompt):
    """Tokens and state of a new session that answers a prompt, and the session."""
    session = manager.open()
    tokens = collect(list(ask(session, prompt, Options(max_new_tokens=12)))).tokens
    return (tokens, state_of(session).snapshot), session


def test_a_session_that_has_seen_its_frames_is_cold_bit_for_bit():
    prompt = said(*PLACES["two"])
    end = prompt.pictures[0].end + 2  # behind the first frame
    tight = SessionManager(backend())
    tight.seen = SeenStore(0)
    cold, _ = answer(tight, prompt)
    manager = SessionManager(backend(), store=PrefixStore(1 << 28))
    list(ask(manager.open(), prompt.until(end), Options(max_new_tokens=1), keep=(end - 1,)))
    assert manager.seen.stats.misses == 1
    warm, session = answer(manager, prompt)
    assert session.reuse.tokens == end - 1
    assert (manager.seen.stats.hits, manager.seen.stats.misses) == (0, 2)  # the first one lies in the prefix
    manager.store = PrefixStore(0)
    known, session = answer(manager, prompt)
    assert session.reuse.tokens == 0
    assert (manager.seen.stats.hits, manager.seen.stats.misses) == (2, 2)
    for tokens, state in (warm, known):
        assert tokens == cold[0]
        assert same_bits(state, cold[1])


def test_a_session_goes_on_behind_older_frames_whether_their_rows_were_kept_or_not():
    plans, saved = [], []
    for room in (None, 0):
        with planner() as planned:
            if room is not None:
                planned._engine.manager.seen = SeenStore(room)
            with planned.session() as session:
                for frame in (FRAME, OTHER, FRAME):
                    plans.append(session.plan(shown(frame, "Go on."), max_new_tokens=10))
                saved.append(planned._engine.run(session._state.ensure_snapshot))
            stats = planned.pictures
            assert (stats.hits, stats.misses) == ((0, 3) if room == 0 else (1, 2))
    for first, second in zip(plans[:3], plans[3:], strict=True):
        assert (first.tokens, first.reused_tokens) == (second.tokens, second.reused_tokens)
    assert plans[1].reused_tokens >= plans[0].prompt_tokens
    assert plans[2].reused_tokens >= plans[1].prompt_tokens
    assert same_bits(*saved)


def test_one_changed_pixel_is_another_picture():
    prompt, other = said("Look: ", FRAME, TEXT), said("Look: ", changed(FRAME), TEXT)
    assert prompt.ids == other.ids
    wanted = {one: answer(SessionManager(backend()), one)[0] for one in (prompt, other)}
    manager = SessionManager(backend(), store=PrefixStore(1 << 28))
    begin, end = prompt.pictures[0].at, prompt.pictures[0].end
    list(ask(manager.open(), prompt, Options(max_new_tokens=4), keep=(begin, begin + 50, end)))
    for asked, reused in ((prompt, end), (other, begin), (prompt, end)):
        (tokens, state), session = answer(manager, asked)
        assert session.reuse.tokens == reused
        assert tokens == wanted[asked][0]
        assert same_bits(state, wanted[asked][1])
    assert manager.seen.stats.misses == 2


def test_callers_with_pictures_beside_text_get_what_they_get_alone():
    asked = [shown(*PLACES[place]) for place in ("first", "two", "last")]
    asked += [list(task.messages) for task in tasks(HELDOUT, 2)] + [messages(task) for task in TASKS[2:5]]
    modes = [MODES[mode] for mode in ("greedy", "sampled", "schema", "sampled")]
    modes += [mode | {"speculative": False} for mode in modes]  # they take longer, so that lanes fill
    with planner() as alone:
        wanted = [alone.plan(task, max_new_tokens=120, **more) for task, more in zip(asked, modes, strict=True)]
    watching, start, found = Watching(), threading.Barrier(len(asked)), {}

    def call(number):
        start.wait()
        found[number] = together.plan(asked[number], max_new_tokens=120, caller=str(number), **modes[number])

    with planner(LANES, observer=watching, prompt_share=0.9) as together:
        callers = [threading.Thread(target=call, args=(number,)) for number in range(len(asked))]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    for number, plan in enumerate(wanted):
        assert (found[number].tokens, found[number].logprobs) == (plan.tokens, plan.logprobs)
    assert max(one.lanes for one in watching.passes) == LANES


def test_pictures_allocate_nothing_after_load():
    prompt, ours = said(*PLACES["adjacent"]), backend()
    before = ours.gpu.allocations
    for _ in range(2):
        ours.reset()
        generate(ours, prompt.ids, Options(max_new_tokens=5), pictures=prompt.pictures)
    assert ours.gpu.allocations == before
