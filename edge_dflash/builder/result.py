"""What a build gives back, and how it tells how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from edge_dflash.bundle.manifest import Trial
from edge_dflash.common.progress import Progress

BuildProgress: TypeAlias = Progress


@dataclass(frozen=True)
class BuildResult:
    """A finished build."""

    bundle: Path
    bytes: int  # of all files
    seconds: float
    plans: tuple[str, ...]  # TensorRT plan files that are there
    deferred: tuple[str, ...]  # plan files that the device has to build: edge-dflash build --finish
    warnings: tuple[str, ...]
    backends: tuple[str, ...]  # aboard
    active: str  # the one that runs it
    recipe: str
    trial: Trial | None = None  # of two backends, by build --finish
    nothing: str = ""  # why there was nothing to do


class Stage:
    """Progress of one stage, in bytes or as a share. The total is an estimate, so what is done is kept within it."""

    def __init__(self, report: BuildProgress, name: str, total: int) -> None:
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
