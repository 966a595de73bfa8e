"""The ways to ask a planner: whole or as it is made, one answer or several candidates, from any thread or asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeAlias, TypeVar, Unpack, overload

from edge_dflash.common import rules
from edge_dflash.decode.options import Options, PlanOptions
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import QueueFullError, RequestError
from edge_dflash.result import Plan, Score
from edge_dflash.runner import candidates
from edge_dflash.runner.astream import AsyncPlanStream, Unwanted, apart
from edge_dflash.runner.candidates import Rank
from edge_dflash.runner.stream import PlanStream
from edge_dflash.text.prompt import Task, as_messages
from edge_dflash.text.template import Message

S = TypeVar("S")
Tasks: TypeAlias = list[str] | list[list[int]] | list[list[Message]]

MOST_CANDIDATES = 8
_RULES = {
    "n": rules.whole(1, MOST_CANDIDATES).saying(f"a whole number of candidates, 1 to {MOST_CANDIDATES}"),
    "rank": rules.FUNCTION.saying("a function that gives a plan a number").or_none(),
}


def never() -> bool:
    """Whether nobody waits for a request whose caller waits for it."""
    return False


class Planning(Generic[S]):
    """What every planner offers, made of one way to ask it; ``S`` is its conversation."""

    _submit: Callable[[Any], object]  # queues the request of the first of the streams that were prepared together

    def encode(self, task: Task, *, thinking: bool = False, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a task. Raises RequestError when it is of another kind, empty, or cannot be turned into ids."""
        raise NotImplementedError

    def _ask(
        self, task: Task, session: S | None, options: Options, began: float, n: int = 1, unwanted: Unwanted = never
    ) -> Sequence[PlanStream]:
        """Prepare streams of ``n`` candidates, the first with the seed of ``options``."""
        raise NotImplementedError

    def _begin(
        self, task: Task, session: S | None, options: Options, n: int = 1, unwanted: Unwanted = never
    ) -> Sequence[PlanStream]:
        """Prepare and queue."""
        streams = self._ask(task, session, options, time.perf_counter(), n, unwanted)
        self._submit(streams[0]._job)
        return streams

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
        asked, count = candidates.asked(chosen, n, rank)
        streams = self._ask(task, session, asked, began, count)
        self._submit(streams[0]._job)
        try:
            plans = [stream.plan for stream in streams]
            return plans[0] if n == 1 and rank is None else candidates.best(plans, n, rank, chosen)
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise

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
        return self._begin(task, session, Options.of(options))[0]

    def streams(
        self,
        task: Task,
        n: int,
        *,
        session: S | None = None,
        unwanted: Unwanted = never,
        **options: Unpack[PlanOptions],
    ) -> tuple[PlanStream, ...]:
        """:meth:`stream` of ``n`` candidates: the prompt is computed once, and stream i uses ``seed + i``.

        Cancelling or closing one leaves the others alone. ``unwanted`` is asked while the request is prepared (images,
        a form): True ends it, as cancelled.
        """
        chosen = Options.of(options)
        n, _ = _checked(n, None, session)
        return tuple(self._begin(task, session, chosen, n, unwanted))

    @overload
    def score(
        self, task: Task, *, logprobs: int = 0, deadline: float | None = None, priority: int = 0, caller: str = ""
    ) -> Score: ...

    @overload
    def score(
        self, task: Tasks, *, logprobs: int = 0, deadline: float | None = None, priority: int = 0, caller: str = ""
    ) -> list[Score]: ...

    def score(
        self, task: Any, *, logprobs: int = 0, deadline: float | None = None, priority: int = 0, caller: str = ""
    ) -> Score | list[Score]:
        """How likely the model holds each token of a text, messages or ids; of a list of such, a list over the lanes.

        A text is used as it is, control tokens by name; messages as the chat template writes them, up to where the
        answer begins. ``logprobs``: as many likelier tokens are told next to each (0 to 20). Each is an ordinary
        request: its values are the same alone and next to others. ``deadline`` is that of all.

        Raises RequestError for bad input, images and less than two tokens, ContextError for what does not fit,
        QueueFullError, and RequestCancelledError where the deadline, or a close, came before the end.
        """
        began, several = time.perf_counter(), _several(task)
        asked = Options.of({"logprobs": logprobs, "deadline": deadline, "priority": priority, "caller": caller})
        asked = replace(asked, prompt_logprobs=True, max_new_tokens=0)
        left, running, scores = deque(task if several else [task]), deque[PlanStream](), list[Score]()
        try:
            while left or running:
                try:
                    while left and len(running) < MOST_LANES:
                        running += self._scoring(left[0], asked, began)
                        left.popleft()
                except QueueFullError:
                    if not running:
                        raise
                scores.append(Score.of(running.popleft().plan))
        finally:
            for stream in running:
                stream.cancel()
        return scores if several else scores[0]

    def _scoring(self, task: Task, asked: Options, began: float) -> Sequence[PlanStream]:
        """Queue one text; ``began``: time.perf_counter() from which the deadline counts."""
        if asked.deadline is not None:
            asked = replace(asked, deadline=max(0.0, began + asked.deadline - time.perf_counter()))
        if not isinstance(task, str) and as_messages(task) is not None:
            task = self.encode(task)
        return self._begin(task, None, replace(asked, raw=isinstance(task, str)))

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
        chosen = Options.of(options)
        n, rank = _checked(n, rank, session)
        asked, count = candidates.asked(chosen, n, rank)
        streams = apart(lambda unwanted: self._begin(task, session, asked, count, unwanted), count)
        try:
            plans = await asyncio.gather(*(stream.result() for stream in streams))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        if n == 1 and rank is None:
            return plans[0]
        return await asyncio.to_thread(candidates.best, plans, n, rank, chosen)

    def astream(self, task: Task, *, session: S | None = None, **options: Unpack[PlanOptions]) -> AsyncPlanStream:
        """:meth:`stream` for ``async for`` and ``async with``; its errors come with the first ``await``."""
        return apart(lambda unwanted: self._begin(task, session, Options.of(options), 1, unwanted), 1)[0]

    def astreams(self, task: Task, n: int, **options: Unpack[PlanOptions]) -> tuple[AsyncPlanStream, ...]:
        """:meth:`streams` for asyncio; all begin with the first ``await`` of one of them."""
        n, _ = _checked(n, None, None)
        return apart(lambda unwanted: self.streams(task, n, unwanted=unwanted, **options), n)


