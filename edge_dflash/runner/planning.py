"""The ways to ask a planner: whole or as it is made, one answer or several candidates, from any thread or asyncio."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Generic, TypeAlias, TypeVar, Unpack

from edge_dflash.common import rules
from edge_dflash.decode.options import Options, PlanOptions, Task
from edge_dflash.errors import RequestError, one_line, short
from edge_dflash.result import Plan
from edge_dflash.runner.failures import another
from edge_dflash.runner.stream import UNWANTED, AsyncPlanStream, PlanStream

S = TypeVar("S")
Rank: TypeAlias = Callable[[Plan], float]

MOST_CANDIDATES = 8
_RULES = {
    "n": rules.whole(1, MOST_CANDIDATES).saying(f"a whole number of candidates, 1 to {MOST_CANDIDATES}"),
    "rank": rules.FUNCTION.saying("a function that gives a plan a number").or_none(),
}


class Planning(Generic[S]):
    """What every planner offers, made of one way to ask it; ``S`` is its conversation."""

    def _ask(
        self, task: Task, session: S | None, options: Options, began: float, count: int = 1
    ) -> tuple[Callable[[], object], tuple[PlanStream, ...]]:
        """Streams of ``count`` candidates, the first with the seed of ``options``, and what queues them."""
        raise NotImplementedError

    def plan(
        self,
        task: Task,
        *,
        session: S | None = None,
        n: int = 1,
        rank: Rank | None = None,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """Make the whole plan; see :meth:`stream`.

        With ``n``, the best of 1 to 8 candidates, the others behind it in ``alternatives``, best first. The prompt is
        computed once. Candidate i has exactly the tokens of a request alone with ``seed + i``; without a temperature
        all are equal, and one is made. ``rank`` gives each plan a number, the higher the better: a simulator's verdict,
        a cost with a minus; its errors are raised here. Without it, it is the mean log-probability of the tokens, for
        which the logits of every token are read. A request with ``n`` takes one place in the queue.

        Raises RequestError for candidates in a session.
        """
        began, chosen = time.perf_counter(), Options.of(options)
        n, rank = _checked(n, rank, session)
        asked = _scored(chosen, n, rank)
        queue, streams = self._ask(task, session, asked, began, _distinct(chosen, n))
        queue()
        try:
            plans = [stream.plan for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return plans[0] if n == 1 and rank is None else _best(plans, n, rank, chosen)

    def stream(self, task: Task, *, session: S | None = None, **options: Unpack[PlanOptions]) -> PlanStream:
        """Queue a plan and return its increments.

        ``task`` is text (one user message when the model has a chat template), a list of messages with ``role`` and
        ``content``, or token ids, used as they are. A control token (``<|im_end|>``) that a text spells stays text.
        With ``session``, it is the next turn of that conversation.

        ``options`` (:class:`~edge_dflash.decode.options.Options` lists them with their defaults):

        - form: ``schema`` (JSON Schema or Pydantic model), ``regex`` or ``grammar`` (Lark); at most one. An answer that
          ends by itself satisfies it, or with ``tools`` is calls. With thinking, the form begins behind it.
          ``whitespace``: blanks in JSON.
        - bounds: ``deadline`` in seconds from now, waiting included: no pass starts that is not expected to end in
          time, and what was committed is the plan. ``max_new_tokens``. ``stop``: texts before which the answer ends.
        - choice: ``temperature``, ``top_k``, ``top_p``, ``seed``. ``logprobs``: how likely the model held each token
          and so many others, before any of these options.
        - chat: ``thinking``, ``tools``; ``tool_choice``: "auto", "none", "required" or the name of the tool to call.
          ``raw``: the text as it is, without chat template, in which control tokens may be spelled. ``relaxed``: lossy
          acceptance, only inside a thinking span that the prompt opens; without one nothing is relaxed.
        - drafts, on which no token depends: ``speculative=False``: none. ``draft_confidence``: those from the first on
          that a drafter with a confidence head is less sure of are not verified, 0 to 1; others verify as ever.
        - queue: ``priority``, ``caller``.

        Raises RequestError for bad input, ContextError for a prompt that does not fit and QueueFullError here;
        QueueFullError later for a request that a more urgent one displaced.
        """
        began = time.perf_counter()
        queue, (stream,) = self._ask(task, session, Options.of(options), began)
        queue()
        return stream

    def streams(self, task: Task, n: int, **options: Unpack[PlanOptions]) -> tuple[PlanStream, ...]:
        """:meth:`stream` of ``n`` candidates: the prompt is computed once, and stream i uses ``seed + i``.

        Cancelling or closing one leaves the others alone.
        """
        began, chosen = time.perf_counter(), Options.of(options)
        n, _ = _checked(n, None, None)
        queue, streams = self._ask(task, None, chosen, began, n)
        queue()
        return streams

    async def aplan(
        self,
        task: Task,
        *,
        session: S | None = None,
        n: int = 1,
        rank: Rank | None = None,
        **options: Unpack[PlanOptions],
    ) -> Plan:
        """:meth:`plan` without blocking the loop; ``rank`` is called on another thread."""
        if n == 1 and rank is None:
            return await self.astream(task, session=session, **options).result()
        chosen = Options.of(options)
        n, rank = _checked(n, rank, session)
        asked, count = _scored(chosen, n, rank), _distinct(chosen, n)

        def begin() -> tuple[PlanStream, ...]:
            queue, begun = self._ask(task, session, asked, time.perf_counter(), count)
            queue()
            return begun

        streams = apart(begin, count)
        try:
            plans = await asyncio.gather(*(stream.result() for stream in streams))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return await asyncio.to_thread(_best, plans, n, rank, chosen)

    def astream(self, task: Task, *, session: S | None = None, **options: Unpack[PlanOptions]) -> AsyncPlanStream:
        """:meth:`stream` for ``async for`` and ``async with``; its errors come with the first ``await``."""
        return AsyncPlanStream(partial(self.stream, task, session=session, **options))

    def astreams(self, task: Task, n: int, **options: Unpack[PlanOptions]) -> tuple[AsyncPlanStream, ...]:
        """:meth:`streams` for asyncio; all begin with the first ``await`` of one of them."""
        n, _ = _checked(n, None, None)
        return apart(partial(self.streams, task, n, **options), n)


def _checked(n: int, rank: Rank | None, session: object) -> tuple[int, Rank | None]:
    """Number of candidates, and what orders them. Raises RequestError."""
    given = rules.checked(_RULES, {"n": n, "rank": rank})
    if session is not None and given["n"] > 1:
        raise RequestError(
            f"n is {n} in a session, which goes on from one answer; give n to a planner, or fork the session"
        )
    return given["n"], given["rank"]


def _distinct(options: Options, n: int) -> int:
    """How many candidates differ: without a temperature no seed is used."""
    return n if options.temperature else 1


def _scored(options: Options, n: int, rank: Rank | None) -> Options:
    """Options with what the candidates' order needs."""
    return replace(options, logprobs=0) if n > 1 and rank is None and options.logprobs is None else options


