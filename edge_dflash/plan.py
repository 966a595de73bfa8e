"""What a request gives: the plan, its parts as they become final, its timings. Values only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from edge_dflash.spec.accept import FinishReason


@dataclass(frozen=True)
class PlanTimings:
    """Wall-clock seconds of one request."""

    prefill_seconds: float  # the prompt's pass and the choice of the first token
    first_token_seconds: float  # from the request to the first token, text handling included
    decode_seconds: float  # from the first token to the last
    total_seconds: float

    def rate(self, tokens: int) -> float:
        """Tokens a second after the first token; 0 when there is only one."""
        return (tokens - 1) / self.decode_seconds if tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """A finished request."""

    text: str | None  # without special tokens; None when the bundle has no tokenizer
    tokens: tuple[int, ...]  # a stop token, if one ended the plan, is the last
    finish_reason: FinishReason
    prompt_tokens: int
    accept_lengths: tuple[int, ...]  # tokens committed by each verify, bonus token included
    accept_length: float  # their mean; 0 when no verify was needed
    timings: PlanTimings
    speculative: bool  # False: plain decoding, one token a verify

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without the prompt."""
        return self.timings.rate(len(self.tokens))

    @property
    def json(self) -> dict[str, Any] | None:
        """The JSON object that the text is, or None when it is none or is cut short."""
        return json_object(self.text) if self.text is not None else None


@dataclass(frozen=True)
class Increment:
    """What became final together in a stream."""

    text: str | None  # may be "" while a character is incomplete; None when the bundle has no tokenizer
    tokens: tuple[int, ...]


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, after a closed thinking span and inside an optional code fence; else None."""
    body = text.rpartition("</think>")[2].strip()
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
