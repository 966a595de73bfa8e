"""Does a drafter accept here what it accepted when its bundle was built: the self-test's prompt, run in real cycles.

The self-test replays passes along recorded tokens; this runs the loop's own cycles on the same prompt and judges what
comes of them, as a whole and at each position of a block that enough cycles have tried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import mean
from typing import Any

from edge_dflash.bundle.selftest import FLOOR_SHARE, SelfTest
from edge_dflash.decode.backend import Backend
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options

CYCLES = 12  # that must have tried a position, here and at build, for it to be judged
ERRORS = 2.0  # standard errors that a position's share may lie below FLOOR_SHARE of the one at build


@dataclass(frozen=True)
class AcceptanceCheck:
    """Accepted drafts next to those of the build; without a drafter or a record nothing is judged."""

    here: Drafting
    at_build: Drafting
    floor: float  # least accept length that passes
    unknown: str = ""  # why nothing is judged

    @property
    def accept_length(self) -> float:
        """Tokens of a cycle, mean; 0 without one."""
        return 1.0 + mean(self.here.accepted) if self.here.accepted else 0.0

    @property
    def accept_length_at_build(self) -> float:
        """The same at build."""
        return 1.0 + mean(self.at_build.accepted) if self.at_build.accepted else 0.0

    @property
    def below(self) -> tuple[int, ...]:
        """Positions, from 1 on, that many cycles tried and whose share lies clearly below that of the build."""
        found = []
        both = zip(self.here.positions, self.at_build.positions, strict=False)
        for position, ((tried, stood), (then, before)) in enumerate(both, 1):
            if min(tried, then) >= CYCLES:
                least = FLOOR_SHARE * before / then
                if stood / tried < least - ERRORS * math.sqrt(least * (1.0 - least) / tried):
                    found.append(position)
        return tuple(found)

    @property
    def ok(self) -> bool:
        """Whether accept length and positions pass, or there is nothing to judge."""
        return bool(self.unknown) or (self.accept_length >= self.floor and not self.below)

    @property
    def summary(self) -> str:
        """The numbers, in one line."""
        if self.unknown:
            return f"not judged: {self.unknown}"
        places = f"; too few accepted at {', '.join(map(str, self.below))}" if self.below else ""
        return (
            f"accept length {self.accept_length:.2f} on the self-test's prompt (at build "
            f"{self.accept_length_at_build:.2f}, at least {self.floor:.2f}){places}"
        )

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        same = {name: getattr(self, name) for name in ("ok", "accept_length", "accept_length_at_build", "floor")}
        return same | {
            "unknown": self.unknown or None,
            "acceptance": list(self.here.acceptance),
            "acceptance_at_build": list(self.at_build.acceptance),
            "positions_below": list(self.below),
        }


def check_acceptance(backend: Backend, recorded: SelfTest | None) -> AcceptanceCheck:
    """Run the prompt that the build recorded; the backend is empty (reset) before and afterwards."""
    if not backend.shape.drafts or recorded is None:
        why = "the build recorded no self-test" if backend.shape.drafts else "the bundle has no drafter"
        return AcceptanceCheck(Drafting(), Drafting(), 0.0, why)
    backend.reset()
    try:
        here = generate(backend, recorded.prompt, Options(max_new_tokens=len(recorded.tokens))).drafting
    finally:
        backend.reset()
    return AcceptanceCheck(here, recorded.drafting, recorded.accept_floor)
