"""Several answers to one prompt: it is computed once, and each candidate goes on from its state with another seed.

A :class:`Group` is the work that waits in the queue and computes the prompt but its last token; its candidates are
ordinary jobs that run beside each other when it has ended. Each has exactly the tokens of a request alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from edge_dflash.decode.controls import Controls, Pace
from edge_dflash.decode.loop import Step, turns
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.result import Plan
from edge_dflash.runner.failures import another
from edge_dflash.runner.job import Home, Job, Work
from edge_dflash.runner.request import Prepared
from edge_dflash.runner.ticket import Ticket
from edge_dflash.text.chat import Answer


class _Heir(Home):
    """The session that a group leaves to one of its candidates."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def open(self, manager: SessionManager) -> Session:
        session, self.session = self.session, None
        return session or manager.open()


class Candidate(Job):
    """One of the answers. The first one's plan has the cost of the prompt; the others found it there."""

    def __init__(self, request: Prepared, manager: SessionManager, pace: Pace) -> None:
        self.heir = _Heir()
        self.prompt_cost: tuple[float, float, int] | None = None  # of the first one: begin, seconds, tokens reused
        self._whole = False  # whether its session lacks the last token of the prompt only
        super().__init__(request, self.heir, manager, pace)

    @property
    def prompting(self) -> bool:  # type: ignore[override]  # as that of a job
        """See Work. The last token of all candidates is computed in one turn."""
        return not self._whole and super().prompting

    def inherit(self) -> None:
        """Begin, unless it has ended: the prompt was computed."""
        self._whole = True
        if self.ticket.done:
            self.heir.session = None
        else:
            self.ticket._start()

    def take(self, step: Step | None) -> Step | None:
        """See Job."""
        if step is not None and step.chunk:  # what it inherited was lost
            self._whole = False
        return super().take(step)

    def _plan(self, steps: list[Step], answer: Answer) -> Plan:
        plan = super()._plan(steps, answer)
        if self.prompt_cost is None or not plan.tokens:
            return plan
        (began, seconds, reused), timings = self.prompt_cost, plan.timings
        queued, seconds = began - self.request.began, timings.prefill_seconds + seconds
        return replace(
            plan, reused_tokens=reused, timings=replace(timings, queue_seconds=queued, prefill_seconds=seconds)
        )


class Group(Work[None, None]):
    """The prompt of several candidates, which differ in their seeds."""

    alone = False
    prompting = True

    def __init__(self, requests: Sequence[Prepared], manager: SessionManager, pace: Pace) -> None:
        """``manager`` and ``pace`` are the engine's."""
        first, self._manager, self._pace = requests[0], manager, pace
        self.candidates = [Candidate(request, manager, pace) for request in requests]
        options = first.options
        super().__init__(self._fill, priority=options.priority, caller=options.caller, deadline=first.deadline)
        self._request = first
        self._session: Session | None = None

    @property
    def cancelled(self) -> bool:  # set for all, or by each of them
        """Whether nobody wants it any more."""
        return self._cancelled or all(one.cancelled for one in self.candidates)

    @cancelled.setter
    def cancelled(self, wanted: bool) -> None:
        self._cancelled = wanted

    @property
    def tickets(self) -> tuple[Ticket[Any, Any], ...]:
        """See Work."""
        return (self.ticket, *(one.ticket for one in self.candidates))

    def _fill(self) -> Generator[Any, Any, None]:
        """Compute the prompt but its last token, and leave its state to the candidates."""
        began, seconds, session = time.perf_counter(), 0.0, self._manager.open()
        prompt, self._session = self._request.pictured, session
        if self._manager.find(session, prompt, counted=False)[0].prefilled == 1:  # each candidate finds it
            return
        session.heirs = [self._manager.open() for _ in self.candidates]
        for candidate, heir in zip(self.candidates, session.heirs, strict=True):
            candidate.heir.session = heir
        steps = turns(session, self._request, Controls(deadline=self.deadline, pace=self._pace))
        with closing(session), closing(steps):
            entered = began
            for step in steps:
                seconds += time.perf_counter() - entered
                yield step
                entered = time.perf_counter()
            seconds += time.perf_counter() - entered
        self.candidates[0].prompt_cost = began, seconds, session.reuse.tokens

    def take(self, step: Step | None) -> None:
        """Nothing of it is given."""

    def set_aside(self) -> None:
        """See Work."""
        if self._session is not None:
            self._session.resting = True

    def goes_on_without(self, ticket: Ticket[Any, Any]) -> bool:
        """End one candidate; whether there is another one."""
        ticket._give_up()
        return any(not one.ticket.done for one in self.candidates)

    def left(self) -> Sequence[Work[Any, Any]]:
        """See Work."""
        if not self.ticket.done:
            return (self,)
        for one in self.candidates:
            one.inherit()
        return [one for one in self.candidates if not one.ticket.done]

    def fail(self, error: BaseException) -> None:
        """See Work: each candidate has another error object."""
        super().fail(error)
        for one in self.candidates:
            if not one.ticket.done:
                one.ticket._fail(another(error))

    def give_up(self) -> None:
        """See Work."""
        super().give_up()
        for one in self.candidates:
            one.expired = self.expired
            if not one.ticket.done:
                one.ticket._give_up()
