"""Asking an engine of this process: a task becomes jobs with streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from edge_dflash.common.rules import having
from edge_dflash.decode.options import Options
from edge_dflash.errors import RequestError
from edge_dflash.runner.astream import Unwanted
from edge_dflash.runner.engine import Engine
from edge_dflash.runner.job import Job
from edge_dflash.runner.planning import Planning, never
from edge_dflash.runner.request import Preparer
from edge_dflash.runner.stream import PlanStream
from edge_dflash.text.prompt import Task


class TakesTurns(Protocol):
    """A conversation, as what is asked of it needs it."""

    def _next(self, planner: object, task: Task, options: Options, began: float, unwanted: Unwanted) -> Job:
        """The next turn, ready to be queued."""


C = TypeVar("C", bound=TakesTurns)
_SESSION = having(("_next",), "one that session() of this planner made")


class LocalPlanning(Planning[C]):
    """Planning on an engine of this process."""

    _engine: Engine
    _preparer: Preparer

    def _ask(
        self, task: Task, session: C | None, options: Options, began: float, n: int = 1, unwanted: Unwanted = never
    ) -> Sequence[PlanStream]:
        """Prepare the next turn of a session, a plan, or candidates for it."""
        if session is not None:
            return [PlanStream(_SESSION.read(session, "session")._next(self, task, options, began, unwanted), self)]
        if options.seed + n > 2**64:
            raise RequestError(
                f"seed is {options.seed} for {n} candidates, which draw with it and the {n - 1} after it; "
                f"give 0 to 2**64 - {n}"
            )
        if n > 1 and options.prompt_logprobs:
            raise RequestError(f"n is {n} with prompt_logprobs; give 1, or leave prompt_logprobs out")
        request = self._preparer.prepare(task, options, began, unwanted)
        seeds = (replace(request.options, seed=options.seed + index) for index in range(1, n))
        requests = [request, *(replace(request, options=one) for one in seeds)]
        jobs = [Job(one, self._engine.manager, self._engine.pace) for one in requests]
        jobs[0].siblings = jobs[1:]
        return [PlanStream(job, self) for job in jobs]

    def encode(self, task: Task, *, thinking: bool = False, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a task. Raises RequestError when it is of another kind, empty, or cannot be turned into ids."""
        return self._preparer.prompter.prompt(task, Options(thinking=thinking, raw=raw)).ids  # nothing is queued
