"""A request from the queue to its plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Protocol

from edge_dflash.decode.controls import Controls, Pace
from edge_dflash.decode.generation import collect
from edge_dflash.decode.loop import DecodeSteps, Step, decode_steps
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.result import Plan, PlanTimings, json_object, json_value
from edge_dflash.runner.answer import AnswerReader
from edge_dflash.runner.request import Ended, Prepared
from edge_dflash.runner.stream import Ticket
from edge_dflash.text.chat import Answer


class Settled(Protocol):
    """Told of a request that ran, when it has ended somehow."""

    def __call__(self, answer: Answer, *, committed: bool, thinking: bool) -> None:
        """``committed``: tokens were; ``thinking``: the answer was cut inside a thinking span."""


class Job:
    """One request: where it stands in queue and lanes, its steps, and the ticket of whoever waits for its plan.

    A job may have siblings, candidates for the same answer. They take one place in the queue, the first of them
    computes the prompt but its last token, and each goes on from that state: its tokens are those of a request alone.
    """

    def __init__(
        self,
        request: Prepared,
        manager: SessionManager,
        pace: Pace,
        session: Session | None = None,
        settled: Settled | None = None,
    ) -> None:
        """``manager`` and ``pace`` are the engine's. None as ``session``: one that ends with the job."""
        options, self.request = request.options, request
        self.priority, self.caller, self.deadline = options.priority, options.caller, request.deadline
        self.ticket: Ticket[Step] = Ticket(f"the request of {self.caller!r}" if self.caller else "the request")
        self.cancelled = False  # set by any thread: end at the next commit
        self.siblings: Sequence[Job] = ()  # until the prompt that they share is computed
        self.steps: Generator[Any, Any, None] | None = None  # of the shared prompt, then of its answer, while it runs
        self.answers = False  # whether it has a lane for its own answer: before, it may end at any time
        self.prompting = True  # whether its next step is of its prompt
        self.served = 0.0  # time.perf_counter() of its lane, then of its newest step
        self.timer: threading.Timer | None = None  # of its deadline, while it waits
        self._manager, self._pace = manager, pace
        self._session, self._settled = session or manager.open(), settled
        self._shared: Session | None = None  # that computes the prompt for its siblings, too
        self._shared_seconds = 0.0
        self._made: list[Step] = []
        self._started = self._first_token = 0.0  # time.perf_counter()
        self._reused = 0  # tokens of the prompt

    @property
    def group(self) -> tuple[Job, ...]:
        """Itself and its siblings."""
        return self, *self.siblings

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it or one of its siblings."""
        return any(not one.ticket.done for one in self.group)

    def would_end(self) -> bool:
        """Whether it would end now, without a pass."""
        return self.cancelled or (self.deadline is not None and time.perf_counter() >= self.deadline)

    def hurried(self) -> bool:
        """Whether its deadline leaves no room for a step of another's prompt before its next cycle."""
        if self.deadline is None:
            return False
        prompt = max(self._pace.prefill_seconds(self._manager.backend.shape.prefill_chunk), self._pace.towers.longest)
        return time.perf_counter() + prompt + self._pace.cycle_seconds(speculative=True) > self.deadline

    # on the engine's thread -------------------------------------------------------------------------------------------

    def begin(self) -> DecodeSteps:
        """The steps of the prompt that it shares, which end with it; else of its answer."""
        self._started = self._started or time.perf_counter()
        if self.siblings:
            return self._shared_prompt(self.group)
        return decode_steps(self._session, self.request, self.request.controls(self._pace, lambda: self.cancelled))

    def _shared_prompt(self, group: Sequence[Job]) -> DecodeSteps:
        """Compute the prompt but its last token, and leave its state to each of the group."""
        shared, prompt = self._manager.open(), self.request.identities
        if self._manager.find(shared, prompt, counted=False)[0].tokens == len(prompt) - 1:  # each of them finds it
            return
        self._shared, shared.forks = shared, [one._session for one in group]
        given_up = Controls(
            deadline=self.deadline, pace=self._pace, cancelled=lambda: all(one.cancelled for one in group)
        )
        steps = decode_steps(shared, self.request, given_up)
        with closing(shared), closing(steps):
            entered = time.perf_counter()
            for step in steps:
                self._shared_seconds += time.perf_counter() - entered
                if isinstance(step, Step) and step.finish_reason is not None:  # each of them ends as it does
                    return
                yield step
                entered = time.perf_counter()
            self._shared_seconds += time.perf_counter() - entered

    def part(self) -> list[Job]:
        """Itself and its siblings, those that are still wanted, each to go on alone: the prompt is computed."""
        group, self.siblings, self.steps = self.group, (), None
        for one in group:
            one.prompting = False  # the last token of all is computed in one round
        return [one for one in group if not one.ticket.done]

    def rest(self) -> None:
        """It has no lane for a while: the state is the first to be evicted."""
        for session in (self._session, self._shared):
            if session is not None:
                session.resting = True

    def take(self, step: Step) -> None:
        """A step, committed; it is given to who waits unless it only computed a part of the prompt."""
        self.served, self.prompting = time.perf_counter(), step.chunk and not step.told
        if step.chunk:
            return
        if step.first:
            self._first_token = 0.0 if step.finish_reason and not step.tokens else self.served
            self._reused = self._session.reuse.tokens
        self._made.append(step)
        self.ticket.add(step)

    def settle(self) -> Answer:
        """Leave its session with what was committed; the answer. Also of a request that failed."""
        if self.steps is not None:
            self.steps.close()
            self.steps = None
        reader = self.reader()
        tokens = tuple(token for step in self._made for token in step.tokens)
        reader(Step(tokens, "stop"))
        if self._settled is not None:
            self._settled(reader.answer, committed=bool(tokens), thinking=reader.thinking)
        else:
            self._session.close()
        return reader.answer

    # on any thread ----------------------------------------------------------------------------------------------------

    def reader(self) -> AnswerReader:
        """Makes increments of the steps; each who reads them has one."""
        request, options = self.request, self.request.options
        return AnswerReader(request.tokenizer, request.prompt, request.stop_token_ids, options.tools, options.stops)

    def end_unstarted(self, reason: Ended) -> None:
        """End a request that never ran."""
        self._started = time.perf_counter()
        self.ticket.succeed(self.plan(Answer(), [Step((), reason)]))

    def plan(self, answer: Answer, steps: list[Step] | None = None) -> Plan:
        """The plan of its steps."""
        now, request, made = time.perf_counter(), self.request, collect(steps or self._made)
        first, options, shared = self._first_token, self.request.options, self._shared if self._first_token else None
        timings = PlanTimings(
            queue_seconds=self._started - request.began,
            prefill_seconds=made.prefill_seconds + (self._shared_seconds if shared else 0.0),
            first_token_seconds=first - request.began if first else 0.0,
            decode_seconds=now - first if first else 0.0,
            total_seconds=now - request.began,
            drafts=made.drafting.mean,
        )
        if options.schema is None:
            value = json_object(answer.content)
        else:
            value = json_value(answer.content) if made.finish_reason == "stop" else None
        return Plan(
            object=value,
            text=answer.content if request.tokenizer is not None else None,
            thinking=answer.thinking,
            tool_calls=answer.tool_calls,
            malformed=answer.malformed,
            tokens=made.tokens,
            finish_reason=made.finish_reason,
            prompt_tokens=len(request.prompt),
            reused_tokens=shared.reuse.tokens if shared else self._reused,
            accept_lengths=made.accept_lengths,
            accept_length=made.accept_length,
            timings=timings,
            speculative=options.speculative,
            lossy=request.relaxation is not None,
            relaxed_tokens=made.relaxed,
            logprobs=tuple(one for step in self._made for one in step.logprobs),
            prompt_logprobs=tuple(one for step in self._made for one in step.prompt),
            drafting=made.drafting,
            seed=options.seed,
        )