class Conversing:
    """The ways to ask for the next turn of a conversation; a turn that is still running is refused a successor."""

    _planner: Planning[Any]

    def plan(self, task: Task, **options: Unpack[PlanOptions]) -> Plan:
        """Answer the next turn; see ``Planner.stream``."""
        return self._planner.plan(task, session=self, **options)

    def stream(self, task: Task, **options: Unpack[PlanOptions]) -> PlanStream:
        """Increments of the next turn; see ``Planner.stream``."""
        return self._planner.stream(task, session=self, **options)

    async def aplan(self, task: Task, **options: Unpack[PlanOptions]) -> Plan:
        """:meth:`plan` for asyncio."""
        return await self._planner.aplan(task, session=self, **options)

    def astream(self, task: Task, **options: Unpack[PlanOptions]) -> AsyncPlanStream:
        """:meth:`stream` for asyncio."""
        return self._planner.astream(task, session=self, **options)


def _several(task: object) -> bool:
    """Whether it is a list of tasks, which are sequences; messages and ids are none."""
    listed = isinstance(task, list | tuple) and len(task) > 0
    return listed and all(isinstance(one, Sequence) and not isinstance(one, bytes) for one in task)  # type: ignore[attr-defined]


def _checked(n: int, rank: Rank | None, session: object) -> tuple[int, Rank | None]:
    """Number of candidates, and what orders them. Raises RequestError."""
    given = rules.checked(_RULES, {"n": n, "rank": rank})
    if session is not None and given["n"] > 1:
        raise RequestError(
            f"n is {n} in a session, which goes on from one answer; give n to a planner, or fork the session"
        )
    return given["n"], given["rank"]
