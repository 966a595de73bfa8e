"""Grammars run in processes that can be ended: bounds, deadlines, deaths, and what is left behind by them."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeBackend
from grammar_support import (
    END,
    SCHEMAS,
    Direct,
    allowed_by,
    compile_regex,
    compile_schema,
    open_tokenizer,
    tokenizer,
    vocab_size,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.bench.random_pair import synthetic_tokenizer
from edge_dflash.decode.controls import ENDLESS, Controls, Interrupted, Patience
from edge_dflash.decode.generation import generate
from edge_dflash.decode.grammar import compiled as module
from edge_dflash.decode.grammar.compiled import FairSemaphore, Grammar, Grammars, hold
from edge_dflash.decode.grammar.process import WALL_SECONDS, Child, Link
from edge_dflash.decode.grammar.schema import schema_json
from edge_dflash.decode.grammar.walker import Source
from edge_dflash.decode.grammar.worker import Bounds
from edge_dflash.decode.options import Options
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
STOP = (tokenizer().control_id(END),)
A, B = tokenizer().encode("a")[0], tokenizer().encode("b")[0]
ENDLESS_LARK = "start: X\nX: " + " & ".join(f"/(.{{{n}}})*/" for n in (7, 11, 13, 17, 19, 23, 29, 31))
GREEDY = "((a{100}){100}){100}"
MULTIPLE = json.dumps({"type": "integer", "multipleOf": 999983})


def source(kind, text):
    return Source(kind, text, False, vocab_size())


@contextmanager
def processes(**bounds):
    grammars = Grammars(tokenizer(), STOP, Bounds(**bounds))
    try:
        yield grammars
    finally:
        grammars.close()


def children(grammars):
    path = Path(f"/proc/{grammars.start()._process.pid}/task/{grammars.start()._process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def only_child(grammars):
    (pid,) = children(grammars)
    return pid


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# What runs in the process is what would run here ----------------------------------------------------------------------


@settings(max_examples=25)
@given(SCHEMAS, st.randoms(use_true_random=False))
def test_a_process_gives_the_drafts_and_masks_of_the_library(pair, rng):
    here = Direct("schema", schema_json(pair[0]), STOP)
    there = compile_schema(pair[0], open_tokenizer(), vocab_size(), STOP).constraint()
    masks, given_before = [], []
    for _ in range(60):
        free = [rng.randrange(vocab_size()) for _ in range(rng.randint(0, 8))]
        if rng.random() < 0.7:  # some right ones
            free = [rng.choice(allowed_by(here.masks(())[0])), *free]
        seed = rng.random()

        def ask(walk_asked, seed=seed):
            def asked(row, mask):
                walk_asked.append((row, mask.tobytes()))
                return random.Random(seed).choice(allowed_by(mask)) if len(walk_asked) == 1 else None

            return asked

        asked_here, asked_there = [], []
        path = here.amend(free, ask(asked_here))
        assert there.amend(free, ask(asked_there)) == path
        assert asked_there == asked_here[:1]
        for one, other in zip(given_before, masks, strict=True):  # they stay while the next ones are made
            np.testing.assert_array_equal(one, other)
        masks, given_before = here.masks(path), there.masks(path)
        assert not given_before[0].flags.writeable
        for one, other in zip(given_before, masks, strict=True):
            np.testing.assert_array_equal(one, other)
        taken = path[: rng.randint(0, len(path))] or [rng.choice(allowed_by(masks[0]))]
        here.advance(taken)
        there.advance(taken)
        if taken[-1] in STOP:
            return


@settings(max_examples=20)
@given(SCHEMAS, st.integers(0, 3), st.sampled_from([0.0, 1.5]))
def test_random_schemas_give_the_same_tokens_with_and_without_drafts(pair, right, temperature):
    grammar = compile_schema(pair[0], open_tokenizer(), vocab_size(), STOP)
    shape = PairShape(vocab_size(), block_size=6, mask_token_id=0, max_context=120, prefill_chunk=8, drafts=5)
    options = Options(max_new_tokens=60, temperature=temperature, seed=right)
    found = []
    for speculative in (True, False):
        backend = FakeBackend(shape, right=lambda position: right)
        controls = Controls(constraint=grammar.constraint())
        found.append(
            generate(
                backend, (3, 1, 4), replace(options, speculative=speculative), stop_token_ids=STOP, controls=controls
            )
        )
    assert found[0].tokens == found[1].tokens
    assert found[0].finish_reason == found[1].finish_reason
    accepts = Direct("schema", schema_json(pair[0]), STOP)
    accepts.advance(found[0].tokens)


def test_a_token_that_is_not_allowed_is_an_error():
    constraint = compile_regex("ab", open_tokenizer(), vocab_size(), STOP).constraint()
    constraint.advance([B])
    assert constraint.amend([A], lambda row, mask: None) == []
    with pytest.raises(RequestError, match=f"the grammar does not take token {B}, which was chosen"):
        constraint.masks(())


def test_a_long_history_is_replayed_and_long_drafts_are_cut():
    with processes() as grammars:
        constraint = Grammar(grammars, source("regex", "(a|b)*")).constraint()
        history = [A, B] * 60_000  # longer than what fits on the way
        constraint.advance(history)
        mask = constraint.masks(())[0].copy()
        os.kill(only_child(grammars), signal.SIGKILL)
        np.testing.assert_array_equal(constraint.masks(())[0], mask)
        assert constraint.amend([A] * 200, lambda row, mask: None) == []  # it died: no more drafts
        other = Grammar(grammars, source("regex", "(a|b)*")).constraint()
        path = other.amend([A] * 200, lambda row, mask: None)
        assert 30 < len(path) < 200
        assert len(other.masks(path)) == len(path) + 1


def test_wrong_drafts_do_not_use_the_grammar_up():
    many_states = "start: X\nX: " + " & ".join(rf"/(.|\n)*[{c}](.|\n){{{n}}}/" for c, n in (("a-m", 12), ("e-z", 9)))
    letters = [tokenizer().encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLM"]
    rng = random.Random(0)
    with processes() as grammars:
        constraint = Grammar(grammars, source("grammar", many_states)).constraint()
        first = constraint.masks(())[0].copy()
        path, masks = [], [first]
        while len(masks) == len(path) + 1:  # until the library's limit of states is reached along the drafts
            path = constraint.amend([rng.choice(letters) for _ in range(60)], lambda row, mask: None)
            masks = constraint.masks(path)
        np.testing.assert_array_equal(constraint.masks(())[0], first)
        assert constraint.amend(letters[:4], lambda row, mask: None) == letters[:4]
        other = Grammar(grammars, source("grammar", many_states)).constraint()
        np.testing.assert_array_equal(other.masks(())[0], first)
        for one in (constraint, other):
            one.advance(path)
        np.testing.assert_array_equal(constraint.masks(())[0], other.masks(())[0])
        assert len(children(grammars)) == 1


# Bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "bounds", "reason"),
    [
        ("grammar", ENDLESS_LARK, {"compile_seconds": 0.3}, "the grammar needs more than 0.3 s to compile"),
        ("regex", GREEDY, {"compile_seconds": 0.3}, "the regex needs more than 0.3 s to compile"),
        ("schema", MULTIPLE, {"compile_seconds": 0.3}, "the schema needs more than 0.3 s to compile"),
        ("regex", GREEDY, {"nbytes": 24 << 20}, "the regex needs more than 24 MB to compile, or is nested too deep"),
    ],
)
def test_compiling_is_bounded_in_time_and_memory(kind, text, bounds, reason):
    with processes(**bounds) as grammars:
        with pytest.raises(RequestError, match=reason) as refused:
            grammars.child(source(kind, text), ENDLESS)
        assert "; " in str(refused.value)
        assert "\n" not in str(refused.value)
        until(lambda: not children(grammars))
        grammars.child(source("regex", "ab"), ENDLESS)  # and others are taken after it


def test_what_went_over_its_bounds_is_not_tried_again_at_once(monkeypatch):
    with processes(compile_seconds=0.3) as grammars:
        for _ in range(2):
            began = time.perf_counter()
            with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
                grammars.child(source("grammar", ENDLESS_LARK), ENDLESS)
        assert time.perf_counter() - began < 0.2
        monkeypatch.setattr(module, "CACHED", 2)
        kept = [grammars.child(source("regex", f"a{i}"), ENDLESS) for i in range(2)]
        assert all(child.alive for child in kept)
        assert source("grammar", ENDLESS_LARK) not in grammars._known  # what is remembered is bounded


def test_a_refusal_that_is_remembered_holds_nothing_of_who_was_refused():
    class Picture:
        """What a request has."""

    def ask(grammars):
        picture = Picture()
        with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
            grammars.child(source("grammar", ENDLESS_LARK), ENDLESS)
        return weakref.ref(picture)

    with processes(compile_seconds=0.3) as grammars:
        asked = [ask(grammars) for _ in range(3)]
        gc.collect()
        assert [one() for one in asked] == [None] * 3
        assert grammars._known[source("grammar", ENDLESS_LARK)].exception().__traceback__ is None


def test_deadlines_and_cancelling_are_obeyed_while_a_grammar_compiles():
    with processes() as grammars:
        grammars.child(source("regex", "warm"), ENDLESS)
        warm = only_child(grammars)

        def stopped():
            """Whether it compiles; its process is stopped then, and goes over no bound: it ends if it is killed."""
            found = [pid for pid in children(grammars) if pid != warm]
            for pid in found:
                os.kill(pid, signal.SIGSTOP)
            return bool(found)

        class Late(Patience):
            """Of a deadline that has passed when it compiles."""

            def check(self):
                Patience(0.0 if stopped() else None).check()

        for patience, reason in ((Late(), "deadline"), (Patience(None, stopped), "cancelled")):
            with pytest.raises(Interrupted, match=reason):
                grammars.child(source("grammar", ENDLESS_LARK), patience)
            until(lambda: children(grammars) == [warm])


def test_nothing_waits_for_anothers_compiling():
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    with processes(compile_seconds=1.0) as grammars, ThreadPoolExecutor(8) as pool:
        grammars.child(source("regex", "warm"), ENDLESS)
        ticker = threading.Thread(target=tick)
        ticker.start()
        texts = [("grammar", ENDLESS_LARK), ("regex", GREEDY), ("schema", MULTIPLE)]
        bombs = [pool.submit(grammars.child, source(*text), ENDLESS, "bomber") for text in texts]
        began = time.perf_counter()
        grammars.child(source("regex", "small"), ENDLESS, "other")
        took = time.perf_counter() - began
        for bomb in bombs:
            assert isinstance(bomb.exception(), RequestError)
        done.set()
        ticker.join()
    assert took < 1.0
    assert np.median(np.diff(ticks)) < 0.05


def test_one_caller_does_not_take_all_places():
    compiling, order, go = FairSemaphore(2, 1), [], threading.Event()

    def hold_place(caller):
        with compiling.place(caller, ENDLESS):
            order.append(caller)
            assert go.wait(60)

    threads = [threading.Thread(target=hold_place, args=(caller,)) for caller in ("a", "a", "b")]
    for thread in threads:
        thread.start()
    until(lambda: sorted(order) == ["a", "b"])
    with pytest.raises(Interrupted, match="deadline"), compiling.place("c", Patience(time.perf_counter() + 0.05)):
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(order) == ["a", "a", "b"]


def test_equal_grammars_are_compiled_once_also_at_the_same_time():
    with processes() as grammars, ThreadPoolExecutor(8) as pool:
        same = list(pool.map(lambda _: grammars.child(source("regex", "ab"), ENDLESS), range(8)))
        assert len(set(map(id, same))) == 1
        assert len(children(grammars)) == 1


def test_who_gives_up_does_not_end_it_for_the_others():
    with processes(compile_seconds=0.5) as grammars, ThreadPoolExecutor(2) as pool:
        grammars.child(source("regex", "warm"), ENDLESS)
        impatient = pool.submit(grammars.child, source("grammar", ENDLESS_LARK), Patience(time.perf_counter() + 0.1))
        patient = pool.submit(grammars.child, source("grammar", ENDLESS_LARK), ENDLESS)
        assert isinstance(impatient.exception(), Interrupted)
        assert "needs more than 0.5 s" in str(patient.exception())


@pytest.mark.parametrize("bound", ["CACHED", "CACHED_BYTES"])
def test_what_is_kept_is_bounded(monkeypatch, bound):
    with processes() as grammars:
        used = grammars.child(source("regex", "used"), ENDLESS)
        constraint = Grammar(grammars, source("regex", "used")).constraint()
        assert 0 < used.private_bytes < 64 << 20
        monkeypatch.setattr(module, bound, 3 if bound == "CACHED" else 3 * used.private_bytes + 1000)
        kept = [grammars.child(source("regex", f"kept{i}"), ENDLESS) for i in range(6)]
        until(lambda: len(children(grammars)) <= 3)
        assert used.alive  # somebody walks along it
        assert kept[-1].alive
        assert not kept[0].alive
        assert len(constraint.masks(())) == 1
        assert grammars.child(source("regex", "kept0"), ENDLESS) is not kept[0]


def test_bounds_hold_whatever_signals_the_planners_thread_blocks(monkeypatch):
    found = []

    def run():
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        with processes(compile_seconds=0.3) as grammars:
            grammars.child(source("regex", "ab"), ENDLESS)  # the vocabulary is built
            began = time.perf_counter()
            with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
                grammars.child(source("grammar", ENDLESS_LARK), ENDLESS)
            found.append(time.perf_counter() - began)
            until(lambda: len(children(grammars)) == 1)

    monkeypatch.setattr("edge_dflash.decode.grammar.process.WALL_SECONDS", 20.0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found[0] < 5.0


# Deaths ---------------------------------------------------------------------------------------------------------------


def test_a_request_goes_on_when_its_process_dies_once():
    with processes() as grammars:
        constraint = Grammar(grammars, source("regex", "(ab|b)*c")).constraint()
        constraint.advance([A])
        masks = [mask.copy() for mask in constraint.masks([B, A])]
        os.kill(only_child(grammars), signal.SIGKILL)
        assert constraint.amend([B, A], lambda row, mask: None) == []
        np.testing.assert_array_equal(constraint.masks([B, A]), masks[:1])  # as in plain decoding
        constraint.advance([B])
        os.kill(only_child(grammars), signal.SIGKILL)
        with pytest.raises(RequestError, match="for the next token after 2"):
            constraint.masks(())


def test_a_process_that_is_found_dead_on_sending_is_replaced_at_once(monkeypatch):
    cause = Child.cause
    with processes() as grammars:
        constraint = Grammar(grammars, source("regex", "(ab|b)*c")).constraint()
        masks = [mask.copy() for mask in constraint.masks(())]
        zygote, pid = grammars.start()._process.pid, only_child(grammars)
        os.kill(zygote, signal.SIGSTOP)  # it does not tell that its fork is dead, and holds its sockets open

        def asked(child):
            os.kill(zygote, signal.SIGCONT)
            return cause(child)

        monkeypatch.setattr(Child, "cause", asked)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not running(pid))
        np.testing.assert_array_equal(constraint.masks(()), masks)
        assert only_child(grammars) != pid


def test_an_idle_process_that_is_gone_costs_no_drafts():
    with processes() as grammars:
        grammar = Grammar(grammars, source("regex", "(ab|b)*c"))
        grammars.child(source("regex", "(ab|b)*c"), ENDLESS)
        pid = only_child(grammars)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not children(grammars))
        assert grammar.constraint().amend([B, A], lambda row, mask: None) == [B, A]
        zygote = grammars.start()._process.pid
        os.kill(zygote, signal.SIGKILL)
        until(lambda: not running(zygote))
        assert grammar.constraint().amend([B, A], lambda row, mask: None) == [B, A]


def test_a_walk_is_bounded_and_obeys_its_deadline(monkeypatch):
    waited, receive = [], Link.receive
    monkeypatch.setattr(
        Link, "receive", lambda link, patience, seconds: waited.append(seconds) or receive(link, patience, seconds)
    )
    with processes(step_seconds=0.2) as grammars:
        grammar = Grammar(grammars, source("regex", "(ab|b)*c"))
        grammar.constraint().masks(())
        constraint = grammar.constraint(Patience(time.perf_counter() + 0.5))
        os.kill(only_child(grammars), signal.SIGSTOP)  # it hangs: no processor time, no answer
        with pytest.raises(Interrupted, match="deadline"):
            constraint.masks(())
        other = grammar.constraint()
        began = time.perf_counter()
        waited.clear()
        assert other.amend([B], lambda row, mask: None) == []
        assert waited[0] == WALL_SECONDS * 0.2 < time.perf_counter() - began < 60.0
        assert len(other.masks(())) == 1


# What is left behind --------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_grammars_that_are_gone():
    def descriptors():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with processes() as grammars:
        zygote = grammars.start()._process.pid
        for i in range(4):
            constraint = Grammar(grammars, source("regex", f"a{{1,{i + 3}}}")).constraint()
            constraint.amend([A], lambda row, mask: None)
            masks = constraint.masks([A])
        pids = children(grammars)
        assert len(pids) == 4
    until(lambda: not any(map(running, (zygote, *pids))))
    assert masks[1].any()  # what was given stays
    del constraint, grammars, masks
    assert descriptors() <= before


def test_processes_end_with_their_last_owner():
    class Owner:
        pass

    words = synthetic_tokenizer(2048)
    first, second = Owner(), Owner()
    end = hold(first, words)
    hold(second, words)
    compile_regex("a", words, 2048, (2047,))
    zygote = module._grammars(words, (2047,)).start()._process.pid
    end()
    end()
    assert running(zygote)
    del second
    gc.collect()
    until(lambda: not running(zygote))


def test_an_owner_may_go_while_the_owners_are_counted():
    class Owner:
        pass

    owner = Owner()
    end = hold(owner, synthetic_tokenizer(2048))

    def inside():  # as a collection of garbage does
        with module._lock:
            end()

    thread = threading.Thread(target=inside, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_nothing_outlives_the_planners_process(end):
    code = f"""if True:
        import os, signal, sys, threading, time
        from contextlib import suppress
        sys.path[:0] = {[str(ROOT), str(ROOT / "tests" / "support")]}
        from tests.decode.test_grammar_processes import *
        grammars = Grammars(tokenizer(), STOP)
        constraint = Grammar(grammars, source("regex", "a|b")).constraint()

        def bomb():
            with suppress(RequestError):
                grammars.child(source("grammar", ENDLESS_LARK), ENDLESS)

        threading.Thread(target=bomb, daemon=True).start()
        until(lambda: len(children(grammars)) == 2)
        print(grammars.start()._process.pid, *children(grammars), flush=True)
        {end}
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    until(lambda: not any(map(running, pids)), 3.0)
    assert "Traceback" not in done.stderr


