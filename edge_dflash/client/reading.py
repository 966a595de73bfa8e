"""A streamed answer of a service as a plan, and the errors that it may answer with instead."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.logprobs import TokenLogprob
from edge_dflash.decode.options import Options
from edge_dflash.errors import (
    BundleError,
    ContextError,
    EdgeDflashError,
    QueueFullError,
    RequestError,
    ServiceError,
    StorageError,
)
from edge_dflash.result import Increment, Plan, PlanTimings, json_object, json_value
from edge_dflash.text.tool_calls import MalformedToolCall, ToolCall


@dataclass
class Reading:
    """One answer, as far as it has come."""

    options: Options
    began: float  # time.perf_counter() of the call
    index: int = 0  # of the choice, where there are several
    _first: float = 0.0  # time.perf_counter() of the first piece
    _text: str = ""
    _thinking: str = ""
    _tokens: tuple[int, ...] = ()
    _logprobs: tuple[TokenLogprob, ...] = ()
    _lengths: list[int] = field(default_factory=list)
    _calls: tuple[ToolCall, ...] = ()
    _reason: str | None = None
    _extra: Mapping[str, Any] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any]) -> Increment | None:
        """Take an event. Raises the error that it carries."""
        if chunk.get("error"):
            raise error_of(500, chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, Mapping) and choice.get("index", 0) == self.index:
                return self._choice(choice, chunk)
        return None

    def _choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> Increment | None:
        extra = chunk.get("edge_dflash") or {}
        if choice.get("finish_reason"):
            self._reason, self._extra = str(choice["finish_reason"]), extra
        delta = choice.get("delta") or {}
        text = str(delta.get("content") or choice.get("text") or "")
        thinking = str(delta.get("reasoning_content") or "")
        tokens = () if self._reason else tuple(extra.get("tokens") or ())  # the last chunk repeats them all
        calls = tuple(_tool_call(one) for one in delta.get("tool_calls") or ())
        if not (text or thinking or tokens or calls):
            return None
        self._first = self._first or time.perf_counter()
        if tokens and self._tokens:
            self._lengths.append(len(tokens))
        logprobs = tuple(_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ())
        self._text += text
        self._thinking += thinking
        self._tokens += tokens
        self._calls += calls
        self._logprobs += logprobs
        return Increment(text, tokens, thinking, calls, logprobs)

    @property
    def finished(self) -> bool:
        """Whether the server said how the answer ended."""
        return self._reason is not None

    def plan(self, cut: FinishReason | None = None) -> Plan:
        """What it adds up to. ``cut`` is why the reader stopped; None: the answer ended by itself.

        Raises ServiceError when it ended in a way that is not known.
        """
        now, extra = time.perf_counter(), self._extra
        reason: FinishReason | None = cut or extra.get("finish_reason")
        if reason is None or reason not in get_args(FinishReason):
            raise ServiceError(f"the service ended the answer by {reason or self._reason!r}, which is not known here")
        value = json_value(self._text) if self.options.schema is not None and reason == "stop" else None
        lengths = tuple(extra.get("accept_lengths", self._lengths))
        first, decoding = (self._first - self.began, now - self._first) if self._first else (0.0, 0.0)
        timings = PlanTimings(0.0, first, first, decoding, now - self.began)  # as seen from here, the queue included
        return Plan(
            object=json_object(self._text) if self.options.schema is None else value,
            text=self._text,
            thinking=self._thinking,
            tool_calls=self._calls,
            malformed=tuple(MalformedToolCall(**one) for one in extra.get("malformed", ())),
            tokens=self._tokens,
            finish_reason=reason,
            prompt_tokens=int(extra.get("prompt_tokens", 0)),
            reused_tokens=int(extra.get("reused_tokens", 0)),
            accept_lengths=lengths,
            accept_length=sum(lengths) / len(lengths) if lengths else 0.0,
            timings=PlanTimings(**extra["timings"]) if "timings" in extra else timings,
            speculative=self.options.speculative,
            lossy=bool(extra.get("lossy", False)),
            relaxed_tokens=int(extra.get("relaxed_tokens", 0)),
            logprobs=self._logprobs,
            drafting=Drafting(tuple(extra.get("drafts", ())), tuple(extra.get("accepted_drafts", ()))),
            seed=int(extra.get("seed", self.options.seed + self.index)),
        )


def chunk_of(data: str) -> Mapping[str, Any]:
    """The data of an event. Raises ServiceError when it is none of the API."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, Mapping):
        raise ServiceError(f"the server sent {data[:60]!r}, which is no chunk of an answer")
    return chunk


def _tool_call(delta: Mapping[str, Any]) -> ToolCall:
    """A call, which the service sends whole."""
    function = delta["function"]
    return ToolCall(str(delta["id"]), str(function["name"]), str(function["arguments"]))


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """An entry as the service writes it: with the token's id and bytes."""
    top = tuple(map(_logprob, entry.get("top_logprobs", ())))
    text = None if entry["bytes"] is None else bytes(entry["bytes"])
    return TokenLogprob(entry["token_id"], entry["logprob"], top, text)


def error_of(status: int, body: object) -> EdgeDflashError:
    """The error that a server's answer means."""
    error = body.get("error") if isinstance(body, Mapping) else None
    found = error if isinstance(error, Mapping) else {}
    message = " ".join(str(found.get("message") or error or f"the server answered with status {status}").split())
    code = found.get("code")
    if status == 429 or code == "queue_full":
        return QueueFullError(message)
    if code in ("storage_full", "storage_failed"):
        return StorageError(message, full=code == "storage_full")
    if code in ("context_length_exceeded", "session_mismatch"):
        return ContextError(message) if code == "context_length_exceeded" else BundleError(message)
    return ServiceError(message) if status in (401, 403) or status >= 500 else RequestError(message)
