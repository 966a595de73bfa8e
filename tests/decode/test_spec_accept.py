from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.decode.accept import accepted, cut

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=16)


@given(tokens, tokens)
def test_accepted_is_the_longest_agreeing_prefix(drafts, choices):
    drafts = drafts[: len(choices) - 1]
    n = accepted(drafts, choices)
    assert drafts[:n] == choices[:n]
    assert n == len(drafts) or drafts[n] != choices[n]


def test_accepted_counts_nothing_after_the_first_difference():
    assert accepted([5, 6, 7], [5, 9, 7, 1]) == 1
    assert accepted([], [4]) == 0
    assert accepted([1, 2], [1, 2, 3]) == 2


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


def test_a_stop_token_at_the_budget_is_a_stop():
    assert cut([1, 2], {2}, 2, "length") == ([1, 2], "stop")


def test_cut_passes_the_budget_reason_on():
    assert cut([1, 2], set(), 1, "context") == ([1], "context")
