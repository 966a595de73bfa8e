"""A planner's number of drafts: asked for, chosen by what it measured, and told with the plan."""

import time

import pytest
from fakes import SHAPE, FakeBackend

from edge_dflash.decode import drafts
from edge_dflash.decode.delegate import Delegate
from edge_dflash.errors import RequestError
from edge_dflash.planner import Planner

PROMPT = (3, 1, 4)


@pytest.fixture
def plain():
    return Planner(FakeBackend(), None).plan(PROMPT, max_new_tokens=40, speculative=False)


@pytest.mark.parametrize("drafts", range(SHAPE.drafts + 1))
def test_a_number_that_is_asked_for_is_what_every_cycle_verifies(drafts, plain):
    backend = FakeBackend()
    planner = Planner(backend, None, drafts=drafts)
    assert planner.drafting == (drafts > 0)
    plan = planner.plan(PROMPT, max_new_tokens=40)
    assert ("propose" in backend.passes) == (drafts > 0)
    assert plan.tokens == plain.tokens
    assert set(plan.drafting.drafts) == {drafts}
    assert plan.timings.drafts == plan.drafting.mean == plan.drafting.usual == drafts
    assert set(plan.accept_lengths[:-1]) == {drafts + 1}
    assert plan.drafting.acceptance == (1.0,) * drafts
    assert plan.speculative


def test_all_drafts_are_verified_without_fallback():
    plan = Planner(FakeBackend(right=lambda position: 0), None, fallback=False).plan(PROMPT, max_new_tokens=30)
    assert set(plan.drafting.drafts) == {SHAPE.drafts}
    assert set(plan.drafting.accepted) == {0}
    assert plan.drafting.acceptance == (0.0,) * SHAPE.drafts


@pytest.mark.parametrize("drafts", [-1, 1.5, "2", True, SHAPE.drafts + 1])
def test_other_numbers_are_refused(drafts):
    with pytest.raises(RequestError, match=r"^drafts is .*; give|^drafts is .*accept"):
        Planner(FakeBackend(), None, drafts=drafts)


class Slow(Delegate):
    """A verify takes 10 ms and 2.5 ms a row, drafting 5 ms: far more than a busy machine adds."""

    def propose(self, anchor, lane=0):
        time.sleep(0.005)
        return super().propose(anchor, lane)

    def verify(self, ids, lane=0, parents=None):
        time.sleep(0.01 + 0.0025 * len(ids))
        return super().verify(ids, lane)


def test_a_planner_that_measured_verifies_as_many_as_pay(plain, monkeypatch):
    monkeypatch.setattr(drafts, "REPEATS", 7)  # as at load: of one alone, a busy machine makes anything
    for right in (0, SHAPE.drafts):
        backend = Slow(FakeBackend(right=lambda position, n=right: n))
        planner = Planner(backend, None)
        planner._engine.pace.begin(backend, None)
        plans = [planner.plan(PROMPT, max_new_tokens=40) for _ in range(3)]
        assert all(plan.tokens == plain.tokens for plan in plans)
        assert plans[-1].drafting.usual == right


def test_too_many_drafts_are_refused_before_anything_is_loaded(ids_bundle, monkeypatch):
    monkeypatch.setattr("edge_dflash.planner.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(RequestError, match="drafts is 99, a cycle of this bundle has 7"):
        Planner.open(ids_bundle, drafts=99)
