from __future__ import annotations

import random

import numpy as np
import pytest

from edge_dflash.grammar.compiled import compile_regex
from edge_dflash.spec.thinking import AfterThinking
from tests.grammar_support import END, tokenizer, vocab_size

CLOSE, END_ID = tokenizer().token_id("</think>"), tokenizer().token_id(END)
LINES = tokenizer().encode("\n\n")
A, B = tokenizer().encode("a")[0], tokenizer().encode("b")[0]


def after(pattern="ab", **options):
    inner = compile_regex(pattern, tokenizer(), vocab_size(), (END_ID,)).constraint()
    return AfterThinking(inner, (CLOSE,), vocab_size(), **options)


def allowed(constraint):
    mask = constraint.allowed()
    return None if mask is None else [int(i) for i in np.flatnonzero(mask)]


def test_everything_is_allowed_until_the_token_that_closes():
    constraint = after()
    for token in (B, END_ID, vocab_size() - 1, *(i for c in "</think>" for i in tokenizer().encode(c))):
        assert constraint.allowed() is None
        assert constraint.forced() == ()
        assert constraint.push(token)
    assert not constraint.push(vocab_size())
    assert not constraint.closed
    assert constraint.push(CLOSE)
    assert constraint.closed
    assert constraint.forced()[0] in allowed(constraint)
    assert not constraint.push(B)
    assert constraint.push(A)
    assert constraint.push(B)
    assert constraint.push(END_ID)


def test_stop_tokens_can_be_kept_out_of_the_thinking():
    constraint = after(stop_token_ids=(END_ID,))
    assert not constraint.push(END_ID)
    assert len(allowed(constraint)) == vocab_size() - 1
    assert END_ID not in allowed(constraint)
    assert constraint.push(B)


def test_what_the_template_writes_between_is_forced():
    constraint = after(then=LINES)
    assert constraint.push(CLOSE)
    assert constraint.forced()[: len(LINES)] == LINES
    assert len(constraint.forced()) > len(LINES)
    for token in LINES:
        assert allowed(constraint) == [token]
        assert not constraint.push(A)
        assert constraint.push(token)
    assert constraint.forced() == after_close().forced()
    assert constraint.push(A)


def after_close():
    constraint = after()
    assert constraint.push(CLOSE)
    return constraint


@pytest.mark.parametrize("then", [(), LINES])
def test_steps_back_cross_the_border(then):
    path = [B, A, END_ID, CLOSE, *then, A, B, A, END_ID]
    walked = after("(ab?)+", then=then)
    expected = []
    for token in path:
        expected.append((allowed(walked), walked.forced(), walked.closed))
        assert walked.push(token)
    rng, here = random.Random(5), len(path)
    for _ in range(200):
        goal = rng.randrange(len(path))
        if goal < here:
            walked.pop(here - goal)
        for token in path[here:goal]:
            assert walked.push(token)
        here = goal
        assert (allowed(walked), walked.forced(), walked.closed) == expected[here]
    walked.pop(here)
    with pytest.raises(ValueError, match="cannot step back over 1 of 0"):
        walked.pop(1)


@pytest.mark.parametrize(("close", "stop"), [((), ()), ((CLOSE,), (CLOSE, END_ID))])
def test_a_span_that_cannot_be_closed_is_an_error(close, stop):
    inner = compile_regex("a", tokenizer(), vocab_size(), (END_ID,)).constraint()
    with pytest.raises(ValueError, match="the thinking span ends at"):
        AfterThinking(inner, close, vocab_size(), stop_token_ids=stop)
