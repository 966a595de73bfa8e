"""Requests that share their passes have the tokens, accept lengths, logits and state bytes that they have alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from golden_pairs import ENGINE, NAMES, backend, golden, same_bits
from lane_mixes import LANES, Mix, differences
from session_support import answer, state_of

from edge_dflash.decode.backend import Asked
from edge_dflash.decode.controls import Controls, Interrupted
from edge_dflash.decode.cycle import host_cycle
from edge_dflash.decode.generation import generate
from edge_dflash.decode.loop import Step, decode_steps
from edge_dflash.decode.options import Options, admit
from edge_dflash.decode.session import SessionManager
from edge_dflash.errors import BackendError, RequestError

# random mixes on the reference ---------------------------------------------------------------------------------------


@cache
def run_mix(name, seed):
    return Mix(name, seed).run()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_random_mixes_leave_no_trace_in_any_request(name, seed):
    mix = run_mix(name, seed)
    assert mix.ended
    assert differences(mix) == []


def test_the_mixes_are_mixes():
    assert max(run_mix("qwen3", seed).most for seed in range(4)) == LANES


# what ends one, or all ------------------------------------------------------------------------------------------------


class Giving:
    """Steering that gives up, where it is asked."""

    tolerant = False

    def __init__(self, error, where):
        self._error, self._where = error, where

    def __getattr__(self, name):
        def asked(*arguments):
            if name == self._where:
                raise self._error
            return [3] if name == "drafts" else [None] * (len(arguments[0]) + 1) if name == "masks" else []

        return asked


@pytest.mark.parametrize("where", ["drafts", "masks"])
@pytest.mark.parametrize("error", [Interrupted("cancelled"), RequestError("the grammar cannot go on")])
def test_what_ends_one_lane_is_in_its_place_and_others_go_on(error, where):
    b = backend("qwen3_5", ENGINE, lanes=3)
    for lane in range(3):
        b.prefill([5, 6, 7], lane)
    asked = [Asked(9, lane=0), Asked(9, lane=1, steering=Giving(error, where)), Asked(9, lane=2)]
    first, second, third = b.cycles(asked)
    assert second is error
    assert first.tokens == third.tokens == host_cycle(b, Asked(9, lane=1)).tokens
    b.commit(1, 0)
    b.commit(1, 2)
    assert [b.length(lane) for lane in range(3)] == [4, 3, 4]


def test_logits_of_a_lane_stay_when_the_passes_of_the_next_follow():
    b = backend("qwen3_5", ENGINE, lanes=2)
    for lane in (0, 1):
        b.prefill((3, 1, 4 + lane), lane)
    asked = [Asked(9, logits=True, lane=lane) for lane in (0, 1)]
    alone = [b.cycle(one).logits() for one in asked]
    found = b.cycles(asked)
    assert all(np.array_equal(one.logits(), logits) for one, logits in zip(found, alone, strict=True))
    assert [one.logprobs for one in found] == [None, None]  # who asked computes them; an empty list would be taken


def test_a_lane_is_copied_with_all_its_state():
    b = backend("qwen3_5", ENGINE, lanes=2)
    b.prefill(golden("qwen3_5")["p1.prompt"].tolist(), 1)
    b.cycle(Asked(9, lane=1))
    b.commit(1, 1)
    b.copy(1, 0)
    assert same_bits(b.snapshot(0), b.snapshot(1))
    assert b.cycle(Asked(4, lane=0)).tokens == b.cycle(Asked(4, lane=1)).tokens


def test_lanes_that_no_backend_has_are_refused():
    with pytest.raises(BackendError, match="lanes is 9; give 1 to 8"):
        backend("qwen3", lanes=9)
    with pytest.raises(BackendError, match="lane 2 is outside the 2"):
        backend("qwen3", lanes=2).length(2)


def test_who_rests_longest_gives_its_lane_away():
    """Running sessions keep their lanes while there is one that rests."""
    b = backend("qwen3", ENGINE, lanes=2)
    manager = SessionManager(b)
    first, second, third = (manager.open() for _ in range(3))
    runs = [
        decode_steps(one, admit(b.shape, (7, 8, 9), Options(max_new_tokens=9)), Controls())
        for one in (first, second, third)
    ]
    for run in runs[:2]:
        assert isinstance(next(run), Step)
        assert isinstance(next(run), Asked)
    second.resting = True
    next(runs[2])
    assert [manager.lanes.of(one) is not None for one in (first, second, third)] == [True, False, True]


# what a request that ends before its first token leaves ---------------------------------------------------------------

NAME = "qwen3_5"
LONG = golden(NAME)["p1.prompt"].tolist()
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
    assert not any(ended_at_its_first_token(session, LONG[:20], error))
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
    run = decode_steps(neighbour, admit(b.shape, LONG[:20], PLAIN))
    asked = next(one for one in run if isinstance(one, Asked))
    run.send(b.cycle(asked))
    assert not any(ended_at_its_first_token(manager.open(), LONG[:9], RequestError("the grammar cannot go on")))
    assert manager.lanes.of(neighbour) == asked.lane
