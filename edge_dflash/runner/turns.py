"""Whose step comes next, where several works run: one turn of the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from edge_dflash.runner.job import Work

AnyWork: TypeAlias = Work[Any, Any]


@dataclass(frozen=True)
class Turn:
    """Works that do a step one by one, then those whose cycle is one pass."""

    first: Sequence[AnyWork] = ()
    together: Sequence[AnyWork] = ()

    @property
    def works(self) -> tuple[AnyWork, ...]:
        """All of them."""
        return *self.first, *self.together


class Share:
    """The time that prompts have while other works decode."""

    def __init__(self, share: float) -> None:
        """``share``: of the time, above 0; 1: a step of a prompt between each two cycles."""
        self._cycles_a_prompt = 1.0 / share - 1.0  # seconds
        self._owed = 0.0  # to cycles, in seconds

    def forgive(self) -> None:
        """Nobody decodes to whom anything could be owed."""
        self._owed = 0.0

    @property
    def open(self) -> bool:
        """Whether a prompt may have a step now."""
        return self._owed <= 0.0

    def took(self, prompt_seconds: float, cycle_seconds: float) -> None:
        """Note the seconds of a turn with a cycle in it; 0 of a prompt where none had a step.

        An urgent prompt, which asks nobody, leaves no more than its last step to be made up for by others.
        """
        self._owed = max(0.0, self._owed - cycle_seconds, prompt_seconds * self._cycles_a_prompt)


def active_of(running: Sequence[AnyWork], lanes: int, patience: int) -> list[AnyWork]:
    """Those of the begun works, oldest first, that have the lanes: what cannot be set aside, then the most urgent."""
    return sorted(running, key=lambda work: (work.interruptible, -work.rank(patience)))[:lanes]


def turn_of(running: Sequence[AnyWork], lanes: int, patience: int, share: Share) -> Turn:
    """The next turn. What is over, or waits and would end now, ends before anything else runs.

    A work that needs the engine for itself has it. Of several prompts the most urgent one has a step, of equal ones the
    one that waits longest; one that is more urgent than all that decode has all the time it needs. Others wait while a
    deadline of one that decodes is near.
    """
    if all(work.alone or work.prompting for work in running):
        share.forgive()
    if len(running) == 1:
        return Turn(running, ()) if running[0].alone or running[0].prompting else Turn((), running)
    if over := [work for work in running if work.over]:
        return Turn(over)
    active = active_of(running, lanes, patience)
    aside = [work for work in running if work not in active]
    for work in aside:
        work.set_aside()
    if ending := [work for work in running if (work.prompting or work in aside) and work.would_end()]:
        return Turn(ending)
    if alone := [work for work in active if work.alone][:1]:
        return Turn(alone)
    prompts = [work for work in active if work.prompting]
    prompts = sorted(prompts, key=lambda work: (-work.rank(patience), work.served))[:1]
    together = [work for work in active if not work.prompting]
    ranks = [work.rank(patience) for work in together]
    urgent = [work for work in prompts if not ranks or work.rank(patience) > max(ranks)]
    if urgent or not share.open or any(work.hurried() for work in together):
        return Turn(urgent, together)
    return Turn(prompts, together)
