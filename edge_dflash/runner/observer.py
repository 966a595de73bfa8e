"""Who watches an engine."""

from __future__ import annotations

from typing import Protocol

from edge_dflash.decode.loop import Step


class Observer(Protocol):
    """Who watches an engine. Called by it between two passes, on its thread: must be quick, and wait for no request.

    A subclass overrides what it wants to be told. What it raises ends nothing.
    """

    def started(self) -> None:
        """A request, or a small work between two, begins to run."""
        return

    def step(self, step: Step) -> None:
        """Tokens were committed, or the request ends."""
        return

    def passed(self, lanes: int, rows: int) -> None:
        """A cycle ran, of one lane or of several: its verify pass had so many rows."""
        return

    def aside(self) -> None:
        """A running request gives its lane to a more urgent one."""
        return

    def ended(self) -> None:
        """It runs no more, however it ended."""
        return


OBSERVED = tuple(name for name in vars(Observer) if not name.startswith("_"))
