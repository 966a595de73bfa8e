"""The number of drafts that a cycle verifies: chosen well, followed when it changes, and no matter for the tokens."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from fakes import SHAPE, FakeBackend

from edge_dflash.bench.workload import reached
from edge_dflash.checks.lossless import ByTurns
from edge_dflash.decode.controls import Controls, Pace
from edge_dflash.decode.drafts import (
    FIRST,
    REPEATS,
    START,
    WEIGHT,
    Acceptance,
    DraftChoice,
    Drafting,
    Seconds,
    VaryingSeconds,
    draft_choice,
    measure,
    share_of,
)
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.decode.shape import row_steps
from edge_dflash.errors import RequestError

MOST = 15
STEPS = [rows - 1 for rows in row_steps(MOST + 1)]


def dense(drafts):
    """Rows are nearly free; a drafter's pass costs 12 %."""
    return 1.12 + 0.004 * drafts if drafts else 1.0


def experts(drafts):
    """16 rows cost four times one."""
    return 1.0 + 0.2 * drafts + 0.15 * (drafts > 0)


def few_experts(drafts):
    """The same, but rows soon share experts."""
    reached = (1 - math.exp(-drafts / 6)) / (1 - math.exp(-15 / 6))
    return 1.0 + 3.0 * reached + 0.15 * (drafts > 0)


COSTS = {"dense": dense, "experts": experts, "few": few_experts}


def passes(cost):
    """Seconds of drafting, a tenth of a cycle, and of the verify."""
    return lambda drafts: (0.1 * cost(drafts), 0.9 * cost(drafts)) if drafts else (0.0, cost(0))


def tokens(shares, drafts):
    """Expected of a cycle; ``shares``: acceptance by position."""
    expected = reach = 1.0
    for share in shares[:drafts]:
        reach *= share
        expected += reach
    return expected


class Plant:
    """Cycles of a made-up engine: a profile of acceptance, and times that are noisy and now and then far too long."""

    def __init__(self, seed, choice, numbers):
        self.random, self.choice, self.numbers = Random(seed), choice, numbers

    def run(self, shares, cycles, cost):
        """Speed of so many cycles next to that of the best fixed number, noise of the draws left out."""
        made = spent = 0.0
        for _ in range(cycles):
            drafts, accepted = self.choice.drafts, 0
            while accepted < drafts and self.random.random() < shares[accepted]:
                accepted += 1
            noise = self.random.gauss(1.0, 0.02) * (3.0 if self.random.random() < 0.005 else 1.0)
            propose, verify = cost(drafts)
            self.choice.record(drafts, drafts, accepted, propose * noise, verify * noise)
            made, spent = made + tokens(shares, drafts), spent + propose + verify
        return made / spent / max(tokens(shares, drafts) / sum(cost(drafts)) for drafts in self.numbers)


def plants(name, count=6):
    cost, numbers = COSTS[name], range(MOST + 1)
    choices = [DraftChoice(MOST, {k: cost(k) for k in STEPS}) for _ in range(count)]
    return [Plant(seed, choice, numbers) for seed, choice in enumerate(choices)], passes(cost)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
