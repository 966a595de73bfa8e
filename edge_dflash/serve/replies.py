"""Bodies of the OpenAI API, written: plans as completions, increments as chunks, and what OpenAI has no field for.

Knows plans and JSON, nothing of HTTP.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from edge_dflash.result import Increment, Plan
from edge_dflash.serve.logprobs import LogprobWriter
from edge_dflash.serve.openai import Call

_FINISH = {"stop": "stop", "length": "length", "context": "length", "deadline": "length", "cancelled": "length"}


def finish_reason(plan: Plan) -> str:
    """OpenAI's word for the end of a plan; ``edge_dflash.finish_reason`` has ours."""
    return "tool_calls" if plan.tool_calls and plan.finish_reason == "stop" else _FINISH[plan.finish_reason]


def usage(plan: Plan) -> dict[str, Any]:
    """Tokens of a request."""
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": len(plan.tokens),
        "total_tokens": plan.prompt_tokens + len(plan.tokens),
        "prompt_tokens_details": {"cached_tokens": plan.reused_tokens},
    }


def extension(call: Call, plan: Plan, details: Mapping[str, Any]) -> dict[str, Any]:
    """What stands under ``edge_dflash``."""
    extra: dict[str, Any] = {
        "finish_reason": plan.finish_reason,
        "accept_length": plan.accept_length,
        "accept_lengths": list(plan.accept_lengths),
        "timings": asdict(plan.timings),
        "tokens_per_second": plan.tokens_per_second,
        "speculative": plan.speculative,
        "lossy": plan.lossy,
        "relaxed_tokens": plan.relaxed_tokens,
        "reused_tokens": plan.reused_tokens,
        "prompt_tokens": plan.prompt_tokens,
        "seed": call.options.get("seed", 0),
        "session": call.session,
        "malformed": [asdict(one) for one in plan.malformed],
    }
    if call.with_tokens:
        extra["tokens"] = list(plan.tokens)
    return {**extra, **details}


@dataclass(frozen=True)
class Writer:
    """Writes the answers to one request."""

    call: Call
    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    _logprobs: LogprobWriter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_logprobs", LogprobWriter(self.call))

    def _head(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.call.chat else "text_completion"
        return {
            "id": ("chatcmpl-" if self.call.chat else "cmpl-") + self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def whole(self, plan: Plan, details: Mapping[str, Any]) -> dict[str, Any]:
        """A finished plan."""
        logprobs = self._logprobs.add(plan.logprobs)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason(plan), "logprobs": logprobs}
        if self.call.chat:
            choice["message"] = self._message(plan)
        else:
            choice["text"] = plan.text or ""
        extra = extension(self.call, plan, details)
        return {**self._head(chunk=False), "choices": [choice], "usage": usage(plan), "edge_dflash": extra}

    def _message(self, plan: Plan) -> dict[str, Any]:
        calls = [call.openai() for call in plan.tool_calls]
        content = plan.text or ""
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        message["refusal"] = None
        if plan.thinking:
            message["reasoning_content"] = plan.thinking
        if calls:
            message["tool_calls"] = calls
        return message

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a chat; a completion has none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self.call.chat else None

    def piece(self, part: Increment, calls_before: int) -> dict[str, Any] | None:
        """The chunk of an increment; None when there is nothing to say. ``calls_before``: tool calls already sent."""
        if self.call.chat:
            delta: dict[str, Any] = {"content": part.text} if part.text else {}
            if part.thinking:
                delta["reasoning_content"] = part.thinking
            if part.tool_calls:
                delta["tool_calls"] = [
                    {"index": index, **call.openai()} for index, call in enumerate(part.tool_calls, calls_before)
                ]
            choice: dict[str, Any] = {"delta": delta}
        else:
            choice = {"text": part.text or ""}
        choice["logprobs"] = self._logprobs.add(part.logprobs) if part.logprobs else None
        if not any(choice.values()) and not (self.call.with_tokens and part.tokens):
            return None
        made = self._chunk(choice)
        if self.call.with_tokens:
            made["edge_dflash"] = {"tokens": list(part.tokens)}
        return made

    def closing(self, plan: Plan, details: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last chunks: the end and its details, then the usage if it was asked for."""
        last = self._chunk({"delta": {}} if self.call.chat else {"text": ""}, finish_reason(plan))
        last["edge_dflash"] = extension(self.call, plan, details)
        if not self.call.include_usage:
            return [last]
        return [last, {**self._head(chunk=True), "choices": [], "usage": usage(plan)}]

    def _chunk(self, choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        made = {
            **self._head(chunk=True),
            "choices": [{"index": 0, "logprobs": None, **choice, "finish_reason": reason}],
        }
        if self.call.include_usage:
            made["usage"] = None
        return made
