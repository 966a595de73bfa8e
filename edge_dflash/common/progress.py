"""How work that takes seconds or minutes tells how far it is. How that is shown is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]  # (stage, done, total); total 0: begun, its length is not known

# Stages of a bundle that is opened; those of a build are named where they begin.
CHECKING, LOADING, SELF_TEST = "checking files", "loading", "self-test"
IN_BYTES = frozenset(
    {"weights", "checking", CHECKING}
)  # stages that count bytes; of others only the share has a meaning


def unheard(stage: str, done: int, total: int) -> None:
    """The progress when nobody listens."""


class Stage:
    """Progress of one stage, in bytes or as a share. The total is an estimate, so what is done is kept within it."""

    def __init__(self, report: Progress, name: str, total: int) -> None:
        self._report, self._name, self._total, self._done = report, name, total, 0
        report(name, 0, total)

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        self._report(self._name, min(self._done, self._total), self._total)

    def share(self, done: int, total: int) -> None:
        """Set the part that is done."""
        self._done = 0
        self.advance(self._total * done // max(1, total))

    def finish(self) -> None:
        """Report that all is done."""
        self._report(self._name, self._total, self._total)
