"""What every backend promises of its passes and states, of each one that runs on a CPU."""

from functools import partial

import numpy as np
import pytest
from golden_pairs import CPU_BACKENDS, ENGINE, FLOAT32, NAMES, golden, same_bits
from golden_pairs import backend as made
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.decode.backend import Asked, Precision, Snapshot
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.errors import BackendError

PROMPT = golden("qwen3_5")["p0.prompt"].tolist()


@pytest.fixture(scope="module", params=CPU_BACKENDS)
def backend(request):
    """A function that makes one of a golden pair."""
    return partial(made, kind=request.param)


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.mark.parametrize("precision", [FLOAT32, ENGINE], ids=["float32", "engine"])
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_logits_of_a_row_do_not_depend_on_the_rows_behind_it(backend, name, precision, rows):
    ids = [17, 300, 4, 99, 256, 31, 8, 77][:rows]
    together, alone = backend(name, precision), backend(name, precision)
    together.prefill(PROMPT)
    alone.prefill(PROMPT)
    logits = together.verify(ids).logits()
    for r, token in enumerate(ids):
        assert np.array_equal(alone.verify([token]).logits()[0], logits[r])
        alone.commit(1)


def test_rows_end_with_the_next_pass(backend, name):
    of = backend(name, ENGINE)
    rows = of.prefill(PROMPT)
    for take in (lambda: of.propose(5), lambda: of.verify([5, 6]), lambda: of.prefill([7])):
        kept = rows.argmax()
        rows, ended = take(), rows
        assert len(rows.argmax()) == len(rows)
        assert len(kept) == len(ended)
        for read in (ended.argmax, ended.logits):
            with pytest.raises(BackendError, match="replaced by a later pass"):
                read()


def test_prefill_does_not_depend_on_its_chunks(backend, name):
    prompt = golden(name)["p2.prompt"].tolist()
    whole, parts = backend(name, ENGINE), backend(name, ENGINE, prefill_chunk=7)
    assert np.array_equal(whole.prefill(prompt).logits(), parts.prefill(prompt).logits())
    assert same_bits(whole.snapshot(), parts.snapshot())


@settings(max_examples=8)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.integers(0, 511)), min_size=1, max_size=6))
def test_any_commits_leave_the_state_of_a_token_by_token_run(backend, cycles):
    speculative, plain = backend("qwen3_5", ENGINE), backend("qwen3_5", ENGINE)
    speculative.prefill(PROMPT)
    plain.prefill(PROMPT)
    for rows, commit, seed in cycles:
        ids = np.random.default_rng(seed).integers(0, 512, rows).tolist()
        speculative.propose(ids[0])
        speculative.verify(ids)
        speculative.commit(min(commit, rows))
        for token in ids[:commit]:
            plain.verify([token])
            plain.commit(1)
    assert same_bits(speculative.snapshot(), plain.snapshot())


def test_flush_changes_nothing_that_follows(backend, name):
    flushed, lazy = backend(name, ENGINE), backend(name, ENGINE)
    for b in (flushed, lazy):
        b.prefill(PROMPT)
        b.verify([1, 2, 3])
        b.commit(2)
    flushed.flush()
    flushed.flush()
    assert np.array_equal(flushed.verify([9, 8]).logits(), lazy.verify([9, 8]).logits())


def test_a_verify_that_was_not_committed_is_forgotten(backend, name):
    once, twice = backend(name, ENGINE), backend(name, ENGINE)
    for b in (once, twice):
        b.prefill(PROMPT)
    twice.verify([5, 5, 5, 5])
    assert np.array_equal(once.verify([7, 8]).logits(), twice.verify([7, 8]).logits())
    for b in (once, twice):
        b.commit(2)
    assert same_bits(once.snapshot(), twice.snapshot())


