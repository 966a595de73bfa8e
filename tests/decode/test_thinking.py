from __future__ import annotations

import random

import pytest
from grammar_support import END, Direct, allowed_by, compile_regex, open_tokenizer, tokenizer, vocab_size

from edge_dflash.decode.steering import AfterThinking
from edge_dflash.errors import RequestError

CLOSE, END_ID = tokenizer().control_id("</think>"), tokenizer().control_id(END)
LINES = tokenizer().encode("\n\n")
A, B = tokenizer().encode("a")[0], tokenizer().encode("b")[0]


def here(pattern):
    return Direct("regex", pattern, (END_ID,))


def after(pattern="ab", inner=here, **options):
    return AfterThinking(inner(pattern), (CLOSE,), vocab_size(), **options)


def process(pattern):
    return compile_regex(pattern, open_tokenizer(), vocab_size(), (END_ID,)).constraint()


def unasked(row, mask):
    raise AssertionError(f"asked at row {row}")


def best(row, mask):
    return allowed_by(mask)[0]


def forced(constraint, count):
    """What comes whatever is drafted."""
    return tuple(constraint.amend([vocab_size() - 1] * count, lambda row, mask: None))


def test_everything_is_allowed_until_the_token_that_closes():
    constraint = after()
    span = (B, END_ID, vocab_size() - 1, *(i for c in "</think>" for i in tokenizer().encode(c)))
    assert constraint.amend(span, unasked) == list(span)
    assert constraint.masks(span) == [None] * (len(span) + 1)
    constraint.advance(span)
    assert not constraint.closed
    constraint.advance([CLOSE])
    assert constraint.closed
    assert allowed_by(constraint.masks(())[0])[0] == forced(constraint, 1)[0]
    assert constraint.amend([B, B, B], unasked) == [A, B, END_ID]
    constraint.advance([A, B, END_ID])


def test_stop_tokens_can_be_kept_out_of_the_thinking():
    constraint = after(stop_token_ids=(END_ID,))
    found = allowed_by(constraint.masks(())[0])
    assert len(found) == vocab_size() - 1
    assert END_ID not in found
    assert constraint.amend([B, END_ID, B], lambda row, mask: A) == [B, A, B]
    assert constraint.amend([B, END_ID, B], lambda row, mask: None) == [B]
    with pytest.raises(RequestError, match=f"does not take token {END_ID}"):
        constraint.advance([B, END_ID])


def test_what_the_template_writes_between_is_forced():
    constraint = after(then=LINES)
    constraint.advance([CLOSE])
    assert forced(constraint, 9)[: len(LINES)] == LINES
    assert len(forced(constraint, 9)) > len(LINES)
    for token in LINES:
        assert allowed_by(constraint.masks(())[0]) == [token]
        with pytest.raises(RequestError, match="does not take token"):
            constraint.advance([A])
        constraint.advance([token])
    assert forced(constraint, 9) == forced(after_close(), 9)
    constraint.advance([A])


def after_close():
    constraint = after()
    constraint.advance([CLOSE])
    return constraint


@pytest.mark.parametrize("inner", [here, process])
@pytest.mark.parametrize("then", [(), LINES])
def test_drafts_and_masks_cross_the_border(then, inner):
    path = [B, A, END_ID, CLOSE, *then, A, B, A, END_ID]
    stepped = after("(ab?)+", then=then)
    expected = []
    for token in (*path, None):
        expected.append(allowed_by(stepped.masks(())[0]))
        if token is not None:
            stepped.advance([token])
    walked, rng, at = after("(ab?)+", inner, then=then), random.Random(5), 0
    while at < len(path):
        ahead = path[at:]
        assert walked.amend(ahead, unasked) == ahead
        assert [allowed_by(mask) for mask in walked.masks(ahead)] == expected[at:]
        other = walked.amend([*ahead[:2], vocab_size() - 1], best)  # its masks are not looked at
        assert other[: len(ahead[:2])] == ahead[:2]
        steps = min(rng.randint(1, 4), len(ahead))
        walked.advance(ahead[:steps])
        at += steps
    assert [allowed_by(mask) for mask in walked.masks(())] == expected[-1:]


@pytest.mark.parametrize(("close", "stop"), [((), ()), ((CLOSE,), (CLOSE, END_ID))])
def test_a_span_that_cannot_be_closed_is_an_error(close, stop):
    with pytest.raises(ValueError, match="the thinking span ends at"):
        AfterThinking(here("a"), close, vocab_size(), stop_token_ids=stop)
