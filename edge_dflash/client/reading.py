"""A streamed answer, read: chunks of the OpenAI API as increments, and the plan that they add up to.

Knows JSON, no connections. What a server does not say stays empty: tokens and accept lengths of other servers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.options import Options
from edge_dflash.decode.sampling import TokenLogprob
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

_FINISH: dict[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


class Reading:
    """One answer, as far as it has come."""

    def __init__(self, options: Options, began: float, *, own: bool) -> None:
        """``began``: time.perf_counter() of the call; ``own``: the server is a service of this package."""
        self._options = options
        self._began = began
        self._own = own
        self._first = 0.0
        self._text = self._thinking = ""
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._lengths: list[int] = []
        self._calls: dict[int, dict[str, str]] = {}  # by their index
        self._reason: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._extra: Mapping[str, Any] = {}

    def add(self, data: str) -> Increment | None:
        """Take the data of one event. Raises the error that it carries, ServiceError when it is none of the API."""
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping):
            raise ServiceError(f"the server sent {data[:60]!r}, which is no chunk of an answer")
        if chunk.get("error"):
            raise error_of(500, chunk)
        if isinstance(usage := chunk.get("usage"), Mapping):
            self._usage = usage
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            return None
        return self._choice(choices[0], chunk)

    def _choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> Increment | None:
        extra = chunk.get("edge_dflash") or {}
        if choice.get("finish_reason"):
            self._reason, self._extra = str(choice["finish_reason"]), extra
        delta = choice.get("delta") or {}
        text = str(delta.get("content") or choice.get("text") or "")
        thinking = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        if not self._own:
            tokens = tuple(choice.get("token_ids") or ())  # of vLLM
        else:
            tokens = () if self._reason else tuple(extra.get("tokens") or ())  # the last chunk repeats them all
        whole = self._tool_calls(delta.get("tool_calls") or ())
        if not (text or thinking or tokens or whole):
            return None
        self._first = self._first or time.perf_counter()
        self._text += text
        self._thinking += thinking
        if tokens and self._tokens:
            self._lengths.append(len(tokens))
        self._tokens += tokens
        logprobs = tuple(_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ())
        self._logprobs += logprobs
        return Increment(text, tokens, thinking, whole, logprobs)

    def _tool_calls(self, deltas: Any) -> tuple[ToolCall, ...]:
        """Note pieces of calls. A service of this package sends calls whole; others in pieces, told at the end."""
        whole = []
        for delta in deltas:
            function = delta.get("function") or {}
            call = self._calls.setdefault(int(delta.get("index", 0)), {"id": "", "name": "", "arguments": ""})
            call["id"] += str(delta.get("id") or "")
            for key in ("name", "arguments"):
                call[key] += str(function.get(key) or "")
            if self._own:
                whole.append(ToolCall(**call))
        return tuple(whole)

    @property
    def finished(self) -> bool:
        """Whether the server said how the answer ended."""
        return self._reason is not None

    def plan(self, cut: FinishReason | None = None) -> Plan:
        """What it adds up to. ``cut`` is why the reader stopped; None: the answer ended by itself."""
        now = time.perf_counter()
        extra = self._extra
        reason: FinishReason = cut or extra.get("finish_reason") or self._known_reason()
        calls, malformed = self._checked_calls()
        malformed += [MalformedToolCall(**one) for one in extra.get("malformed", ())]
        value: Any = None
        if self._options.schema is None:
            value = json_object(self._text)
        elif reason == "stop":
            value = json_value(self._text)
        details = self._usage.get("prompt_tokens_details") or {}
        lengths = tuple(extra.get("accept_lengths", self._lengths if self._own else ()))
        return Plan(
            object=value,
            text=self._text,
            thinking=self._thinking,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
            tokens=tuple(self._tokens),
            finish_reason=reason,
            prompt_tokens=int(self._usage.get("prompt_tokens") or extra.get("prompt_tokens") or 0),
            reused_tokens=int(extra.get("reused_tokens") or details.get("cached_tokens") or 0),
            accept_lengths=lengths,
            accept_length=sum(lengths) / len(lengths) if lengths else 0.0,
            timings=PlanTimings(**extra["timings"]) if "timings" in extra else self._timings(now),
            speculative=self._options.speculative,
            lossy=bool(extra.get("lossy", False)),
            relaxed_tokens=int(extra.get("relaxed_tokens", 0)),
            logprobs=tuple(self._logprobs),
        )

    def nothing(self) -> Plan:
        """The plan of an answer of which nothing can be used."""
        return Reading(self._options, self._began, own=self._own).plan("cancelled")

    def _known_reason(self) -> FinishReason:
        if self._reason not in _FINISH:
            raise ServiceError(f"the server ended the answer by {self._reason!r}, which is not known here")
        return _FINISH[self._reason]

    def _checked_calls(self) -> tuple[list[ToolCall], list[MalformedToolCall]]:
        calls, malformed = [], []
        for _, call in sorted(self._calls.items()):
            if isinstance(json_value(call["arguments"] or "{}"), dict) and call["name"]:
                calls.append(ToolCall(**call))
            else:
                malformed.append(MalformedToolCall(call["arguments"], "the arguments are no JSON object"))
        return calls, malformed

    def _timings(self, now: float) -> PlanTimings:
        """As seen from here: the server's queue is part of the first token's time."""
        first = self._first - self._began if self._first else 0.0
        return PlanTimings(0.0, first, first, now - self._first if self._first else 0.0, now - self._began)


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """An entry that a service of this package wrote; no other is asked for them."""
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
    if code == "context_length_exceeded":
        return ContextError(message)
    if code == "session_mismatch":
        return BundleError(message)
    if code in ("storage_full", "storage_failed"):
        return StorageError(message, full=code == "storage_full")
    if status in (401, 403) or status >= 500:
        return ServiceError(message)
    return RequestError(message)