@pytest.mark.parametrize("precision", [FLOAT32, ENGINE, Precision("bfloat16", "bfloat16")], ids=lambda p: p.kv)
def test_a_restored_snapshot_continues_with_the_same_tokens_and_drafts(backend, name, precision):
    b = backend(name, precision)
    b.prefill(golden(name)["p1.prompt"].tolist())
    b.verify([1, 2, 3, 4])
    b.commit(3)
    saved = b.snapshot()
    expected = generate(b, [4], Options(max_new_tokens=24))
    other = backend(name, precision)
    other.prefill([3, 1, 4, 1, 5])
    other.restore(saved)
    got = generate(other, [4], Options(max_new_tokens=24))
    assert got.tokens == expected.tokens
    assert got.accept_lengths == expected.accept_lengths  # the drafter's context came along
    assert same_bits(other.snapshot(), b.snapshot())


def test_a_snapshot_is_a_copy(backend, name):
    b = backend(name)
    b.prefill(PROMPT)
    saved = b.snapshot()
    before = {n: a.tobytes() for n, a in saved.arrays.items()}
    b.verify([1, 2, 3])
    b.commit(3)
    b.restore(saved)
    b.verify([4])
    b.commit(1)
    b.flush()
    assert {n: a.tobytes() for n, a in saved.arrays.items()} == before


def test_reset_forgets_everything(backend, name):
    fresh, used = backend(name, ENGINE), backend(name, ENGINE)
    used.prefill([9, 9, 9, 9])
    used.verify([1, 2])
    used.commit(1)
    used.reset()
    assert used.length() == 0
    assert np.array_equal(fresh.prefill(PROMPT).logits(), used.prefill(PROMPT).logits())


def test_misuse_is_refused_with_the_numbers(backend, name):
    b = backend(name, max_context=32)
    with pytest.raises(BackendError, match="cannot prefill 0 tokens"):
        b.prefill([])
    with pytest.raises(BackendError, match="context holds 32 tokens"):
        b.prefill(list(range(33)))
    with pytest.raises(BackendError, match="no verify is open"):
        b.commit(1)
    b.prefill([1, 2])
    with pytest.raises(BackendError, match="1 to 8 rows, not 9"):
        b.verify([1] * 9)
    b.verify([1, 2])
    with pytest.raises(BackendError, match="cannot commit 3 rows: the last verify had 2 rows"):
        b.commit(3)
    b.commit(2)
    with pytest.raises(BackendError, match="no verify is open"):
        b.commit(0)
    assert b.length() == 4


def test_a_snapshot_of_another_pair_or_precision_is_refused(backend):
    a, b, fp8 = backend("qwen3"), backend("qwen3_5"), backend("qwen3", ENGINE)
    for other in (a, b):
        other.prefill([1, 2, 3])
    with pytest.raises(BackendError, match="another pair"):
        a.restore(b.snapshot())
    with pytest.raises(BackendError, match=r"stores (torch\.)?uint8"):
        fp8.restore(a.snapshot())
    with pytest.raises(BackendError, match="holds 900 tokens"):
        a.restore(Snapshot(900, {}))
    assert a.length() == 3


def test_a_draft_drops_an_open_verify(backend, name):
    b, fresh = backend(name, ENGINE), backend(name, ENGINE)
    for each in (b, fresh):
        each.prefill(PROMPT)
    b.verify([1, 2, 3])
    b.propose(1)  # its scratch lies where the verify put the drafter's context
    with pytest.raises(BackendError, match="no verify is open"):
        b.commit(2)
    assert same_bits(b.snapshot(), fresh.snapshot())


def test_a_context_that_no_machine_holds_is_refused_by_name(backend):
    with pytest.raises(BackendError, match=r"keys and values of 1000000000000 tokens need .* GB, this machine has"):
        backend("qwen3", max_context=10**12)


def test_a_lane_that_is_not_there_is_refused(backend):
    b = backend("qwen3", FLOAT32)
    saved = b.snapshot()
    for call in (
        b.length,
        b.reset,
        b.flush,
        b.snapshot,
        lambda lane: b.prefill([1], lane),
        lambda lane: b.propose(1, lane),
        lambda lane: b.verify([1], lane),
        lambda lane: b.commit(0, lane),
        lambda lane: b.restore(saved, lane),
        lambda lane: b.cycle(Asked(1, lane=lane)),
    ):
        with pytest.raises(BackendError, match="lane 1 is outside the 1 of this backend; give one from 0 on"):
            call(1)
