"""A streamed answer of the OpenAI API as a plan, and the errors that a server may answer with instead."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.drafts import Drafting
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


@dataclass
class Reading:
    """One answer, as far as it has come."""

    options: Options
    began: float  # time.perf_counter() of the call
    own: bool  # the server is a service of this package
    index: int = 0  # of the choice, where there are several
    _first: float = 0.0  # time.perf_counter() of the first piece
    _text: str = ""
    _thinking: str = ""
    _tokens: tuple[int, ...] = ()
    _logprobs: tuple[TokenLogprob, ...] = ()
    _lengths: list[int] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)  # by their index
    _reason: str | None = None
    _usage: Mapping[str, Any] = field(default_factory=dict)
    _extra: Mapping[str, Any] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any]) -> Increment | None:
        """Take an event. Raises the error that it carries."""
        if chunk.get("error"):
            raise error_of(500, chunk)
        if isinstance(usage := chunk.get("usage"), Mapping):
            self._usage = usage
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
        thinking = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        if not self.own:
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
            if self.own:
                whole.append(ToolCall(**call))
        return tuple(whole)

    @property
    def finished(self) -> bool:
        """Whether the server said how the answer ended."""
        return self._reason is not None

    def plan(self, cut: FinishReason | None = None) -> Plan:
        """What it adds up to. ``cut`` is why the reader stopped; None: the answer ended by itself.

        Raises ServiceError when it ended in a way that is not known.
        """
        now, extra, details = time.perf_counter(), self._extra, self._usage.get("prompt_tokens_details") or {}
        reason: FinishReason | None = cut or extra.get("finish_reason") or _FINISH.get(str(self._reason))
        if reason is None:
            raise ServiceError(f"the server ended the answer by {self._reason!r}, which is not known here")
        calls, malformed = [], []
        for _, call in sorted(self._calls.items()):
            if isinstance(json_value(call["arguments"] or "{}"), dict) and call["name"]:
                calls.append(ToolCall(**call))
            else:
                malformed.append(MalformedToolCall(call["arguments"], "the arguments are no JSON object"))
        malformed += [MalformedToolCall(**one) for one in extra.get("malformed", ())]
        value = json_value(self._text) if self.options.schema is not None and reason == "stop" else None
        lengths = tuple(extra.get("accept_lengths", self._lengths if self.own else ()))
        first, decoding = (self._first - self.began, now - self._first) if self._first else (0.0, 0.0)
        timings = PlanTimings(0.0, first, first, decoding, now - self.began)  # as seen from here, the queue included
        return Plan(
            object=json_object(self._text) if self.options.schema is None else value,
            text=self._text,
            thinking=self._thinking,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
            tokens=self._tokens,
            finish_reason=reason,
            prompt_tokens=int(self._usage.get("prompt_tokens") or extra.get("prompt_tokens") or 0),
            reused_tokens=int(extra.get("reused_tokens") or details.get("cached_tokens") or 0),
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
    if code in ("storage_full", "storage_failed"):
        return StorageError(message, full=code == "storage_full")
    if code in ("context_length_exceeded", "session_mismatch"):
        return ContextError(message) if code == "context_length_exceeded" else BundleError(message)
    return ServiceError(message) if status in (401, 403) or status >= 500 else RequestError(message)
