"""A grammar that begins where a call does: masks along drafts are those that each token would find by itself."""

from __future__ import annotations

import random

import pytest
from grammar_support import Direct, allowed_by, tokenizer

from edge_dflash.decode.steering import InCalls
from edge_dflash.errors import RequestError
from tests.decode.test_thinking import END_ID, A, B

OPEN, SHUT, THINK, END_THINK = (
    tokenizer().control_id(name) for name in ("<tool_call>", "</tool_call>", "<think>", "</think>")
)


def body():
    """Up to three times a, then the token that closes the call."""
    return Direct("grammar", "start: /a{0,3}/ </tool_call>", (END_ID,))


def made(thinking=False, thinks=(THINK, END_THINK)):
    return InCalls(body, OPEN, SHUT, thinks, thinking=thinking)


def best(row, mask):
    return next(token for token in allowed_by(mask) if token in (A, SHUT, END_ID))


def test_it_is_free_outside_calls():
    constraint = made()
    assert constraint.masks([A, B, SHUT, THINK]) == [None] * 5
    assert constraint.amend([B, 63, SHUT], best) == [B, 63, SHUT]


def test_a_call_is_held_from_its_opening_on():
    constraint = made()
    assert constraint.amend([B, OPEN, B, B], best)[:3] == [B, OPEN, A]
    assert constraint.amend([OPEN, SHUT, OPEN, B], best) == [OPEN, SHUT]  # the rest comes with the next cycle
    free, opened, inner = constraint.masks([B, OPEN])
    assert (free, opened) == (None, None)
    assert set(allowed_by(inner)) >= {A, SHUT}
    assert B not in allowed_by(inner)
    constraint.advance([B, OPEN])
    assert constraint.amend([B], best) == [A]
    constraint.advance([A, SHUT, B])
    assert constraint.masks([]) == [None]
    constraint.advance([OPEN])
    with pytest.raises(RequestError, match="does not take token"):
        constraint.advance([B])


def test_inside_the_thinking_calls_are_text():
    constraint = made(thinking=True)
    assert constraint.masks([OPEN, B, END_THINK, OPEN])[:4] == [None] * 4
    assert constraint.masks([OPEN, B, END_THINK, OPEN])[4] is not None
    constraint.advance([OPEN, B, END_THINK, THINK, OPEN, B])
    assert constraint.masks([]) == [None]
    assert made(thinks=None).masks([THINK, OPEN])[2] is not None


def test_masks_along_drafts_are_those_of_single_steps():
    rng = random.Random(0)
    for _ in range(60):
        long, single = made(), made()
        for _ in range(12):
            drafts = long.amend([rng.choice((A, A, B, OPEN, SHUT, THINK, END_THINK)) for _ in range(6)], best)
            masks = long.masks(drafts)
            assert 1 <= len(masks) <= len(drafts) + 1
            taken = []
            for row in range(rng.randint(1, len(masks))):  # as many of the drafts, and one token more, are committed
                (alone,) = single.masks([])
                assert allowed_by(alone) == allowed_by(masks[row])
                right = row < len(drafts) and (alone is None or drafts[row] in allowed_by(alone))
                taken.append(drafts[row] if right else B if alone is None else best(row, alone))
                single.advance(taken[-1:])
                if not right:
                    break
            long.advance(taken)
