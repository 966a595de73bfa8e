"""Bodies of the OpenAI API, read: what of a request becomes which option of a plan.

Everything that is sent is used or refused by name. Parameters that OpenAI defines and that have one meaning here
(``n``, penalties) are taken at that meaning only. What OpenAI does not define stands under
``edge_dflash``. Knows nothing of HTTP, of queues or of models.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_dflash.decode.options import PRIORITIES, PlanOptions
from edge_dflash.decode.sampling import MOST_ALTERNATIVES
from edge_dflash.serve.config import DefaultConfig, LimitConfig
from edge_dflash.serve.fields import Fields
from edge_dflash.serve.messages import read_messages, read_prompt
from edge_dflash.serve.names import NAME, WHY, session_name
from edge_dflash.serve.refusal import Refusal
from edge_dflash.serve.tools import read_tools
from edge_dflash.text.tokenizer import Message

DAY = 86400.0
_STOP = {"type": "string", "minLength": 1, "maxLength": 999}


@dataclass(frozen=True)
class Call:
    """A request of the API, read."""

    task: str | list[Message] | tuple[int, ...]  # a text is a completion's prompt, used as it is
    options: PlanOptions  # without deadline, which counts from the request's arrival
    chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    deadline: float | None
    session: str | None
    with_tokens: bool  # token ids in every piece
    budget_is_default: bool  # max_new_tokens is the service's own: less will do where the context holds less


def chat_call(body: dict[str, Any], limits: LimitConfig, defaults: DefaultConfig) -> Call:
    """Read the body of ``/v1/chat/completions``."""
    fields = Fields(body)
    messages = read_messages(fields)
    options = PlanOptions()
    read_tools(fields, options)
    _form(fields, options)
    return _call(fields, messages, options, limits, defaults, chat=True)


def completion_call(body: dict[str, Any], limits: LimitConfig, defaults: DefaultConfig) -> Call:
    """Read the body of ``/v1/completions``."""
    fields = Fields(body)
    prompt = read_prompt(fields)
    options = PlanOptions()
    fields.only("suffix", "", why="text behind the answer cannot be given")
    fields.only("echo", False, why="the prompt cannot be echoed; leave echo out")
    fields.only("best_of", 1, why="one answer is made; give 1")
    _form(fields, options)
    return _call(fields, prompt, options, limits, defaults, chat=False)


def encode_call(body: dict[str, Any]) -> tuple[Any, bool, bool]:
    """Read the body of ``/v1/edge_dflash/encode``.

    Returns what is to be encoded, whether the template is to open thinking, and whether the text is used as it is.
    """
    fields = Fields(body)
    if (text := fields.text("text", facts={"pattern": r"\S"})) is None:
        fields.also({"properties": {"text": {"type": "null"}}}, variant="messages")
        task: Any = read_messages(fields, "give messages, or a text")
    else:
        fields.also({"required": ["text"], "properties": {"text": {"type": "string"}}}, variant="text")
        fields.only("messages", why="text is given too; give one of them")
        task = text
    thinking, raw = fields.flag("thinking") or False, fields.flag("raw") or False
    fields.done()
    return task, thinking, raw


def _call(
    fields: Fields,
    task: str | list[Message] | tuple[int, ...],
    options: PlanOptions,
    limits: LimitConfig,
    defaults: DefaultConfig,
    *,
    chat: bool,
) -> Call:
    model = fields.text("model")
    stream = fields.flag("stream") or False
    include_usage = _stream_options(fields, stream)
    _sampling(fields, options, defaults)
    _logprobs(fields, options, chat=chat)
    budget_is_default = _budget(fields, options, limits)
    _stop(fields, options)
    user = fields.text("user")
    extra = fields.inner("edge_dflash") or Fields({}, "edge_dflash")
    deadline, session, with_tokens = _extension(extra, options, defaults)
    options.setdefault("caller", (user or "")[:64])
    _fixed(fields)
    fields.done()
    _sizes(task, options, limits)
    return Call(task, options, chat, model, stream, include_usage, deadline, session, with_tokens, budget_is_default)


def _form(fields: Fields, options: PlanOptions) -> None:
    form = fields.inner("response_format")
    if form is None:
        return
    kind = form.kind("type", "text", "json_object", "json_schema")
    if kind == "json_object":
        options["schema"] = {"type": "object"}
    elif kind == "json_schema":
        wanted = 'give {"name": ..., "schema": {...}}'
        inner = form.inner("json_schema", needed=wanted) or Fields({})
        schema = inner.mapping("schema", needed=wanted)
        for known in ("name", "description"):
            inner.text(known)
        inner.flag("strict")  # a schema is always obeyed
        inner.done()
        options["schema"] = schema
    form.done()


def _stream_options(fields: Fields, stream: bool) -> bool:
    given = fields.inner("stream_options")
    if given is None:
        return False
    if not stream:
        fields.fail("stream_options", {}, "it needs stream: true")
    usage = given.flag("include_usage") or False
    given.only("include_obfuscation", False, why="nothing is padded here; give false")
    given.done()
    return usage


def _sampling(fields: Fields, options: PlanOptions, defaults: DefaultConfig) -> None:
    temperature = fields.number("temperature", 0.0, 2.0)
    options["temperature"] = defaults.temperature if temperature is None else temperature
    if (top_p := fields.number("top_p", 0.0, 1.0)) is not None:
        options["top_p"] = top_p
        if top_p == 0.0:  # the smallest set of tokens: the best one
            options["top_p"], options["top_k"] = 1.0, 1
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    if seed is not None:
        options["seed"] = seed % 2**64
    elif options["temperature"] > 0:
        options["seed"] = secrets.randbits(32)  # drawn anew for each request, and told in the answer


def _logprobs(fields: Fields, options: PlanOptions, *, chat: bool) -> None:
    """A chat says whether, and how many alternatives; a completion says both in one number."""
    if not chat:
        options["logprobs"] = fields.integer("logprobs", 0, MOST_ALTERNATIVES)
        fields.only("top_logprobs", 0, why="a completion has logprobs as a number of alternatives; leave it out")
        return
    wanted, alternatives = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives and not wanted:
        fields.fail("top_logprobs", alternatives, "it needs logprobs: true")
    options["logprobs"] = (alternatives or 0) if wanted else None


def _budget(fields: Fields, options: PlanOptions, limits: LimitConfig) -> bool:
    """Set the budget; return whether it is the service's own."""
    names = ("max_completion_tokens", "max_tokens")
    given = {name: fields.integer(name, 1, limits.new_tokens or 2**31) for name in names}
    values = {value for value in given.values() if value is not None}
    if len(values) > 1:
        raise Refusal(f"{names[0]} and {names[1]} differ; give one of them", param=names[0])
    if not values:
        options["max_new_tokens"] = limits.new_tokens or None
        return True
    options["max_new_tokens"] = values.pop()
    return False


