"""Cycles pass by pass: those of the loop where they run free, and the recorded ones along recorded tokens."""

from itertools import islice

import pytest
from golden_pairs import golden
from verify_support import exact

from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.replay import Recorded, replay

NAME, CYCLES = "qwen3_5", 5
PROMPT = golden(NAME)["p0.prompt"].tolist()


def passes(backend, *recorded, cycles=None, **options):
    """The cycles, and what the rows of each choose, read before the next pass."""
    found = replay(backend, PROMPT, *recorded, see=lambda rows: rows.argmax(), **options)
    return tuple(zip(*((one, one.rows.argmax()) for one in islice(found, cycles)), strict=True))


@pytest.fixture(scope="module")
def free():
    return passes(exact(NAME), cycles=CYCLES + 1)


def test_free_cycles_are_those_of_the_loop(free):
    free, _ = free
    tokens = [token for one in free for token in one.tokens]
    alone = generate(exact(NAME), PROMPT, Options(max_new_tokens=len(tokens)))
    assert alone.tokens == tuple(tokens)
    assert alone.accept_lengths == tuple(len(one.tokens) for one in free[1:])
    assert [one.start for one in free[1:]] == [len(PROMPT) + sum(len(b.tokens) for b in free[1:n]) for n in range(1, 6)]


@pytest.mark.parametrize("propose", [True, False])
def test_recorded_cycles_go_along_their_tokens_whatever_the_rows_choose(free, propose):
    free, choices = free
    tokens = [token for one in free for token in one.tokens]
    lengths = [len(one.tokens) for one in free[1:]]
    drafts = [[(draft + 1) % 512 for draft in one.drafts] for one in free[1:]]
    other = [*tokens[:-1], (tokens[-1] + 1) % 512]
    recorded = Recorded(other, [one.drafts for one in free[1:]], lengths)
    backend = exact(NAME)
    found, chosen = passes(backend, recorded, propose=propose)
    assert [list(one.tokens) for one in found] == [*(list(one.tokens) for one in free[:-1]), other[-lengths[-1] :]]
    assert all((one.own is not None) == propose for one in found[1:])
    assert chosen == choices
    assert backend.length() == len(PROMPT) + sum(lengths)
    wrong, _ = passes(backend, Recorded(other, drafts, lengths), propose=False)
    assert [len(one.tokens) for one in wrong] == [1, *lengths]
