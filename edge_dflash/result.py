"""What a request gives: the plan, its parts as they become final, its timings. Values only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from edge_dflash.common.tables import no_constant
from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.drafts import NO_DRAFTING, Drafting
from edge_dflash.decode.logprobs import TokenLogprob
from edge_dflash.errors import RequestCancelledError
from edge_dflash.text.tool_calls import MalformedToolCall, ToolCall


@dataclass(frozen=True)
class PlanTimings:
    """Wall-clock seconds of one request, and how many drafts a cycle was given for them."""

    queue_seconds: float  # from the call to the start on the engine
    prefill_seconds: float  # the prompt's pass and the choice of the first token
    first_token_seconds: float  # from the call to the first token, queue and text handling included; 0 without one
    decode_seconds: float  # from the first token to the end
    total_seconds: float  # from the call to the end
    drafts: float = 0.0  # that a cycle verified, mean: as many as were measured to pay, unless a number was asked for

    def rate(self, tokens: int) -> float:
        """Tokens a second after the first token; 0 when there is only one."""
        return (tokens - 1) / self.decode_seconds if tokens > 1 and self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Plan:
    """A finished request."""

    object: Any  # the answer's JSON: of a schema, whenever it ended by itself; else an object, or None if it is none
    text: str | None  # the answer, without thinking and special tokens; None when the bundle has no tokenizer
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    malformed: tuple[MalformedToolCall, ...]  # tool calls that cannot be run
    tokens: tuple[int, ...]  # all of them, thinking too; a stop token, if one ended the plan, is the last
    finish_reason: FinishReason  # stop (a stop token or text), length, context, deadline or cancelled
    prompt_tokens: int
    reused_tokens: int  # of the prompt, not computed again: the session's own or a known prefix
    accept_lengths: tuple[int, ...]  # tokens committed by each verify, bonus token included
    accept_length: float  # their mean; 0 when no verify was needed
    timings: PlanTimings
    speculative: bool  # False: plain decoding was asked for, one token a verify
    lossy: bool  # whether acceptance was relaxed anywhere, whatever came of it: then speed may have changed the tokens
    relaxed_tokens: int  # tokens that the target itself would not have chosen; 0 unless lossy
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of the tokens, if they were asked for
    prompt_logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # of each token of the prompt, or none where it was cut before its end
    drafting: Drafting = NO_DRAFTING  # drafts that each cycle verified and accepted, and the acceptance by position
    seed: int = 0  # with which its tokens were drawn
    score: float | None = None  # of a candidate: its mean log-probability, or what ``rank`` gave it
    alternatives: tuple[Plan, ...] = ()  # the other candidates, best first

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, without the prompt."""
        return self.timings.rate(len(self.tokens))


@dataclass(frozen=True)
class Increment:
    """What became final together in a stream: the tokens of one commit, and the text that is certain with them."""

    text: str | None  # of the answer; may be "" while a character is incomplete; None without a tokenizer
    tokens: tuple[int, ...]
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens, if they were asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt, before all tokens, if they were asked for


@dataclass(frozen=True)
class Score:
    """How likely the model held each token of a text after those before it."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # of each token but the first, which nothing comes before
    timings: PlanTimings

    @classmethod
    def of(cls, plan: Plan) -> Score:
        """That of a plan's prompt. Raises RequestCancelledError for one that ended before its prompt did."""
        if not (found := plan.prompt_logprobs):
            raise RequestCancelledError(
                f"scoring ended ({plan.finish_reason}) before all {plan.prompt_tokens} tokens were gone over; "
                "ask again, or give a later deadline"
            )
        return cls(tuple(one.token for one in found), found[1:], plan.timings)

    @property
    def total(self) -> float:
        """The log-probability of all tokens after the first: the sum."""
        return math.fsum(one.logprob for one in self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-total / tokens after the first); infinity beyond a float's range."""
        try:
            return math.exp(-self.total / len(self.logprobs))
        except OverflowError:
            return math.inf


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, after a closed thinking span and inside an optional code fence; else None."""
    body = text.rpartition("</think>")[2].strip()
    if body.startswith("```") and body.endswith("```"):
        body = body[3:-3].removeprefix("json").strip()
    value = json_value(body)
    return value if isinstance(value, dict) else None


def json_value(text: str) -> Any:
    """The JSON value that ``text`` is, or None. NaN, Infinity and numbers beyond a float's range are not JSON."""
    try:
        return json.loads(text, parse_constant=no_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value
