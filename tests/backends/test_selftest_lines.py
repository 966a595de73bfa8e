"""The self-test's scored lines: log-probabilities of the build, compared at open, for faults that choose alike."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from golden_pairs import ENGINE, backend
from selftest_support import Damaged, backend_of

from edge_dflash.backends.selftest import check, run_selftest
from edge_dflash.bundle.reader import Bundle
from edge_dflash.bundle.selftest import LEAST_NATS, ScoredLine, dump_selftest, load_selftest, parse_selftest
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.delegate import Delegate
from edge_dflash.decode.replay import scored
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import BundleError, VerificationError
from edge_dflash.planner import Planner


@pytest.fixture(scope="module")
def bundle(shared, build_demo, whole_recording):
    return Bundle.open(shared("demo-bundle-whole", build_demo))


@pytest.fixture(scope="module")
def test(bundle):
    return load_selftest(bundle)


def wider(name, weight):
    """A fault that changes no token: all logits are 1.05 of what they were."""
    return replace(weight, global_scale=weight.global_scale * 1.05) if name.endswith("lm_head") else weight


def test_two_lines_are_recorded_of_prompt_and_answer(bundle, test):
    assert test.lines[0].tokens == test.prompt[-len(test.lines[0].tokens) :]
    assert test.lines[1].tokens == test.tokens[: len(test.lines[1].tokens)]
    assert [len(line.logprobs) for line in test.lines] == [2 * bundle.manifest.pair.rows + 1] * 2
    assert all(line.rounding > 0 for line in test.lines)
    with Planner(backend_of(bundle), None) as planner:
        for line in test.lines:
            assert tuple(one.logprob for one in planner.score(line.tokens).logprobs) == line.logprobs


def test_they_cost_two_verifies_each(bundle, test):
    class Counted(Delegate):
        verified, prefilled = 0, 0

        def verify(self, ids, lane=0, parents=None):
            self.verified += 1
            return super().verify(ids, lane, parents)

        def prefill(self, ids, lane=0, sight=None):
            self.prefilled += len(ids)
            return super().prefill(ids, lane, sight)

        def propose(self, anchor, lane=0):
            raise AssertionError("a drafter is asked")

    counted = Counted(backend_of(bundle))
    for line in test.lines:
        scored(counted, line.tokens)
    assert (counted.verified, counted.prefilled) == (4, 2)


@pytest.fixture(scope="module")
def same(bundle, test):
    return run_selftest(backend_of(bundle), test, exact=True)


def test_the_same_arithmetic_gives_the_same_and_another_one_passes(bundle, test, same):
    assert [line.moved for line in same.lines] == [0.0, 0.0]
    assert same.verdict == "identical"
    assert same.to_json()["lines"] == [{"ok": True, "moved": 0.0, "bound": line.bound} for line in same.lines]
    other = backend_of(bundle, precision=Precision("bfloat16", "bfloat16"))
    for line in test.lines:
        judged = line.judge(line.moved(scored(other, line.tokens)), exact=False)
        assert 0 < judged.moved < 0.6 * judged.bound


def test_a_fault_that_changes_no_choice_is_named(bundle, test, monkeypatch):
    damaged = backend_of(bundle, store=Damaged(bundle, wider))
    result = run_selftest(damaged, test)
    assert result.target_ok
    assert not result.differences
    assert result.drafter_ok
    assert result.verdict == "fault"
    assert "the target is not the one that was built: line 1: log-probabilities moved by " in result.diagnosis
    assert not replace(result, exact=True).lines_ok
    monkeypatch.setattr("edge_dflash.backends.selftest.replay", lambda bundle, backend: result)
    with pytest.raises(VerificationError, match="built: line 1: log-probabilities moved"):
        check(bundle, damaged)


def test_values_that_are_no_numbers_are_a_fault(test):
    line = test.lines[1]
    bound = 3 * line.rounding + LEAST_NATS
    for found, good in (
        (line.logprobs, True),
        ([math.nan, *line.logprobs[1:]], False),
        ([-math.inf, *line.logprobs[1:]], False),
        (np.add(line.logprobs, 0.99 * bound), True),
        (np.add(line.logprobs, 1.01 * bound), False),
    ):
        assert line.judge(line.moved(found), exact=False).ok == good
    assert line.judge(line.moved(line.logprobs), exact=True).identical
    assert not line.judge(1e-5, exact=True).ok


def test_a_file_without_them_loads_and_passes(bundle, test, same):
    older = replace(test, lines=())
    text = dump_selftest(older)
    assert "lines" not in json.loads(text)
    shape = PairShape.of(bundle.manifest.pair, bundle.manifest.max_context, bundle.manifest.prefill_chunk)
    assert parse_selftest(text, shape) == older
    assert replace(same, recorded=older, lines_moved=()).ok


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((ScoredLine((1,), (), 0.1),), "1 ids"),
        ((ScoredLine((1, 2), (-1.0, -1.0), 0.1),), "2 ids"),
        ((ScoredLine((1, 2), (-1.0,), 0.1),) * 3, r"lines\[2\]"),
        ((ScoredLine((1, 10**7), (-1.0,), 0.1),), "token id 10000000"),
        ((ScoredLine((1, -1), (-1.0,), 0.1),), "token id -1"),
        ((ScoredLine((1, 2), (-1.0,), -0.1),), "rounding"),
        ((ScoredLine((1,) * 100_000, (-1.0,) * 99_999, 0.1),), "100000 ids"),
    ],
)
def test_lines_that_cannot_be_are_refused(bundle, test, lines, why):
    shape = PairShape.of(bundle.manifest.pair, bundle.manifest.max_context, bundle.manifest.prefill_chunk)
    with pytest.raises(BundleError, match=why):
        parse_selftest(dump_selftest(replace(test, lines=lines)), shape)


def test_lines_of_any_length_are_scored_whole():
    inner = backend("qwen3_5", ENGINE)
    ids = list(range(3, 40))
    whole = scored(inner, ids)
    for count in (2, 3, inner.shape.verify_rows + 2, inner.shape.verify_rows + 3):
        assert scored(inner, ids[:count]) == whole[: count - 1]
