"""The number of drafts where tokens say what rows cost: targets with experts, by bytes of a published one."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from fakes import SHAPE, FakeBackend

from edge_dflash.bench.workload import reached
from edge_dflash.decode.backend import row_steps
from edge_dflash.decode.drafts import DraftChoice, Seconds, VaryingSeconds

MOST = 15
STEPS = [rows - 1 for rows in row_steps(MOST + 1)]
DRAFTER = 0.2  # seconds, where a plain token takes 1
EXPERT = 0.0315  # seconds of one more of 256 in all layers: 16 rows that choose 8 each alone take 3.96
PUBLISHED = [1.0, *reached("published", MOST)]
PROFILES = {"published": [after / before for before, after in pairwise(PUBLISHED)]}
PROFILES |= {f"{share:.0%}": [share] * MOST for share in (0.9, 0.7, 0.5, 0.0)}


def experts(rows, alike):
    """Of which ``rows`` read, a share of which are alike."""
    return alike * 8 + (1 - alike) * 256 * (1 - (1 - 8 / 256) ** rows)


def cost(drafts, alike, pace=1.0):
    """Seconds of drafting and of the verify."""
    return (pace * DRAFTER if drafts else 0.0), pace * (1.0 + EXPERT * (experts(drafts + 1, alike) - 8))


def tokens(shares, drafts):
    """Expected of a cycle."""
    expected = reach = 1.0
    for share in shares[:drafts]:
        reach *= share
        expected += reach
    return expected


class Plant:
    """Cycles of a made-up engine that was measured at load with rows of which ``alike`` chose the same."""

    def __init__(self, alike, seed, seconds=VaryingSeconds):
        self.random, self.choice = Random(seed), DraftChoice(MOST)
        self.choice.seconds = seconds({drafts: sum(cost(drafts, alike)) for drafts in STEPS})

    def run(self, shares, alike, cycles, pace=1.0):
        """Speed of so many cycles beside the best fixed number's, noise of the draws left out."""
        made = spent = 0.0
        for _ in range(cycles):
            drafts, accepted = self.choice.drafts, 0
            while accepted < drafts and self.random.random() < shares[accepted]:
                accepted += 1
            noise = self.random.gauss(1.0, 0.02) * (3.0 if self.random.random() < 0.005 else 1.0)
            propose, verify = cost(drafts, alike, pace)
            self.choice.record(drafts, drafts, accepted, propose * noise, verify * noise)
            made, spent = made + tokens(shares, drafts), spent + propose + verify
        return made / spent / max(tokens(shares, drafts) / sum(cost(drafts, alike, pace)) for drafts in STEPS)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def settled(shares, load, alike, seconds=VaryingSeconds):
    """Speed beside the best behind 100 cycles."""
    plants = [Plant(load, seed, seconds) for seed in range(6)]
    return mean(plant.run(shares, alike, 100) and plant.run(shares, alike, 600) for plant in plants)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("load", [0.0, 0.5, 1.0])
def test_the_chosen_number_is_near_the_best_whatever_the_rows_of_the_load_chose(load, alike, profile):
    assert settled(PROFILES[profile], load, alike) > (0.96 if PROFILES[profile][0] else 0.93)


def test_seconds_of_the_load_alone_would_be_believed_for_too_long():
    assert settled(PROFILES["70%"], 1.0, 0.0, Seconds) < 0.9
    assert settled(PROFILES["70%"], 0.0, 1.0, Seconds) < 0.9


@pytest.mark.parametrize("profile", ["published", "70%"])
def test_other_tokens_and_another_pace_are_followed(profile):
    shares = PROFILES[profile]
    for before, after in ((0.0, 1.0), (1.0, 0.0)):
        plants = [Plant(0.3, seed) for seed in range(6)]
        for plant in plants:
            plant.run(shares, before, 300)
            plant.run(shares, after, 150, 1.5)
        assert mean(plant.run(shares, after, 400, 1.5) for plant in plants) > 0.95


def test_one_row_costs_the_same_whatever_was_learned_of_others():
    seconds = VaryingSeconds({drafts: sum(cost(drafts, 1.0)) for drafts in STEPS})
    for _ in range(200):
        seconds.record(MOST, *cost(MOST, 0.0))
    assert seconds.of(MOST) == pytest.approx(sum(cost(MOST, 0.0)), rel=0.01)
    assert seconds.of(0) == pytest.approx(1.0, rel=0.01)
    for _ in range(200):
        seconds.record(MOST, *cost(MOST, 0.0, 2.0))
    assert seconds.of(0) == pytest.approx(2.0, rel=0.02)


def test_a_backend_says_whether_its_rows_vary():
    for varying, kind in ((True, VaryingSeconds), (False, Seconds)):
        choice = DraftChoice(SHAPE.drafts)
        choice.begin(FakeBackend(replace(SHAPE, varying=varying)), None)
        assert type(choice.seconds) is kind
