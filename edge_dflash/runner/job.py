"""What the worker runs: steps for which somebody waits; a request is one, from its first pass to its plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from edge_dflash.decode.controls import Pace
from edge_dflash.decode.loop import Step, Turns, collect, turns
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.result import Plan, PlanTimings, json_object, json_value
from edge_dflash.runner.request import Prepared
from edge_dflash.runner.stream import AnswerText, Reader
from edge_dflash.runner.ticket import Ticket
from edge_dflash.text.chat import Answer

T = TypeVar("T")
R = TypeVar("R")


class Work(Generic[T, R]):
    """Steps for a worker, and the ticket of whoever waits for them.

    ``steps`` is called by the worker: each ``next`` does one and gives what became final, or None; what they return is
    the result.
    """

    alone = True  # whether no other work may do a step while it runs; False: its steps ask for their cycles
    prompting = False  # whether its next step is of its prompt
    over = False  # whether its last step was the last one, and no more than its result is to come
    closes = True  # how it ends when it is cancelled: closed before its next step; False: by itself, with its result

    def __init__(
        self,
        steps: Callable[[], Iterator[T | None] | Turns],
        *,
        priority: int = 0,
        caller: str | None = "",
        deadline: float | None = None,
    ) -> None:
        """``caller`` None: a work of the engine itself, which takes no place in the queue.

        ``deadline`` (time.perf_counter()): a work that still waits then leaves the queue.
        """
        self.ticket: Ticket[T, R] = Ticket(f"the request of {caller!r}" if caller else "the request")
        self.begin = steps
        self.priority, self.caller, self.deadline = priority, caller, deadline
        self.cancelled = False  # set by any thread
        self.expired = False  # its deadline passed while it waited: not the user's cancelling
        self.steps: Iterator[T | None] | Turns | None = None  # while it runs
        self.interruptible = not self.alone  # whether it may be set aside; one that is alone, not before its first step
        self.served = 0.0  # time.perf_counter() of its coming, then of its newest step
        self.passed = 0  # times that it was
        self.timer: threading.Timer | None = None  # of its deadline, while it waits

    def take(self, step: T | None) -> T | None:
        """What of a step whoever waits is given. Called by the worker, as :meth:`end`."""
        return step

    def end(self, value: Any, error: BaseException | None) -> R:
        """The steps are over: the result of what they returned; ``error`` is what ended them otherwise."""
        result: R = value
        return result

    @property
    def tickets(self) -> tuple[Ticket[Any, Any], ...]:
        """Of all who wait for it: its own, and those of works that begin when it has ended."""
        return (self.ticket,)

    def goes_on_without(self, ticket: Ticket[Any, Any]) -> bool:
        """End one of the other tickets; False: nobody is left who wants the work."""
        raise NotImplementedError("no other work waits for this one")

    def left(self) -> Sequence[Work[Any, Any]]:
        """What runs of it: itself until it has ended, then what began with its end. Asked once after it."""
        return () if self.ticket.done else (self,)

    def fail(self, error: BaseException) -> None:
        """It ended with an error."""
        self.ticket._fail(error)

    def give_up(self) -> None:
        """It was cancelled, and has no result."""
        self.ticket._give_up()

    def would_end(self) -> bool:
        """Whether it would end now, without a pass."""
        return self.cancelled or (self.deadline is not None and time.perf_counter() >= self.deadline)

    def hurried(self) -> bool:
        """Whether its deadline leaves no room for a step of another's prompt before its next cycle."""
        return False

    def rank(self, patience: int) -> int:
        """Its priority, risen as that of one that waits."""
        return self.priority + self.passed // patience

    def set_aside(self) -> None:
        """It has no lane for a while."""

    def leave(self) -> None:
        """It waits in the queue no more."""
        if self.timer is not None:
            self.timer.cancel()

    def expire(self) -> None:
        """Leave the queue; one that runs looks at its deadline itself."""
        if self.ticket.state == "queued":
            self.expired = True
            self.ticket.cancel()


class Ending:
    """Around a step: tells ``end`` when it was the last one, with what the steps return or with their error."""

    def __init__(self, end: Callable[[Any, BaseException | None], None]) -> None:
        self._end = end

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, StopIteration):
            self._end(error.value, None)
        elif error is not None:
            self._end(None, error)
        return True


