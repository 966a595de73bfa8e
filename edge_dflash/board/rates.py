"""Rates that estimates stand on: each names the kernel that reached it, where, and how that is known.

A rate counts multiplications and additions of a multiprocessor in a clock, so that boards of one architecture differ by
their :class:`Chip` alone. It holds for one kernel and one use: another use of the same chip has another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# On this architecture; by the same kernel on a larger GPU, scaled by multiprocessors and clocks; less than such a proxy
# gave, because a product takes longer here.
How = Literal["measured", "by proxy", "assumed"]


@dataclass(frozen=True)
class Chip:
    """Multiprocessors of a GPU and their fastest clock."""

    multiprocessors: int
    hertz: float

    @property
    def clocks(self) -> float:
        """Clocks of all multiprocessors in a second."""
        return self.multiprocessors * self.hertz


H200 = Chip(132, 1.98e9)  # where all our kernels were timed


@dataclass(frozen=True)
class KernelRate:
    """What one kernel did: ``flops`` a clock and multiprocessor, passes of any number of rows."""

    kernel: str  # its file among backends/cuda/kernels
    flops: float
    how: How
    where: str

    def per_second(self, chip: Chip) -> float:
        """FLOP/s on ``chip``."""
        return self.flops * chip.clocks

    def by_rows(self, chip: Chip) -> list[tuple[int, float]]:
        """FLOP/s on ``chip`` by rows of a pass: 0, for any."""
        return [(0, self.per_second(chip))]

    def held(self, most: float) -> KernelRate:
        """The same where a kernel is trusted with ``most`` of a clock and multiprocessor."""
        return self if self.flops <= most else replace(self, flops=most, how="assumed")


@dataclass(frozen=True)
class RowRates:
    """What one kernel did in passes of some numbers of rows: a pass computes the rows of the next one of them.

    ``flops``: by rows, ascending, a clock and multiprocessor. More rows than the last are passes in turn.
    """

    kernel: str
    flops: tuple[tuple[int, float], ...]
    how: How
    where: str

    def seconds(self, weights: float, rows: float, chip: Chip) -> float:
        """Of a product of so many weights with each of ``rows`` rows."""
        turns, rest = divmod(rows, self.flops[-1][0])
        parts = [self.flops[-1]] * int(turns) + [next(point for point in self.flops if rest <= point[0])] * (rest > 0)
        return sum(2 * weights * computed / (flops * chip.clocks) for computed, flops in parts)

    def steps(self, most: int) -> tuple[int, ...]:
        """Rows up to ``most`` from which on a pass takes longer, each the last of those that cost the same."""
        last = self.flops[-1][0]
        return (*(rows for rows, _ in self.flops if rows < most), *range(2 * last, most, last), most)

    def by_rows(self, chip: Chip) -> list[tuple[int, float]]:
        """FLOP/s on ``chip`` by rows of a pass."""
        return [(rows, flops * chip.clocks) for rows, flops in self.flops]

    def held(self, most: float) -> RowRates:
        """See :meth:`KernelRate.held`."""
        if all(flops <= most for _, flops in self.flops):
            return self
        return replace(self, flops=tuple((rows, min(flops, most)) for rows, flops in self.flops), how="assumed")


def reached(kernel: str, per_second: float, where: str, how: How = "by proxy") -> KernelRate:
    """The rate of a kernel that did ``per_second`` FLOP/s on an H200."""
    return KernelRate(kernel, per_second / H200.clocks, how, where)
