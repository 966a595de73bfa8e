"""A streamed answer of a service: increments as they come, the plan that they add up to, and errors in its place."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, get_args

from edge_dflash import errors
from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.logprobs import TokenLogprob
from edge_dflash.decode.options import Options
from edge_dflash.result import Increment, Plan, PlanTimings, json_object, json_value
from edge_dflash.runner.stream import Ticket
from edge_dflash.text.tool_calls import MalformedToolCall, ToolCall


class RemoteChoice:
    """One choice of a request on its way: what a stream asks of it (``ticket``, ``cancelled``, ``reader``).

    All but ``cancelled`` is called on the connection's loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: Options, began: float, index: int, ended: Callable[[Plan], None]
    ) -> None:
        """``began``: time.perf_counter() of the call; ``ended`` gets the plan, also of one that failed."""
        self.admitted: Future[None] = Future()
        self.ticket: Ticket[Increment] = Ticket(cancel=self._cancel)
        self.task: asyncio.Task[None] | None = None  # of the request
        self.together: Sequence[RemoteChoice] = (self,)  # what the same request asks for
        self.reason: FinishReason | None = None  # why it was cut
        self.options = options
        self._loop, self._began, self._index, self._ended = loop, began, index, ended
        self._clear()

    def _clear(self) -> None:
        """Nothing has come."""
        self._first = 0.0  # time.perf_counter() of the first piece
        self._pieces: list[Increment] = []
        self._prompt: tuple[TokenLogprob, ...] = ()
        self._said: str | None = None  # the service's word for its end
        self._extra: Mapping[str, Any] = {}

    # Asked by a stream ------------------------------------------------------------------------------------------------

    @property
    def cancelled(self) -> bool:
        """Whether it was cut; setting it cuts it."""
        return self.reason is not None

    @cancelled.setter
    def cancelled(self, wanted: bool) -> None:
        if wanted:
            self._cancel()

    def reader(self) -> Callable[[Increment], Increment]:
        """The server made the increments."""
        return lambda increment: increment

    def _cancel(self) -> None:
        if not self.ticket.done:
            with suppress(RuntimeError):  # the loop is closed, and so is the request
                self._loop.call_soon_threadsafe(self.cut, "cancelled")

    # How it goes ------------------------------------------------------------------------------------------------------

    def cut(self, reason: FinishReason) -> None:
        """Stop reading; what came is the plan."""
        if self.reason is None and not self.ticket.done:
            self.reason = reason
            if any(one.reason is None for one in open_of(self.together)):
                self.give_up()  # the request goes on without it
            elif self.task is not None:
                self.task.cancel()

    def admit(self) -> None:
        """The server took it."""
        self.ticket.state = "running"
        self.admitted.set_result(None)

    def settle(self) -> None:
        """It has ended by itself. Raises ServiceError where the server did not say so."""
        if self._said is None:
            raise errors.ServiceError("the connection ended before the answer did; ask again")
        self._succeed(self._plan())

    def give_up(self) -> None:
        """It was cut: what came is the plan."""
        try:
            plan = self._plan(self.reason or "cancelled")
        except Exception as error:
            self.fail(unreadable(error))
        else:
            self._succeed(plan)

    def _succeed(self, plan: Plan) -> None:
        self._ended(plan)
        self.ticket.succeed(plan)
        if not self.admitted.done():
            self.admitted.set_result(None)

    def fail(self, error: errors.EdgeDflashError) -> None:
        """It ended with an error: at the call if the server did not take it, else at the stream."""
        try:
            plan = self._plan("cancelled")
        except Exception:  # what came is what cannot be read
            self._clear()
            plan = self._plan("cancelled")
        self._ended(plan)
        self.ticket.fail(error)
        if not self.admitted.done():
            self.admitted.set_exception(error)

    def take(self, chunk: Mapping[str, Any]) -> None:
        """Take an event. Raises the error that it carries."""
        if chunk.get("error"):
            raise error_of(500, chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping) and choice.get("index", 0) == self._index:
                self._add(choice, chunk.get("edge_dflash") or {})
                return

    def _add(self, choice: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        if choice.get("finish_reason"):
            self._said, self._extra = str(choice["finish_reason"]), extra
        delta = choice.get("delta") or {}
        text = str(delta.get("content") or choice.get("text") or "")
        thinking = str(delta.get("reasoning_content") or "")
        tokens = () if self._said else tuple(extra.get("tokens") or ())  # the last chunk repeats them all
        calls = tuple(_tool_call(one) for one in delta.get("tool_calls") or ())
        logprobs = tuple(_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ())
        if extra.get("echo"):
            self._prompt = logprobs
            self.ticket.add(Increment("", (), prompt_logprobs=logprobs))
            return
        if not (text or thinking or tokens or calls):
            return
        self._first = self._first or time.perf_counter()
        self._pieces.append(Increment(text, tokens, thinking, calls, logprobs))
        self.ticket.add(self._pieces[-1])

    def _plan(self, cut: FinishReason | None = None) -> Plan:
        """What it adds up to. ``cut`` is why the reader stopped; None: the answer ended by itself.

        Raises ServiceError when it ended in a way that is not known.
        """
        now, extra, options = time.perf_counter(), self._extra, self.options
        reason: FinishReason | None = cut or extra.get("finish_reason")
        if reason is None or reason not in get_args(FinishReason):
            raise errors.ServiceError(
                f"the service ended the answer by {reason or self._said!r}, which is not known here"
            )
        pieces = self._pieces
        text = "".join(piece.text or "" for piece in pieces)
        value = json_value(text) if options.schema is not None and reason == "stop" else None
        counts = [len(piece.tokens) for piece in pieces if piece.tokens]
        lengths = tuple(extra.get("accept_lengths", counts[1:]))
        first, decoding = (self._first - self._began, now - self._first) if self._first else (0.0, 0.0)
        timings = PlanTimings(0.0, first, first, decoding, now - self._began)  # as seen from here, the queue included
        return Plan(
            object=json_object(text) if options.schema is None else value,
            text=text,
            thinking="".join(piece.thinking for piece in pieces),
            tool_calls=tuple(call for piece in pieces for call in piece.tool_calls),
            malformed=tuple(MalformedToolCall(**one) for one in extra.get("malformed", ())),
            tokens=tuple(token for piece in pieces for token in piece.tokens),
            finish_reason=reason,
            prompt_tokens=int(extra.get("prompt_tokens", 0)),
            reused_tokens=int(extra.get("reused_tokens", 0)),
            accept_lengths=lengths,
            accept_length=sum(lengths) / len(lengths) if lengths else 0.0,
            timings=PlanTimings(**extra["timings"]) if "timings" in extra else timings,
            speculative=options.speculative,
            lossy=bool(extra.get("lossy", False)),
            relaxed_tokens=int(extra.get("relaxed_tokens", 0)),
            logprobs=tuple(one for piece in pieces for one in piece.logprobs),
            prompt_logprobs=self._prompt,
            drafting=Drafting(tuple(extra.get("drafts", ())), tuple(extra.get("accepted_drafts", ()))),
            seed=int(extra.get("seed", options.seed + self._index)),
        )


def open_of(choices: Sequence[RemoteChoice]) -> list[RemoteChoice]:
    """Those that have not ended."""
    return [one for one in choices if not one.ticket.done]


def unreadable(error: Exception) -> errors.ServiceError:
    """The error of an answer that no service writes."""
    return errors.ServiceError(f"the server's answer cannot be read ({type(error).__name__}: {error})")


def json_of(data: bytes) -> object:
    """JSON that a server sent; None: it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _tool_call(delta: Mapping[str, Any]) -> ToolCall:
    """A call, which the service sends whole."""
    function = delta["function"]
    return ToolCall(str(delta["id"]), str(function["name"]), str(function["arguments"]))


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """An entry as the service writes it: with the token's id and bytes."""
    top = tuple(map(_logprob, entry.get("top_logprobs", ())))
    text = None if entry["bytes"] is None else bytes(entry["bytes"])
    return TokenLogprob(entry["token_id"], math.nan if entry["logprob"] is None else entry["logprob"], top, text)


def error_of(status: int, body: object) -> errors.EdgeDflashError:
    """The error that a server's answer means."""
    error = body.get("error") if isinstance(body, Mapping) else None
    found = error if isinstance(error, Mapping) else {}
    message = " ".join(str(found.get("message") or error or f"the server answered with status {status}").split())
    code = found.get("code")
    if code in ("storage_full", "storage_failed"):
        return errors.StorageError(message, full=code == "storage_full")
    kinds: dict[object, type[errors.EdgeDflashError]] = {
        "queue_full": errors.QueueFullError,
        "cancelled": errors.RequestCancelledError,
        "context_length_exceeded": errors.ContextError,
        "session_mismatch": errors.BundleError,
    }
    of_status = errors.ServiceError if status in (401, 403) or status >= 500 else errors.RequestError
    return kinds.get("queue_full" if status == 429 else code, of_status)(message)
