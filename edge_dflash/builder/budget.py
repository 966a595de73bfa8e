"""Mixed precision by budget: which units of a target get a wider format than the recipe's. No torch, no files.

A unit is a part of a layer whose linears change their format together. Its formats are points, bytes of a cycle against
the KLD that it costs alone; along their lower convex hull each step saves less KLD a byte than the one before. Steps of
all units in that order pass the best mixes, if savings add up. That is assumed only to say which mixes are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import NamedTuple

from edge_dflash.errors import BuildError

MEASUREMENTS = 5  # of mixes, at most
NEAR = 0.95  # of the target: a mix from there on is good enough


class Option(NamedTuple):
    """A format of a unit."""

    bytes: int  # of a cycle
    kld: float  # of the unit alone, mean, nats
    form: str


class Widening(NamedTuple):
    """A unit gets a wider format."""

    unit: str
    form: str
    bytes: int  # more, > 0
    saved: float  # KLD of the unit alone, > 0


@dataclass(frozen=True)
class Point:
    """A mix of a curve."""

    bytes: int  # of a cycle
    ms: float | None  # that the board takes for them at least; None: no board is of this arch
    predicted: float  # mean KLD
    measured: float | None  # None: it was not
    units: Mapping[str, str]  # formats of those that are wider than in the point before


@dataclass(frozen=True)
class FormatMix:
    """What was chosen."""

    recipe: str  # its file
    bytes: int  # of a cycle
    kld: float  # of the weights alone, mean, measured
    tokens: int  # that it was measured on
    units: Mapping[str, str]  # formats of those that are wider than in the recipe that was given
    curve: tuple[Point, ...]


def hull(options: Sequence[Option]) -> list[Option]:
    """Those worth taking, by bytes: each saves KLD, and less a byte than the one before it."""
    found: list[Option] = []
    for option in sorted(options):
        if found and option.kld >= found[-1].kld:
            continue
        while len(found) > 1 and _rate(found[-2], option) >= _rate(found[-2], found[-1]):
            found.pop()
        found.append(option)
    return found


def _rate(one: Option, wider: Option) -> float:
    return (one.kld - wider.kld) / (wider.bytes - one.bytes)


def steps(units: Mapping[str, Sequence[Option]]) -> tuple[Widening, ...]:
    """Steps of all units by KLD saved a byte; of equal ones that of the first unit comes first."""
    found = [
        Widening(unit, wider.form, wider.bytes - one.bytes, one.kld - wider.kld)
        for unit, options in units.items()
        for one, wider in pairwise(hull(options))
    ]
    return tuple(sorted(found, key=lambda step: -step.saved / step.bytes))


@dataclass(frozen=True)
class Curve:
    """Bytes of a cycle against KLD."""

    steps: tuple[Widening, ...]
    bytes: int  # with no step taken
    kld: float  # measured with no step taken
    alone: float  # of all units alone, summed

    def predicted(self, taken: Sequence[Widening]) -> float:
        """KLD with some steps taken: of the whole they save the share that they save of the sum."""
        saved = sum(step.saved for step in taken)
        return max(0.0, self.kld * (1.0 - saved / self.alone)) if self.alone else self.kld

    def within(self, budget: int) -> tuple[Widening, ...]:
        """Each step that still fits, in their order; of a unit none after one that does not. Raises BuildError."""
        if (left := budget - self.bytes) < 0:
            raise BuildError(
                f"--bytes-budget is {budget}, and a cycle reads {self.bytes} bytes with every unit as the "
                "recipe has it; give at least that, or a recipe of fewer bits"
            )
        taken, passed = list[Widening](), set[str]()
        for step in self.steps:
            if step.bytes > left or step.unit in passed:
                passed.add(step.unit)
            else:
                taken.append(step)
                left -= step.bytes
        return tuple(taken)

    def reach(self, target: float, measured: Callable[[int], float]) -> dict[int, float]:
        """KLD by number of steps, as ``measured``, until few steps are known to give at most ``target``.

        Each guess lies on a power of the prediction that passes the nearest measured points on both sides. After
        MEASUREMENTS without success all steps are taken. Raises BuildError where these do not reach it.
        """
        found, low, high = {0: self.kld}, 0, 0 if self.kld <= target else len(self.steps)
        while high - low > 1 and len(found) <= MEASUREMENTS and found.get(high, 0.0) < NEAR * target:
            count = self._guess(target, low, high, found)
            found[count] = measured(count)
            low, high = (low, count) if found[count] <= target else (count, high)
        if high not in found:
            found[high] = measured(high)
        if found[high] > target:
            raise BuildError(
                f"--quality-target is {target:g}, and with every unit as wide as it can be the KLD is "
                f"{found[high]:.3g}; give at least that, or the target in BF16"
            )
        return found

    def _guess(self, target: float, low: int, high: int, found: Mapping[int, float]) -> int:
        first, last = (self.predicted(self.steps[:count]) for count in (low, high))
        above, below = found[low], found.get(high, 0.0)
        power = log(above / below) / log(first / last) if below > 0 and first > last > 0 else 1.0
        fits = (
            above * (self.predicted(self.steps[:at]) / (first or 1.0)) ** power <= target
            for at in range(low + 1, high - 1)
        )
        return low + 1 + next((more for more, fit in enumerate(fits) if fit), high - low - 2)
