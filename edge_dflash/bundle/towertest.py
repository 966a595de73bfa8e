"""The part of a self-test that is about the vision tower: a picture, and its rows as they were at build.

The picture is made by arithmetic and has no file. A row is kept as sums over all of its columns with pseudo-random
signs, so that every weight of the tower takes part and a test of a tower with thousands of columns stays small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.model.specs import PatchSpec
from edge_dflash.pictures.picture import PatchedPicture

SUMS = 24  # of each row
ROUNDING = 3.0  # times the rounding seen at build: the most that the rows of another arithmetic may move
EQUAL = 1e-9  # of the spread: sums of equal rows
BLOCKS = (2, 10)  # rows of the language model of the picture, height by width


def chart(spec: PatchSpec) -> PatchedPicture:
    """The test's picture: waves of another length and phase in each patch and channel."""
    grid, area = (BLOCKS[0] * spec.merge, BLOCKS[1] * spec.merge), spec.patch**2
    patch, channel, pixel = np.indices((grid[0] * grid[1], 3, area))
    waves = np.sin((patch + 1) * 0.7 + (channel + 1) * 1.3 + pixel * (0.05 + 0.01 * patch + 0.03 * channel))
    levels = np.rint(127.5 + 127.5 * waves).astype(np.uint8).reshape(-1, 3 * area)
    return PatchedPicture(levels, grid, spec)


@dataclass(frozen=True)
class TowerTest:
    """The rows of the chart at build."""

    sums: tuple[tuple[float, ...], ...]  # [rows, SUMS]
    spread: float  # root mean square of the sums around the mean row
    rounding: float  # share of the spread by which they move when activations are not rounded to BF16

    @classmethod
    def of(cls, rows: npt.NDArray[np.float32], unrounded: npt.NDArray[np.float32]) -> TowerTest:
        """By the rows [tokens, H] that the tower gives, and those it gives with activations in float32."""
        sums = _sums(rows)
        spread = float(_rms(sums - sums.mean(0)))
        test = cls(tuple(map(tuple, sums.tolist())), spread, 0.0)
        return cls(test.sums, spread, test.moved(unrounded))

    def moved(self, rows: npt.NDArray[np.float32]) -> float:
        """How far other rows stand from these, as a share of the spread; NaN where they are not numbers."""
        off = _rms(_sums(rows) - np.array(self.sums))
        return off / self.spread if self.spread > 0 else (math.inf if off else 0.0)

    def judge(self, rows: npt.NDArray[np.float32], *, exact: bool) -> TowerResult:
        """Compare rows [tokens, H]; ``exact``: they must be the same."""
        return TowerResult(self.moved(rows), EQUAL if exact else ROUNDING * self.rounding + EQUAL)

    def fits(self) -> bool:
        """Whether it could be the test of a tower."""
        shape = len(self.sums) == BLOCKS[0] * BLOCKS[1] and {len(row) for row in self.sums} == {SUMS}
        return shape and self.spread > 0 and self.rounding >= 0


@dataclass(frozen=True)
class TowerResult:
    """The rows of the chart here against those at build."""

    moved: float  # share of their spread; NaN when one is not a number
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the tower passes."""
        return self.moved <= self.bound  # False for NaN

    @property
    def identical(self) -> bool:
        """Whether nothing differs."""
        return self.moved <= EQUAL

    @property
    def summary(self) -> str:
        """The number in a few words."""
        return f"the tower's rows moved by {self.moved:.2%} of their spread (at most {self.bound:.2%})"

    @property
    def fault(self) -> str:
        """What is wrong."""
        return f"the vision tower is not the one that was built: {self.summary}"

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {"ok": self.ok, "moved": self.moved if math.isfinite(self.moved) else None, "bound": self.bound}


def _sums(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Sums [rows, SUMS] of each row's columns with signs, in float64."""
    columns = np.arange(rows.shape[1], dtype=np.uint32)
    signs = [((columns * np.uint32(2654435761) >> np.uint32(7 + one)) & 1) * 2.0 - 1.0 for one in range(SUMS)]
    return np.stack([(rows.astype(np.float64) * sign).sum(1) for sign in signs], 1)


def _rms(values: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean()))