def _best(plans: Sequence[Plan], n: int, rank: Rank | None, options: Options) -> Plan:
    """The best of the plans, with their scores, the others behind it. Raises what ``rank`` raises."""
    scores = [_likelihood(plan) if rank is None else _ranked(rank, plan) for plan in plans]
    told = [
        replace(plan, score=score, logprobs=() if options.logprobs is None else plan.logprobs)
        for plan, score in zip(plans, scores, strict=True)
    ]
    told.sort(key=lambda plan: -math.inf if plan.score is None else plan.score, reverse=True)
    best, *others = told * (n // len(plans))
    return replace(best, alternatives=tuple(others))


def _likelihood(plan: Plan) -> float:
    """Mean log-probability of the tokens; lowest without one."""
    found = [one.logprob for one in plan.logprobs]
    mean = sum(found) / len(found) if found else -math.inf
    return -math.inf if math.isnan(mean) else mean


def _ranked(rank: Rank, plan: Plan) -> float:
    """The number that ``rank`` gives; also a scalar of NumPy or torch. Raises RequestError where it is none."""
    try:
        value: object = rank(plan)
    except StopIteration as error:  # it would end the loop of whoever called, and no asyncio future takes it
        raise RequestError("rank raised StopIteration; it has to give each plan a number") from error
    try:
        item = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
        number = float(item) if isinstance(item, Real) else math.nan
    except (ArithmeticError, TypeError, ValueError, RuntimeError):  # 10**400
        number = math.nan
    if math.isnan(number):
        raise RequestError(f"rank gave {one_line(short(value))}; give a number that a float can hold, higher is better")
    return number


def apart(begin: Callable[[], tuple[PlanStream, ...]], count: int) -> tuple[AsyncPlanStream, ...]:
    """Streams for asyncio that begin together, on the thread of the first."""
    shared = _Shared(begin)
    shared.streams = tuple(AsyncPlanStream(partial(shared.take, index)) for index in range(count))
    return shared.streams


class _Shared:
    """One call that gives each of several streams what it reads."""

    def __init__(self, begin: Callable[[], tuple[PlanStream, ...]]) -> None:
        self.streams: tuple[AsyncPlanStream, ...] = ()
        self._begin, self._lock = begin, threading.Lock()
        self._begun: tuple[PlanStream, ...] = ()
        self._error: Exception | None = None

    def take(self, index: int) -> PlanStream:
        """The stream of this index; the first call begins all."""
        with self._lock:
            if self._error is not None:
                raise another(self._error)
            if not self._begun:
                unwanted = UNWANTED.set(lambda: all(stream.cancelled for stream in self.streams))
                try:
                    self._begun = self._begin()
                except Exception as error:
                    self._error = error
                    raise
                finally:
                    UNWANTED.reset(unwanted)
                for stream, begun in zip(self.streams, self._begun, strict=True):
                    stream._attach(begun)
            return self._begun[index]
