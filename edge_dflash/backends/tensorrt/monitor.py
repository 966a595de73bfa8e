"""TensorRT's progress as one number. Phases nest and their number is TensorRT's own affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Phases:
    """Phases that run, innermost last. A step of a phase counts as an equal share of it."""

    def __init__(self) -> None:
        self._open: list[tuple[str, int, int]] = []  # name, steps done, steps
        self._most = 0.0

    def start(self, name: str, steps: int) -> None:
        """A phase inside those that run."""
        self._open.append((name, 0, max(1, steps)))

    def step(self, name: str, step: int) -> None:
        """Step ``step`` of a phase is done, counted from 0."""
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == name:
                self._open[index] = (name, step + 1, self._open[index][2])
                return

    def finish(self, name: str) -> None:
        """The innermost phase of this name is done."""
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == name:
                del self._open[index]
                return

    @property
    def share(self) -> float:
        """Share of the build that is done; never falls."""
        done, width = 0.0, 1.0
        for _, steps_done, steps in self._open:
            done += width * min(steps_done, steps) / steps
            width /= steps
        self._most = max(self._most, min(done, 1.0))
        return self._most


def monitor(trt: Any, advance: Callable[[float], bool]) -> Any:
    """A progress monitor. ``advance`` is told the share that is done and returns False to stop the build."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._phases = Phases()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._phases.start(phase_name, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            self._phases.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._phases.step(phase_name, step)
            return advance(self._phases.share)

    return Monitor()
