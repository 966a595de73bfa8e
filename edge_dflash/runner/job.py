"""A request on the engine: a generator that the worker steps through, from the first pass to the plan.

Knows sessions, the loop and the text of answers; knows nothing of queues or of who waits for the result.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, Protocol

from edge_dflash.decode.controls import Pace
from edge_dflash.decode.loop import Step, collect
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.result import Plan, PlanTimings, json_object, json_value
from edge_dflash.runner.answer import AnswerText, Reader, StopFinder
from edge_dflash.runner.prepare import Request
from edge_dflash.text.chat import Answer

_UNSTARTED = Step((), "cancelled", 0.0, 0.0)


class Place(Protocol):
    """Where a request's sequence lives. Called by the worker."""

    def open(self, manager: SessionManager) -> Session:
        """The session that the request goes on in."""
        ...

    def settle(self, session: Session, answer: Answer, *, committed: bool, thinking: bool) -> None:
        """The request has ended, somehow. ``committed``: tokens were; ``thinking``: inside a thinking span."""
        ...


class Observer(Protocol):
    """Who watches an engine. Called by its worker between two passes: must be quick and must not raise."""

    def started(self) -> None:
        """A request, or a small work between two, begins to run."""
        ...

    def step(self, step: Step) -> None:
        """Tokens were committed, or the request ends."""
        ...

    def ended(self) -> None:
        """It runs no more, however it ended."""
        ...


class Unwatched:
    """The observer when there is none."""

    def started(self) -> None:
        """See Observer."""

    def step(self, step: Step) -> None:
        """See Observer."""

    def ended(self) -> None:
        """See Observer."""


class Alone:
    """The place of a request that belongs to no conversation."""

    def open(self, manager: SessionManager) -> Session:
        """A session of its own."""
        return manager.open()

    def settle(self, session: Session, answer: Answer, *, committed: bool, thinking: bool) -> None:
        """Forget it."""
        session.close()


class Job:
    """One run of a request. ``cancelled`` and ``expired`` may be set by any thread."""

    def __init__(self, request: Request, place: Place, manager: SessionManager, pace: Pace, observer: Observer) -> None:
        self.request = request
        self.cancelled = request.ended == "cancelled"  # asked to end at the next commit
        self.expired = False  # its deadline passed while it waited: not the user's cancelling
        self._place = place
        self._manager = manager
        self._pace = pace
        self._observer = observer
        self._steps: list[Step] = []
        self._started = self._first_token = 0.0
        self._reused = 0

    def __call__(self) -> Generator[Step | None, Any, Plan]:
        """Run on the worker. Every step is committed before it is given; None between chunks of the prompt."""
        self._started = time.perf_counter()
        self._observer.started()
        try:
            return (yield from self._run())
        finally:
            self._observer.ended()

    def _run(self) -> Generator[Step | None, Any, Plan]:
        request = self.request
        session = self._place.open(self._manager)
        try:
            stream = session.stream(
                request.prompt,
                request.decode,
                speculative=request.options.speculative,
                controls=request.controls(self._pace, self._is_cancelled, self._finder()),
                keep=request.keep,
            )
            for step in stream:
                self._observer.step(step)
                if step.chunk:
                    yield None
                    continue
                if step.first:
                    self._first_token, self._reused = time.perf_counter(), stream.reuse.tokens
                self._steps.append(step)
                yield step
        finally:
            reader = self.reader()
            tokens = tuple(token for step in self._steps for token in step.tokens)
            reader(Step(tokens, "stop", 0.0, 0.0))  # also when it failed: what was committed counts
            self._place.settle(session, reader.answer, committed=bool(tokens), thinking=reader.thinking)
        return self._plan(self._steps, reader.answer)

    def reader(self) -> Reader:
        """Makes increments of the steps; each who reads them has one."""
        request, tokenizer = self.request, self.request.model.tokenizer
        if tokenizer is None:
            return Reader(None)
        options, stop = request.options, request.decode.stop_token_ids
        return Reader(AnswerText(tokenizer, request.prompt, stop, options.tools, options.stops))

    def unstarted(self) -> Plan:
        """The plan of a request that left the queue without having run."""
        self._started = time.perf_counter()
        step = Step((), "deadline", 0.0, 0.0) if self.expired else _UNSTARTED
        return self._plan([step], Answer())

    def _is_cancelled(self) -> bool:
        return self.cancelled and not self.expired

    def _finder(self) -> StopFinder | None:
        request, tokenizer = self.request, self.request.model.tokenizer
        if tokenizer is None or not request.options.stops:
            return None
        return StopFinder(tokenizer, request.prompt, request.options.stops)

    def _plan(self, steps: list[Step], answer: Answer) -> Plan:
        now, request, made = time.perf_counter(), self.request, collect(steps)
        first = self._first_token
        timings = PlanTimings(
            queue_seconds=self._started - request.began,
            prefill_seconds=made.timings.prefill_seconds,
            first_token_seconds=first - request.began if first else 0.0,
            decode_seconds=now - first if first else 0.0,
            total_seconds=now - request.began,
        )
        if request.options.schema is None:
            value = json_object(answer.content)
        else:
            value = json_value(answer.content) if made.finish_reason == "stop" else None
        return Plan(
            object=value,
            text=answer.content if request.model.tokenizer is not None else None,
            thinking=answer.thinking,
            tool_calls=answer.tool_calls,
            malformed=answer.malformed,
            tokens=made.tokens,
            finish_reason=made.finish_reason,
            prompt_tokens=len(request.prompt),
            reused_tokens=self._reused,
            accept_lengths=made.accept_lengths,
            accept_length=made.accept_length,
            timings=timings,
            speculative=request.options.speculative,
            lossy=request.relaxation is not None,
            relaxed_tokens=made.relaxed,
            logprobs=tuple(one for step in steps for one in step.logprobs),
        )
