import json
from dataclasses import replace

import numpy as np
import pytest
from golden_pairs import NAMES, golden
from verify_support import BACKENDS, engine, exact

from edge_dflash.checks.lossless import BY_TURNS, OWN, TokenRows, drafters, verify_lossless
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.sampling import Sampling, choose
from edge_dflash.errors import ContextError, RequestError, VerificationError

ADVERSARIES = drafters(0, 1, 8)


def prompts(name, count=1):
    return [golden(name)[f"p{n}.prompt"].tolist() for n in range(count)]


@pytest.mark.parametrize(
    ("name", "kind"), list(zip(NAMES, BACKENDS, strict=True))
)  # all: tests/decode/test_losslessness.py
def test_the_reference_is_lossless_over_every_drafter_and_accept_length(name, kind):
    lines = []
    result = verify_lossless(BACKENDS[kind](name), prompts(name), max_new_tokens=30, progress=lines.append)
    result.check()
    assert result.ok
    assert result.untried == ()
    by_turns = {OWN + BY_TURNS, "oracle" + BY_TURNS}
    assert set(result.histogram) == {OWN, *ADVERSARIES, *by_turns}
    assert set(result.histogram["oracle" + BY_TURNS]) >= set(range(1, 8))
    assert set(result.histogram["always_wrong"]) == {1}
    assert set(range(1, 8)) <= set(result.histogram["staircase"])
    assert len(result.runs) == 2 * (1 + len(ADVERSARIES) + len(by_turns))
    assert lines == ["prompt 1 of 1, temperature 0", "prompt 1 of 1, temperature 4"]


def test_the_json_form_has_the_documented_keys():
    result = verify_lossless(exact("qwen3"), prompts("qwen3", 2), max_new_tokens=6, sampled=None)
    data = json.loads(json.dumps(result.to_json()))
    assert {"ok", "accept_length", "differences"} <= data.keys()
    assert (data["ok"], data["differences"], data["prompts"]) == (True, [], 2)
    assert data["accept_length"] == result.accept_length >= 1
    own = [run.drafting for run in result.runs if run.drafter == OWN]
    tried = sum(len(each.drafts) for each in own)
    assert data["acceptance"] == list(result.acceptance)
    assert data["acceptance"][0] == sum(n > 0 for each in own for n in each.accepted) / tried
    assert len(data["acceptance"]) == 7
    assert data["untried_accept_lengths"] == list(result.untried) != []
    assert data["accept_histogram"]["always_wrong"] == {"1": 10}


class RowsDecide(Delegate):
    """Breaks row invariance: a verify of more than one row chooses another token in its second row."""

    def verify(self, ids, lane=0, parents=None):
        tokens = super().verify(ids, lane).argmax()
        if len(tokens) > 1:
            tokens[1] = (tokens[1] + 1) % 512
        return TokenRows(tuple(tokens), 512)


def test_a_backend_whose_rows_depend_on_each_other_is_caught_with_the_position():
    result = verify_lossless(RowsDecide(exact("qwen3")), prompts("qwen3"), max_new_tokens=8)
    assert not result.ok
    first = next(d for d in result.differences if d.drafter == "oracle")
    assert (first.prompt, first.what, first.position) == (0, "tokens", 2)
    assert first.plain != first.speculative
    assert "always_wrong" not in {d.drafter for d in result.differences}  # its second row is never used
    with pytest.raises(VerificationError, match=r"prompt 0, drafter \w+, temperature 0, tokens at new token 2: plain"):
        result.check()


class CountDecides(Delegate):
    """The bonus token depends on how many drafts were verified, when they are not all."""

    def cycle(self, asked):
        cycle = self._backend.cycle(asked)
        if asked.drafts in (None, 0) or cycle.accepted < asked.drafts:
            return cycle
        return replace(cycle, tokens=(*cycle.tokens[:-1], (cycle.tokens[-1] + 1) % 512))


def test_a_number_of_drafts_that_changes_a_token_is_caught():
    result = verify_lossless(CountDecides(exact("qwen3")), prompts("qwen3"), max_new_tokens=12)
    assert OWN + BY_TURNS in (found := {d.drafter for d in result.differences})
    assert all(name.endswith(BY_TURNS) for name in found)


def test_a_state_that_differs_only_in_its_bits_is_caught():
    class Drifts(Delegate):
        """One bit of one array depends on how many cycles were run."""

        def __init__(self, backend):
            super().__init__(backend)
            self.verifies = 0

        def reset(self, lane=0):
            self.verifies = 0
            super().reset(lane)

        def verify(self, ids, lane=0, parents=None):
            self.verifies += 1
            return super().verify(ids, lane)

        def snapshot(self, lane=0):
            state = super().snapshot(lane)
            arrays = dict(state.arrays)
            arrays["target.layers.0.delta.state"].view(np.int32).flat[3] ^= self.verifies & 1
            return replace(state, arrays=arrays)

    result = verify_lossless(Drifts(engine("qwen3_5")), prompts("qwen3_5"), max_new_tokens=9, sampled=None)
    assert {d.what for d in result.differences} == {"target.layers.0.delta.state"}
    with pytest.raises(VerificationError, match=r"target\.layers\.0\.delta\.state: plain float32"):
        result.check()


def test_a_stop_token_inside_an_accepted_span_ends_both_the_same_way():
    tokens = golden("qwen3_5")["p0.greedy_tokens"].tolist()
    stop = tokens[9]
    result = verify_lossless(exact("qwen3_5"), prompts("qwen3_5"), max_new_tokens=30, stop_token_ids=(stop,))
    assert result.ok
    assert all(run.tokens == tokens.index(stop) + 1 for run in result.runs if run.temperature == 0)


def test_bad_requests_are_refused():
    with pytest.raises(RequestError, match="give at least one"):
        verify_lossless(exact("qwen3"), [])
    with pytest.raises(ContextError):
        verify_lossless(exact("qwen3"), prompts("qwen3"), max_new_tokens=1000)


@pytest.mark.parametrize("settings", [Sampling(), Sampling(0.01), Sampling(50.0, seed=3), Sampling(2.0, 40, 0.5)])
def test_token_rows_choose_their_tokens_at_any_setting(settings):
    rows = TokenRows((5, 0, 511, 7), 512)
    assert len(rows) == 4
    assert choose(rows, settings, 17) == [5, 0, 511, 7]


def test_staircases_of_several_runs_share_the_accept_lengths():
    shape, truth = exact("qwen3").shape, [3, 1, 4, 1, 5, 9, 2]

    def accepted(run, cycle):
        drafts = drafters(run, 4, 8)["staircase"](cycle, truth, shape)
        return next((n for n, (a, b) in enumerate(zip(drafts, truth, strict=True)) if a != b), 7)

    assert [accepted(0, cycle) for cycle in range(9)] == [0, 1, 2, 3, 4, 5, 6, 7, 0]
    assert {accepted(run, cycle) for run in range(4) for cycle in range(2)} == set(range(8))
