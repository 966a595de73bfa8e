from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeBackend
from golden_pairs import backend, golden
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.decode.accept import Relaxation, ThinkingSpan, accepted
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import generate
from edge_dflash.decode.loop import cut
from edge_dflash.decode.options import Options

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=16)


@given(tokens, tokens)
def test_accepted_is_the_longest_agreeing_prefix(drafts, choices):
    drafts = drafts[: len(choices) - 1]
    n = accepted(drafts, choices)
    assert drafts[:n] == choices[:n]
    assert n == len(drafts) or drafts[n] != choices[n]


def test_tolerated_drafts_pass():
    assert accepted([1, 2, 3], [0, 2, 0, 4], [True, False, False]) == 2
    assert accepted([1, 2, 3], [0, 2, 0, 4], [False, False, False]) == 0


@given(tokens, st.sets(st.integers(0, 3)), st.integers(1, 20))
def test_cut_keeps_a_prefix_that_ends_at_the_first_stop_or_the_budget(new, stop, budget):
    kept, reason = cut(new, stop, budget, "length")
    assert kept == new[: len(kept)]
    assert 1 <= len(kept) <= budget
    first_stop = next((i for i, t in enumerate(new[:budget]) if t in stop), None)
    if first_stop is not None:
        assert (len(kept), reason) == (first_stop + 1, "stop")
    elif len(new) >= budget:
        assert (len(kept), reason) == (budget, "length")
    else:
        assert (kept, reason) == (new, None)

    assert cut([1, 2], {2}, 2, "length") == ([1, 2], "stop")
    assert cut([1, 2], set(), 1, "context") == ([1], "context")


# relaxed --------------------------------------------------------------------------------------------------------------

CLOSE, STOP = 7, 9
LOGITS = np.array([[5.0, 4.5, 4.2, 3.0, 0.0, 0.0, 0.0, 4.9, 0.0, 4.8]] * 3, np.float32)


def span(**changes):
    return ThinkingSpan(Relaxation((CLOSE,), **changes), (STOP,))


def test_a_draft_near_the_best_is_tolerated():
    assert span(top_k=5).tolerated(LOGITS, [1, 2, 3], [0, 0, 0, 0]) == [True, True, False]
    assert span(top_k=4).tolerated(LOGITS, [1, 2, 3], [0, 0, 0, 0]) == [True, False, False]
    assert span(top_k=9, margin=0.6).tolerated(LOGITS, [1, 2, 3], [0, 0, 0, 0]) == [True, False, False]


def test_stop_and_closing_tokens_are_strict_on_both_sides():
    assert span().tolerated(LOGITS, [CLOSE, STOP, 0], [0, 0, 1, 0]) == [False, False, False]  # nothing after CLOSE
    assert span(top_k=9).tolerated(LOGITS, [1, 1, 1], [CLOSE, STOP, 0, 0]) == [False, False, True]


def test_acceptance_is_strict_once_the_span_is_closed():
    thinking = span(top_k=9)
    thinking.commit([1, 2])
    assert thinking.tolerated(LOGITS, [1], [0, 0]) == [True]
    thinking.commit([CLOSE])
    thinking.commit([1])
    assert thinking.tolerated(LOGITS, [1], [0, 0]) == [False]


def test_relaxed_output_says_so_and_costs_fewer_cycles():
    prompt = golden("qwen3")["p0.prompt"].tolist()
    options = Options(max_new_tokens=48)
    strict = generate(backend("qwen3"), prompt, options)
    lossy = generate(backend("qwen3"), prompt, options, controls=Controls(relaxation=Relaxation((500,), 400, 1e6)))
    assert strict.relaxed == 0
    assert lossy.relaxed > 0
    assert len(lossy.accept_lengths) < len(strict.accept_lengths)
    exact = Controls(relaxation=Relaxation((500,), 1, 0.0))  # only the best itself: nothing changes
    same = generate(backend("qwen3"), prompt, options, controls=exact)
    assert (same.tokens, same.relaxed) == (strict.tokens, 0)


class Relaxing(Delegate):
    """Of the three drafts that stand in each cycle, two do by relaxed acceptance alone."""

    def cycle(self, asked):
        return replace(super().cycle(asked), relaxed=(True, False, True))


@pytest.mark.parametrize(("kept", "relaxed"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_only_relaxed_tokens_that_were_committed_count(kept, relaxed):
    found = generate(Relaxing(FakeBackend()), [3, 1, 4], Options(max_new_tokens=1 + kept))
    assert (found.accept_lengths, found.relaxed) == ((kept,), relaxed)