@pytest.mark.parametrize("cost", COSTS)
def test_the_chosen_number_is_within_3_percent_of_the_best_fixed_one_after_64_cycles(cost, share):
    made, seconds = plants(cost)
    assert mean(one.run([share] * MOST, 64, seconds) and one.run([share] * MOST, 400, seconds) for one in made) > 0.97


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.5), (0.5, 0.9), (0.05, 0.9), (0.3, 0.7)])
@pytest.mark.parametrize("told", [None, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("cost", COSTS)
def test_another_acceptance_is_followed(cost, told, before, after):
    """Whatever the accept length at build was: a drafter that was no good once may be good on other text."""
    made, seconds = plants(cost)
    for plant in made:
        if told is not None:
            plant.choice.acceptance.begin(told)
        plant.run([before] * MOST, 300, seconds)
        plant.run([after] * MOST, 250, seconds)
    assert mean(plant.run([after] * MOST, 400, seconds) for plant in made) > 0.97


@pytest.mark.parametrize("cost", COSTS)
def test_a_drafter_that_is_never_right_costs_little(cost):
    made, seconds = plants(cost)
    for plant in made:
        plant.run([0.0] * MOST, 64, seconds)
    assert mean(plant.run([0.0] * MOST, 1000, seconds) for plant in made) > 0.96


def test_seconds_that_were_not_measured_are_learned_and_plain_decoding_is_taken_for_a_verify():
    choice = DraftChoice(MOST)
    for _ in range(8):
        choice.record(MOST, MOST, 0, 0.5, 1.0)
    assert choice.drafts == 0
    choice = DraftChoice(MOST)
    for _ in range(50):
        choice.record(MOST, MOST, 4, 0.5, 1.0)
    assert choice.drafts > 0


def test_one_very_long_cycle_changes_little():
    seconds = Seconds({3: 2.0, 7: 4.0})
    for _ in range(10):
        seconds.record(3, 1.0, 1.0)
    seconds.record(3, 1.0, 1000.0)
    assert seconds.of(3) == pytest.approx(2.0, rel=0.11)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_an_accept_length_that_was_seen_counts_until_cycles_have_run(share):
    assert share_of(tokens([share] * 15, 15), 15) == pytest.approx(share, abs=1e-5)
    acceptance, unknown = Acceptance(15), Acceptance(15)
    acceptance.begin(tokens([share] * 15, 15))
    first = acceptance.tokens()[1] - 1.0
    assert first == pytest.approx((START * share + WEIGHT * FIRST) / (START + WEIGHT), abs=1e-4)
    for _ in range(1000):
        acceptance.record(0, 0)
    assert acceptance.tokens() == pytest.approx(unknown.tokens(), abs=1e-3)  # tried again


def test_cycles_are_measured_on_an_empty_backend_that_is_empty_again(monkeypatch):
    monkeypatch.setattr("edge_dflash.decode.drafts.REPEATS", REPEATS)  # as at load, where other tests measure less
    backend = FakeBackend()
    found = measure(backend)
    assert list(found) == [rows - 1 for rows in row_steps(SHAPE.drafts + 1)]
    assert all(seconds > 0.0 for seconds in found.values())
    assert backend.length() == 0
    assert measure(FakeBackend(replace(SHAPE, max_context=8))) == {}


def test_a_number_can_be_asked_for():
    assert draft_choice(7, 3, measured=True) == 3
    assert draft_choice(7, 0, measured=False) == 0
    assert draft_choice(7, None, measured=False) is None
    assert isinstance(draft_choice(7, None, measured=True), DraftChoice)
    with pytest.raises(RequestError, match=r"drafts is 8, a cycle of this bundle has 7; give 0 to 7, or None"):
        draft_choice(7, 8, measured=True)


class AnyNumber(DraftChoice):
    """Another number for every cycle."""

    def record(self, *found):
        super().record(*found)
        self.drafts = Random(str(found)).randrange(SHAPE.drafts + 1)


@pytest.mark.parametrize("right", range(SHAPE.drafts + 1))
@pytest.mark.parametrize("options", [Options(), Options(temperature=1.5, top_k=30, top_p=0.9, seed=5)], ids=str)
def test_no_number_changes_a_token(options, right):
    options = replace(options, max_new_tokens=40)
    plain = generate(FakeBackend(), (3, 1, 4), replace(options, speculative=False))
    assert plain.drafting.drafts == plain.drafting.accepted == (0,) * 39
    for pace in (Pace(), *(Pace(k) for k in range(SHAPE.drafts + 1)), Pace(AnyNumber(SHAPE.drafts))):
        found = generate(FakeBackend(right=lambda _: right), (3, 1, 4), options, controls=Controls(pace=pace))
        assert found.tokens == plain.tokens
        pairs = zip(found.drafting.drafts, found.drafting.accepted, strict=True)
        assert options.temperature or all(accepted == min(drafts, right) for drafts, accepted in pairs)
    turns = generate(ByTurns(FakeBackend(right=lambda _: right)), (3, 1, 4), options)
    assert turns.tokens == plain.tokens
    assert set(turns.drafting.drafts) == set(range(SHAPE.drafts + 1))


def test_acceptance_of_a_request_is_counted_by_position():
    drafting = Drafting(drafts=(4, 4, 2, 0, 4), accepted=(4, 1, 2, 0, 0))
    assert drafting.positions == ((4, 3), (4, 2), (3, 1), (3, 1))
    assert drafting.acceptance == (0.75, 0.5, 1 / 3, 1 / 3)
    assert (drafting.usual, drafting.mean) == (4, 2.8)
    assert (Drafting().usual, Drafting().mean, Drafting().acceptance) == (0, 0.0, ())


# targets with experts: tokens say what rows cost, by bytes of a published one ------------------------------

DRAFTER = 0.2  # seconds, where a plain token takes 1
EXPERT = 0.0315  # seconds of one more of 256 in all layers: 16 rows that choose 8 each alone take 3.96
PUBLISHED = [1.0, *reached("published", MOST)]
PROFILES = {"published": [after / before for before, after in pairwise(PUBLISHED)]}
PROFILES |= {f"{share:.0%}": [share] * MOST for share in (0.9, 0.7, 0.5, 0.0)}


def read(rows, alike):
    """Of which ``rows`` read, a share of which are alike."""
    return alike * 8 + (1 - alike) * 256 * (1 - (1 - 8 / 256) ** rows)


def cost(drafts, alike, pace=1.0):
    """Seconds of drafting and of the verify."""
    return (pace * DRAFTER if drafts else 0.0), pace * (1.0 + EXPERT * (read(drafts + 1, alike) - 8))


def varying(load, seed):
    """An engine that was measured at load with rows of which ``load`` chose the same experts."""
    choice = DraftChoice(MOST)
    choice.seconds = VaryingSeconds({drafts: sum(cost(drafts, load)) for drafts in STEPS})
    return Plant(seed, choice, STEPS)


def settled(shares, load, alike):
    """Speed next to the best after 100 cycles."""
    made, now = [varying(load, seed) for seed in range(6)], partial(cost, alike=alike)
    return mean(plant.run(shares, 100, now) and plant.run(shares, 600, now) for plant in made)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("load", [0.0, 0.5, 1.0])
def test_the_chosen_number_is_near_the_best_whatever_the_rows_of_the_load_chose(load, alike, profile):
    assert settled(PROFILES[profile], load, alike) > (0.96 if PROFILES[profile][0] else 0.93)


@pytest.mark.parametrize("profile", ["published", "70%"])
def test_other_tokens_and_another_pace_are_followed(profile):
    shares = PROFILES[profile]
    for before, after in ((0.0, 1.0), (1.0, 0.0)):
        made, now = [varying(0.3, seed) for seed in range(6)], partial(cost, alike=after, pace=1.5)
        for plant in made:
            plant.run(shares, 300, partial(cost, alike=before))
            plant.run(shares, 150, now)
        assert mean(plant.run(shares, 400, now) for plant in made) > 0.95


def test_a_backend_says_whether_its_rows_vary():
    for varying, kind in ((True, VaryingSeconds), (False, Seconds)):
        choice = DraftChoice(SHAPE.drafts)
        choice.begin(FakeBackend(replace(SHAPE, varying=varying)), None)
        assert type(choice.seconds) is kind
