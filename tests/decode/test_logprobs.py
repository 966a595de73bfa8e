"""Log-probabilities: the model's own, of the tokens that were committed, the same whatever a drafter proposed."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import SHAPE, FakeBackend, Stepped
from golden_pairs import NAMES, backend, golden
from verify_support import BACKENDS

from edge_dflash.checks.lossless import Adversary, drafters
from edge_dflash.decode.accept import Relaxation
from edge_dflash.decode.controls import Controls
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.generation import stream
from edge_dflash.decode.logprobs import TokenLogprob, token_logprobs
from edge_dflash.decode.options import Options
from tests.decode.test_steering import Brittle

PROMPT = (3, 1, 4)
ASKED = Options(max_new_tokens=21, logprobs=5)
SAMPLED = replace(ASKED, temperature=2.0, top_k=30, top_p=0.9, seed=7)
TOLERANCE = 5e-5  # of golden logits, float32 on both sides: their sums have another order


def log_softmax(rows):
    """In float64, as it is written."""
    rows = np.asarray(rows, np.float64)
    shifted = rows - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def found(backend, prompt=PROMPT, options=ASKED, speculative=True, **how):
    """Tokens of a run, their log-probabilities, and accept lengths."""
    steps = list(stream(backend, prompt, replace(options, speculative=speculative), **how))
    for step in steps:
        assert [one.token for one in step.logprobs] == list(step.tokens)
    tokens = [token for step in steps for token in step.tokens]
    return tokens, [one for step in steps for one in step.logprobs], [len(step.tokens) for step in steps[1:]]


def check(logprobs, expected, alternatives, tolerance):
    """Against rows of log-probabilities [tokens, V]; returns the largest difference."""
    worst = 0.0
    for one, row in zip(logprobs, expected, strict=True):
        assert len(one.top) == alternatives
        assert list(one.top) == sorted(one.top, key=lambda other: (-other.logprob, other.token))
        left = np.delete(row, [other.token for other in one.top])
        assert not one.top or left.max() <= one.top[-1].logprob + tolerance
        worst = max([worst, *(abs(other.logprob - row[other.token]) for other in (one, *one.top))])
    assert worst <= tolerance
    return worst


class TestRows:
    @pytest.mark.parametrize("size", [1, 2, 63, 64, 512, 1279, 1281, 151_937])
    @pytest.mark.parametrize("step", [0.0, 0.5], ids=["spread", "ties"])
    def test_values_and_order_are_those_of_a_stable_sort(self, size, step):
        random = np.random.default_rng(size)
        rows = (8 * random.standard_normal((3, size))).astype(np.float32)
        rows = np.round(rows / step).astype(np.float32) * np.float32(step) if step else rows
        tokens = random.integers(size, size=3).tolist()
        made = token_logprobs(lambda: rows, tokens, 20)
        expected = log_softmax(rows)
        for row, token, one, right in zip(rows, tokens, made, expected, strict=True):
            assert one.token == token
            assert [other.token for other in one.top] == np.argsort(-row, kind="stable")[:20].tolist()
            for other in (one, *one.top):
                assert other.logprob == pytest.approx(right[other.token], abs=1e-6)
                assert other.text is None

    def test_equal_rows_give_equal_bits_in_any_company(self):
        rows = np.random.default_rng(0).standard_normal((17, 151_937)).astype(np.float32)
        together = token_logprobs(lambda: rows, range(17), 3)
        assert together == tuple(token_logprobs(lambda r=r: rows[r : r + 1], [r], 3)[0] for r in range(17))
        assert together == token_logprobs(lambda: np.asfortranarray(rows), range(17), 3)

    def test_what_is_impossible_is_minus_infinity(self):
        row = np.full((1, 2000), -np.inf, np.float32)
        row[0, [7, 1999]] = 0.0
        (one,) = token_logprobs(lambda: row, [5], 3)
        assert one.logprob == -math.inf
        assert [other.token for other in one.top] == [7, 1999, 0]
        assert [other.logprob for other in one.top] == [-math.log(2), -math.log(2), -math.inf]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_rows_without_probabilities_raise_nothing(self, value):
        row = np.zeros((1, 2000), np.float32)
        row[0, 3:] = value
        (one,) = token_logprobs(lambda: row, [3], 2)
        assert isinstance(one, TokenLogprob)


class Noting(Delegate):
    """Notes how cycles are asked, and that no logits are read."""

    def __init__(self, backend):
        super().__init__(backend)
        self.asked = []

    def cycle(self, asked):
        self.asked.append(asked.logits)
        return self._backend.cycle(asked)


class TestLoop:
    def test_cycles_are_asked_once_each_and_only_when_the_request_asks(self):
        for options, wanted in ((Options(max_new_tokens=21), False), (ASKED, True)):
            backend = Noting(FakeBackend())
            steps = list(stream(backend, PROMPT, options))
            assert backend.asked == [wanted] * (len(steps) - 1)
            assert all(bool(step.logprobs) == wanted for step in steps)

    @pytest.mark.parametrize("options", [ASKED, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("constrained", [False, True], ids=["free", "grammar"])
    @pytest.mark.parametrize("right", range(SHAPE.block_size))
    def test_every_accept_length_gives_the_models_own(self, options, constrained, right):
        """Also where choices are masked: the values are those before the mask."""
        toy, runs = FakeBackend(), []
        for how in ({}, {"speculative": False}):
            controls = Controls(constraint=Stepped(Brittle((), None)) if constrained else None)
            tokens, logprobs, lengths = found(
                FakeBackend(right=lambda position: right), options=options, controls=controls, **how
            )
            rows = [toy._logits([*PROMPT, *tokens[:at]]) for at in range(len(tokens))]
            check(logprobs, log_softmax(rows), 5, 1e-6)
            if not how and not constrained and options is ASKED:
                assert lengths[0] == right + 1
            runs.append(logprobs)
        assert runs[0] == runs[1]

    @pytest.mark.parametrize("budget", range(1, 9))
    def test_tokens_that_are_cut_away_have_none(self, budget):
        whole = found(FakeBackend())
        tokens, logprobs, _ = found(FakeBackend(), options=replace(ASKED, max_new_tokens=budget))
        assert (tokens, logprobs) == (whole[0][:budget], whole[1][:budget])
        tokens, logprobs, _ = found(FakeBackend(), stop_token_ids=(whole[0][budget],))
        assert tokens == whole[0][: len(tokens)]
        assert logprobs == whole[1][: len(tokens)]
        ended = Controls(ends=lambda tokens: 1 if whole[0][budget] in tokens else None)
        tokens, logprobs, _ = found(FakeBackend(), controls=ended)
        assert logprobs == whole[1][: len(tokens)]

    def test_relaxed_acceptance_gives_those_of_the_tokens_that_stand(self):
        toy, controls = FakeBackend(), Controls(relaxation=Relaxation((61,), 60, 1e6))
        tokens, logprobs, lengths = found(FakeBackend(right=lambda position: 1), controls=controls)
        assert max(lengths) > 2  # drafts stood that are not the choices
        assert any(one.top[0].token != one.token for one in logprobs)
        check(logprobs, log_softmax([toy._logits([*PROMPT, *tokens[:at]]) for at in range(len(tokens))]), 5, 1e-6)


class TestGoldens:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("prompt", ["p0", "p1"])
    def test_they_are_those_of_the_golden_logits(self, name, prompt):
        file = golden(name)
        ids = file[f"{prompt}.prompt"].tolist()
        options = Options(max_new_tokens=64, logprobs=20)
        tokens, logprobs, _ = found(backend(name), ids, options)
        assert tokens == file[f"{prompt}.greedy_tokens"].tolist()
        rows = file[f"{prompt}.teacher_forced_logits"][len(ids) - 1 : len(ids) + 63]
        check(logprobs, log_softmax(rows), 20, TOLERANCE)


@pytest.mark.parametrize("drafter", drafters(0, 1, 8))
@pytest.mark.parametrize("name", NAMES)
def test_adversaries_and_grammars_on_a_pair_change_none(name, drafter):
    prompt, options = golden(name)["p1.prompt"].tolist(), replace(SAMPLED, logprobs=3)

    class Wide(Brittle):
        def allowed(self):
            return np.arange(512) < 60

    def constrained(backend, **how):
        return found(backend, prompt, options, controls=Controls(constraint=Stepped(Wide((), None))), **how)

    tokens, logprobs, _ = constrained(BACKENDS["engine"](name), speculative=False)
    assert max(tokens) < 60
    adversary = Adversary(BACKENDS["engine"](name), [*prompt, *tokens], drafters(0, 1, 8)[drafter])
    assert constrained(adversary)[:2] == (tokens, logprobs)