def test_a_fork_of_the_planners_process_leaves_the_grammars_alone():
    with processes() as grammars:
        constraint = Grammar(grammars, source("regex", "(ab|b)*c")).constraint()
        pid = only_child(grammars)
        if not (fork := os.fork()):
            try:
                del constraint
                grammars._known.clear()
                gc.collect()
                grammars.close()
            finally:
                os._exit(0)
        os.waitpid(fork, 0)
        time.sleep(0.2)
        assert only_child(grammars) == pid
        assert constraint.amend([A, B], lambda row, mask: None) == [A, B]


def test_signals_for_the_planner_leave_the_grammars_alone():
    with processes() as grammars:
        constraint = Grammar(grammars, source("regex", "a|b")).constraint()
        for pid in (grammars.start()._process.pid, only_child(grammars)):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
        assert len(constraint.masks([A])) == 2
        assert constraint.amend([A], lambda row, mask: None) == [A]


def test_a_planner_that_ignores_the_end_of_children_has_grammars_that_end_one_by_one():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a process that is started inherits it
    try:
        with processes(compile_seconds=0.3) as grammars:
            kept, zygote = grammars.child(source("regex", "a|b"), ENDLESS), grammars.start()._process.pid
            grammars.child(source("regex", "b|a"), ENDLESS).end()
            with pytest.raises(RequestError, match=r"needs more than 0\.3 s"):
                grammars.child(source("grammar", ENDLESS_LARK), ENDLESS)
            until(lambda: len(children(grammars)) == 1)
            assert kept.alive
            assert grammars.start()._process.pid == zygote
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("what", ["subprocess.Popen", "os.memfd_create", "socket.socketpair"])
def test_no_process_or_file_left_is_said_and_tried_again(monkeypatch, what):
    def refuse(*arguments, **options):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    words = synthetic_tokenizer(2048)
    with monkeypatch.context() as patched:
        patched.setattr(what, refuse)
        with pytest.raises(RequestError) as refused:
            compile_regex("a", words, 2048, (2047,))
    assert str(refused.value) == "the grammar cannot be compiled now (Resource temporarily unavailable); try again"
    compile_regex("a", words, 2048, (2047,))


def test_a_constraint_without_a_file_left_is_opened_with_its_first_mask(monkeypatch):
    grammar = compile_regex("ab", open_tokenizer(), vocab_size(), STOP)
    with monkeypatch.context() as patched:
        patched.setattr("os.memfd_create", lambda name: os.open("/nowhere", os.O_RDONLY))
        constraint = grammar.constraint()
        with pytest.raises(RequestError, match="No such file"):
            constraint.masks(())
    assert len(constraint.masks(())) == 1


@pytest.mark.parametrize(
    ("modules", "others"),
    [
        ("edge_dflash.decode.grammar.worker", {"numpy", "torch", "tokenizers", "subprocess", "asyncio", "jinja2"}),
        ("edge_dflash, edge_dflash.decode.grammar.compiled", {"llguidance"}),
    ],
)
def test_a_process_imports_what_it_needs(modules, others):
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not others.intersection(done.stdout.split())


@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ((vocab_size() - 1,), "needs a stop token of the tok"),
        ((), "needs a stop tok"),
        ((vocab_size(),), "outside the"),
    ],
)
def test_stop_tokens_must_be_there(stop, reason):
    with pytest.raises(RequestError, match=reason):
        compile_regex("a", open_tokenizer(), vocab_size(), stop)
