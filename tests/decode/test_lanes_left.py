"""What a request that ends before its first token leaves in its lane, and to the others."""

from __future__ import annotations

import pytest
from golden_pairs import ENGINE, backend, golden, same_bits
from session_support import answer, state_of

from edge_dflash.decode.backend import Asked
from edge_dflash.decode.controls import Controls, Interrupted
from edge_dflash.decode.loop import generate, turns
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.session import SessionManager
from edge_dflash.errors import RequestError

NAME = "qwen3_5"
PROMPT = golden(NAME)["p1.prompt"].tolist()
PLAIN = Options(max_new_tokens=30, speculative=False)


class GivesUp:
    """A grammar that never comes to the first token."""

    def __init__(self, error):
        self._error = error

    def masks(self, drafts):
        raise self._error


def ended_at_its_first_token(session, prompt, error):
    try:
        return [step.tokens for step in answer(session, prompt, PLAIN, controls=Controls(constraint=GivesUp(error)))]
    except RequestError:
        return []


@pytest.mark.parametrize("error", [Interrupted("cancelled"), RequestError("the grammar cannot go on")])
def test_a_session_goes_on_in_another_lane_with_what_it_has_alone(error):
    """Its rows grow over the length that the lane has where its prompt ended."""
    b = backend(NAME, ENGINE, prefill_chunk=8, lanes=2)
    session = SessionManager(b).open()
    assert not any(ended_at_its_first_token(session, PROMPT[:20], error))
    assert (b.length(0), session.rows) == (20, 16)
    found = [token for step in answer(session, [7, 8, 9, 10, 11], PLAIN) for token in step.tokens]
    assert tuple(found) == generate(backend(NAME, ENGINE), [7, 8, 9, 10, 11], PLAIN).tokens
    alone = SessionManager(backend(NAME, ENGINE)).open()
    list(answer(alone, [7, 8, 9, 10, 11], PLAIN))
    assert same_bits(state_of(session).snapshot, state_of(alone).snapshot)


def test_a_refused_grammar_costs_nobody_else_a_row():
    b = backend(NAME, ENGINE, prefill_chunk=8, lanes=2)
    manager = SessionManager(b)
    neighbour = manager.open()
    run = turns(neighbour, admit(b.shape, PROMPT[:20], PLAIN))
    asked = next(one for one in run if isinstance(one, Asked))
    run.send(b.cycle(asked))
    assert not any(ended_at_its_first_token(manager.open(), PROMPT[:9], RequestError("the grammar cannot go on")))
    assert manager.lanes.of(neighbour) == asked.lane