class Observer(Protocol):
    """Who watches a worker. Called by it between two passes, on its thread: must be quick, and wait for no request.

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


class Home:
    """Where a request's sequence lives, as the worker asks: here in a session that ends with it."""

    def open(self, manager: SessionManager) -> Session:
        """The session that the request goes on in."""
        return manager.open()

    def settle(self, session: Session, answer: Answer, *, committed: bool, thinking: bool) -> None:
        """The request has ended, somehow. ``committed``: tokens were; ``thinking``: inside a thinking span."""
        session.close()


class Job(Work[Step, Plan]):
    """One run of a request. Every step is committed before it is given; None between chunks of the prompt."""

    alone = closes = False

    def __init__(self, request: Prepared, place: Home, manager: SessionManager, pace: Pace) -> None:
        """``manager`` and ``pace`` are the engine's."""
        options = request.options
        super().__init__(self._answer, priority=options.priority, caller=options.caller, deadline=request.deadline)
        self.cancelled = request.ended == "cancelled"  # asked to end at the next commit
        self.request = request
        self._place, self._manager, self._pace = place, manager, pace
        self._session: Session | None = None
        self._made: list[Step] = []
        self._started = self._first_token = 0.0
        self._reused = 0  # tokens of the prompt

    @property
    def prompting(self) -> bool:  # type: ignore[override]  # what others have for ever
        """See Work."""
        return self._first_token == 0.0

    def hurried(self) -> bool:
        """See Work."""
        if self.deadline is None:
            return False
        chunk = self._pace.prefill_seconds(self._manager.backend.shape.prefill_chunk)
        prompt = max(chunk, self._pace.longest_tower)
        return time.perf_counter() + prompt + self._pace.cycle_seconds(speculative=True) > self.deadline

    def set_aside(self) -> None:
        """Its lane is the first to be given away."""
        if self._session is not None:
            self._session.resting = True

    def _answer(self) -> Turns:
        """Steps of the loop, which the worker takes itself, and its cycles."""
        self._started = time.perf_counter()
        self._session = self._place.open(self._manager)
        return turns(self._session, self.request, self.request.controls(self._pace, self._is_cancelled))

    def _is_cancelled(self) -> bool:
        return self.cancelled and not self.expired

    def take(self, step: Step | None) -> Step | None:
        """A step, unless it only computed a part of the prompt."""
        self.over = step is not None and step.finish_reason is not None
        if step is None or step.chunk:
            return None
        if step.first and self._session is not None:
            self._first_token, self._reused = time.perf_counter(), self._session.reuse.tokens
        self._made.append(step)
        return step

    def end(self, value: Any, error: BaseException | None) -> Plan:
        """The plan; also when the request failed, what was committed counts."""
        reader = self.reader()
        tokens = tuple(token for step in self._made for token in step.tokens)
        reader(Step(tokens, "stop"))
        if self._session is not None:
            self._place.settle(self._session, reader.answer, committed=bool(tokens), thinking=reader.thinking)
            self._session = None
        if error is not None:
            raise error
        return self.request.finished(self._plan(self._made, reader.answer))

    def reader(self) -> Reader:
        """Makes increments of the steps; each who reads them has one."""
        request, tokenizer = self.request, self.request.model.tokenizer
        if tokenizer is None:
            return Reader(None)
        options = request.options
        return Reader(AnswerText(tokenizer, request.prompt, request.stop_token_ids, options.tools, options.stops))

    def unstarted(self) -> Plan:
        """The plan of a request that left the queue without having run."""
        self._started = time.perf_counter()
        return self._plan([Step((), "deadline" if self.expired else "cancelled")], Answer())

    def _plan(self, steps: list[Step], answer: Answer) -> Plan:
        now, request, made = time.perf_counter(), self.request, collect(steps)
        first = self._first_token
        timings = PlanTimings(
            queue_seconds=self._started - request.began,
            prefill_seconds=made.timings.prefill_seconds,
            first_token_seconds=first - request.began if first else 0.0,
            decode_seconds=now - first if first else 0.0,
            total_seconds=now - request.began,
            drafts=made.drafting.mean,
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
            drafting=made.drafting,
            seed=request.options.seed,
        )
