"""Choosing a mix: steps against every subset, ties, and the search for a KLD that was measured."""

from itertools import accumulate, product

import numpy as np
import pytest

from edge_dflash.builder.budget import MEASUREMENTS, Curve, Option, hull, steps
from edge_dflash.errors import BuildError

CHEAP, WIDE = Option(10, 1.0, ""), Option(20, 0.0, "bf16")


def random_units(seed, count=4):
    rng = np.random.default_rng(seed)
    units = {}
    for unit in range(count):
        sizes = np.cumsum(rng.integers(1, 20, 3)).tolist()
        klds = [*sorted(rng.random(2).tolist(), reverse=bool(rng.random() < 0.8)), 0.0]
        units[f"layers.{unit}.mlp"] = [Option(*one) for one in zip(sizes, klds, ("", "fp8", "bf16"), strict=True)]
    return units


def curve_of(units, kld=None):
    """The curve of units whose KLDs add up, with 5 bytes of other weights."""
    alone = sum(options[0].kld for options in units.values())
    size = 5 + sum(options[0].bytes for options in units.values())
    return Curve(steps(units), size, alone if kld is None else kld, alone)


def best(units, budget):
    """The least sum of KLDs that any choice of formats within a budget has."""
    mixes = product(*units.values())
    return min(sum(o.kld for o in mix) for mix in mixes if 5 + sum(o.bytes for o in mix) <= budget)


def left_of(curve, taken):
    return curve.kld - sum(step.saved for step in taken)


def test_the_hull_keeps_what_saves_less_a_byte_than_the_option_before():
    assert hull([WIDE, CHEAP, Option(15, 0.4, "fp8")]) == [CHEAP, Option(15, 0.4, "fp8"), WIDE]
    assert hull([CHEAP, Option(15, 0.6, "fp8"), WIDE]) == [CHEAP, WIDE]  # above the line
    assert hull([CHEAP, Option(15, 0.5, "fp8"), WIDE]) == [CHEAP, WIDE]  # on it
    assert hull([CHEAP, Option(15, 1.2, "fp8"), WIDE]) == [CHEAP, WIDE]  # worse than without
    assert hull([CHEAP, Option(20, 1.0, "bf16")]) == [CHEAP]


@pytest.mark.parametrize("seed", range(40))
def test_prefixes_are_the_best_of_all_mixes_of_their_size(seed):
    units = random_units(seed)
    curve = curve_of(units)
    sizes = list(accumulate((step.bytes for step in curve.steps), initial=curve.bytes))
    for count, size in enumerate(sizes):
        assert curve.within(size) == curve.steps[:count]
        assert left_of(curve, curve.steps[:count]) == pytest.approx(best(units, size), abs=1e-9)
        assert curve.predicted(curve.steps[:count]) == pytest.approx(left_of(curve, curve.steps[:count]), abs=1e-9)
    rates = [step.saved / step.bytes for step in curve.steps]
    assert rates == sorted(rates, reverse=True)
    assert all(step.bytes > 0 and step.saved > 0 for step in curve.steps)


@pytest.mark.parametrize("seed", range(40))
def test_a_budget_between_prefixes_is_filled(seed):
    units = random_units(seed)
    curve = curve_of(units)
    most = max(step.saved for step in curve.steps)
    for budget in range(curve.bytes, curve.bytes + sum(step.bytes for step in curve.steps) + 9, 3):
        taken = curve.within(budget)
        assert curve.bytes + sum(step.bytes for step in taken) <= budget
        assert best(units, budget) - 1e-9 <= left_of(curve, taken) <= best(units, budget) + most
        for unit in units:  # a unit's steps are taken in their order, none left out
            own = [step for step in curve.steps if step.unit == unit]
            assert [step for step in taken if step.unit == unit] == own[: sum(step.unit == unit for step in taken)]


def test_a_step_that_does_not_fit_leaves_room_for_others():
    units = {
        "wide": [Option(10, 1.0, ""), Option(40, 0.2, "fp8"), Option(41, 0.19, "bf16")],
        "small": [Option(10, 0.1, ""), Option(15, 0.0, "fp8")],
    }
    assert [step.unit for step in curve_of(units).within(30)] == ["small"]


def test_equal_steps_come_in_the_order_of_units():
    for names in (("b", "a", "c"), ("c", "b", "a")):
        assert [step.unit for step in steps({name: [CHEAP, WIDE] for name in names})] == list(names)


def test_a_budget_below_the_least_says_what_is():
    with pytest.raises(BuildError, match=r"--bytes-budget is 14, and a cycle reads 15 bytes .*give at least that"):
        curve_of({"a": [CHEAP, WIDE]}).within(14)


WAYS = {
    "as predicted": lambda share: share,
    "worse than predicted": lambda share: share**0.5,
    "far worse": lambda share: share**0.1,
    "better": lambda share: share**2,
    "uneven": lambda share: share * (1.3 if int(share * 50) % 2 else 0.8),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [1e-12, 0.01, 0.3, 2.0, 1e300])
def test_few_measurements_reach_a_target(way, target):
    curve = curve_of(random_units(3, count=60), kld=8.0)
    asked = []

    def measured(count):
        asked.append(count)
        share = curve.predicted(curve.steps[:count]) / curve.kld
        return curve.kld * WAYS[way](share) if share > 1e-12 else 0.0

    found = curve.reach(target, measured)
    assert len(asked) == len(set(asked)) <= MEASUREMENTS + 1
    count = min(count for count, kld in found.items() if kld <= target)
    if target > curve.kld:
        assert (asked, count) == ([], 0)
    if target == 1e-12:
        assert count == len(curve.steps)
    if way == "as predicted" and 0 < count < len(curve.steps):
        assert found[count] >= 0.95 * target or measured(count - 1) > target
    if way != "far worse" and target in (0.3, 2.0):
        assert found[count] > 0.5 * target


def test_a_target_that_no_mix_reaches_says_what_is():
    curve = curve_of(random_units(5))
    with pytest.raises(BuildError, match=r"--quality-target is 0.001, and with every unit .* KLD is 0.25; give at"):
        curve.reach(0.001, lambda count: 0.25)
    with pytest.raises(BuildError, match=r"KLD is 2; give"):
        Curve((), 5, 2.0, 0.0).reach(0.1, lambda count: 0.0)