def _stop(fields: Fields, options: PlanOptions) -> None:
    stop = fields.take("stop", {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}]})
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(texts, list)
        or len(texts) > 16
        or not all(isinstance(t, str) and 0 < len(t) < 1000 for t in texts)
    ):
        fields.fail("stop", stop, "give a text or at most 16, each of 1 to 999 characters")
    if texts and options.get("schema") is not None:
        fields.fail("stop", stop, "only its own end ends a response_format: leave stop or response_format out")
    options["stop"] = tuple(texts)


def _extension(extra: Fields, options: PlanOptions, defaults: DefaultConfig) -> tuple[float | None, str | None, bool]:
    """Read what stands under ``edge_dflash``; return deadline, session and whether token ids are wanted."""
    for form in ("regex", "grammar"):
        if (text := extra.text(form)) is not None:
            options[form] = text
    for flag in ("whitespace", "relaxed", "speculative", "raw"):
        if (wanted := extra.flag(flag)) is not None:
            options[flag] = wanted
    thinking = extra.flag("thinking")
    options["thinking"] = defaults.thinking if thinking is None else thinking
    if (top_k := extra.integer("top_k", 0, 2**31)) is not None:
        options["top_k"] = top_k
    if (priority := extra.integer("priority", *PRIORITIES)) is not None:
        options["priority"] = priority
    if (caller := extra.text("caller")) is not None:
        options["caller"] = caller[:64]
    session = extra.text("session", facts=NAME)
    if session is not None and not session_name(session):
        extra.fail("session", session, WHY)
    with_tokens = extra.flag("tokens") or False
    deadline = extra.number("deadline_s", 0.0, DAY)
    extra.done()
    return deadline, session, with_tokens


def _fixed(fields: Fields) -> None:
    """Parameters of the OpenAI API with one meaning here, and those that say nothing about the answer."""
    fields.only("n", 1, why="one answer is made, and n above 1 is not supported yet; give 1")
    fields.only("logit_bias", {}, why="logits cannot be biased; leave it out")
    fields.only("store", False, why="nothing is stored; give false")
    fields.only("service_tier", "auto", "default", why="there is one tier; leave it out")
    fields.only("modalities", ["text"], why="answers are text")
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0, 0.0, why="it would change what the model says; give 0")
    fields.mapping("metadata")  # the caller's own notes
    for name in ("safety_identifier", "prompt_cache_key"):
        fields.text(name)


def _sizes(task: str | list[Message] | tuple[int, ...], options: PlanOptions, limits: LimitConfig) -> None:
    if limits.schema_bytes:
        for name in ("schema", "regex", "grammar"):
            if _larger(options.get(name), limits.schema_bytes):
                raise Refusal(f"{name} has more than {limits.schema_bytes} bytes, the limit; give a smaller one")
    if limits.prompt_chars and (size := _chars(task)) > limits.prompt_chars:
        raise Refusal(f"the texts have {size} characters, the limit is {limits.prompt_chars}; send less")


def _larger(form: object, limit: int) -> bool:
    """Whether a form has more characters, as JSON if it is no text; it is written no further than the limit."""
    if form is None or isinstance(form, str):
        return len(form or "") > limit
    sizes = itertools.accumulate(len(part) for part in json.JSONEncoder().iterencode(form))
    return any(size > limit for size in sizes)


def _chars(task: str | Sequence[Any]) -> int:
    if isinstance(task, str):
        return len(task)
    return sum(len(json.dumps(item)) if isinstance(item, dict) else 1 for item in task)
