"""Bodies of the OpenAI API, read: what of a request becomes which option of a plan.

Everything that is sent is used or refused by name. Parameters that OpenAI defines and that have one meaning here
(``n``, penalties) are taken at that meaning only. What OpenAI does not define stands under ``edge_dflash``.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_dflash.client.api import WORDS
from edge_dflash.decode.options import PlanOptions
from edge_dflash.decode.sampling import MOST_ALTERNATIVES
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.fields import Fields, Refusal, session_name
from edge_dflash.serve.messages import Prompt, read_messages, read_prompt, read_tools
from edge_dflash.serve.openapi import NAME

DAY = 86400.0
_STOP = {"type": "string", "minLength": 1, "maxLength": 999}


@dataclass(frozen=True)
class Call:
    """A request of the API, read."""

    task: Prompt  # a text is a completion's prompt, used as it is
    options: PlanOptions  # its deadline counts from the request's arrival
    chat: bool
    model: str | None
    stream: bool
    include_usage: bool
    session: str | None
    with_tokens: bool  # token ids in every piece
    budget_is_default: bool  # max_new_tokens is the service's own: less will do where the context holds less


def chat_call(body: Mapping[str, Any], config: ServeConfig) -> Call:
    """Read the body of ``/v1/chat/completions``. Raises Refusal."""
    fields = Fields(body)
    messages = read_messages(fields)
    options = read_tools(fields)
    return _call(fields, messages, options, config, chat=True)


def completion_call(body: Mapping[str, Any], config: ServeConfig) -> Call:
    """Read the body of ``/v1/completions``. Raises Refusal."""
    fields = Fields(body)
    prompt = read_prompt(fields)
    fields.only("suffix", "", why="text behind the answer cannot be given")
    fields.only("echo", False, why="the prompt cannot be echoed; leave echo out")
    fields.only("best_of", 1, why="one answer is made; give 1")
    return _call(fields, prompt, PlanOptions(), config, chat=False)


def _call(fields: Fields, task: Prompt, options: PlanOptions, config: ServeConfig, *, chat: bool) -> Call:
    _form(fields, options)
    model = fields.text("model")
    stream = fields.flag("stream") or False
    include_usage = _stream_options(fields, stream)
    _sampling(fields, options, config.defaults.temperature)
    _logprobs(fields, options, chat=chat)
    budget_is_default = _budget(fields, options, config.limits.new_tokens)
    _stop(fields, options)
    user = fields.text("user")
    extra = fields.inner("edge_dflash") or Fields({}, "edge_dflash")
    session, with_tokens = _extension(extra, options, config)
    options["caller"] = (options.get("caller", user) or "")[:64]
    _fixed(fields)
    fields.done()
    _bounded(task, options, config)
    return Call(task, options, chat, model, stream, include_usage, session, with_tokens, budget_is_default)


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
        options["schema"] = inner.mapping("schema", needed=wanted)
        for known in ("name", "description"):
            inner.text(known)
        inner.flag("strict")  # a schema is always obeyed
        inner.done()
    form.done()


def _stream_options(fields: Fields, stream: bool) -> bool:
    """Whether the usage is wanted."""
    given = fields.inner("stream_options")
    if given is None:
        return False
    if not stream:
        fields.fail("stream_options", {}, "it needs stream: true")
    usage = given.flag("include_usage") or False
    given.only("include_obfuscation", False, why="nothing is padded here; give false")
    given.done()
    return usage


def _sampling(fields: Fields, options: PlanOptions, default: float) -> None:
    temperature = fields.number("temperature", 0.0, 2.0)
    options["temperature"] = default if temperature is None else temperature
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


def _budget(fields: Fields, options: PlanOptions, most: int) -> bool:
    """Set the budget, at most ``most`` tokens if that is not 0; return whether it is the service's own."""
    names = ("max_completion_tokens", "max_tokens")
    given = {name: fields.integer(name, 1, most or 2**31) for name in names}
    values = {value for value in given.values() if value is not None}
    if len(values) > 1:
        raise Refusal(f"{names[0]} and {names[1]} differ; give one of them", param=names[0])
    options["max_new_tokens"] = values.pop() if (asked := bool(values)) else most or None
    return not asked


def _stop(fields: Fields, options: PlanOptions) -> None:
    stop = fields.take("stop", {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}]})
    if stop is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    good = isinstance(texts, list) and len(texts) <= 16
    if not good or not all(isinstance(text, str) and 0 < len(text) < 1000 for text in texts):
        fields.fail("stop", stop, "give a text or at most 16, each of 1 to 999 characters")
    if texts and options.get("schema") is not None:
        fields.fail("stop", stop, "only its own end ends a response_format: leave stop or response_format out")
    options["stop"] = tuple(texts)


def _extension(extra: Fields, options: PlanOptions, config: ServeConfig) -> tuple[str | None, bool]:
    """Read what stands under ``edge_dflash``; return the session and whether token ids are wanted."""
    options["thinking"] = config.defaults.thinking
    for name, kind in WORDS.items():
        if isinstance(kind, tuple):
            value: Any = extra.integer(name, *kind)
        else:
            value = extra.flag(name) if kind is bool else extra.text(name)
        if value is not None:
            options[name] = value  # type: ignore[literal-required]
    session = extra.text("session", facts=NAME)
    if session is not None:
        session_name(session, extra.name("session"))
    with_tokens = extra.flag("tokens") or False
    if (deadline := extra.number("deadline_s", 0.0, DAY)) is not None:
        options["deadline"] = deadline
    extra.done()
    return session, with_tokens


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


def _bounded(task: Prompt, options: PlanOptions, config: ServeConfig) -> None:
    """Refuse forms and texts that are larger than the service takes."""
    most = config.limits.schema_bytes
    for name in ("schema", "regex", "grammar") if most else ():
        if _larger(options.get(name), most):
            raise Refusal(f"{name} has more than {most} bytes, the limit; give a smaller one")
    most = config.limits.prompt_chars
    if most and (size := _chars(task)) > most:
        raise Refusal(f"the texts have {size} characters, the limit is {most}; send less")


def _larger(form: object, limit: int) -> bool:
    """Whether a form has more characters, as JSON if it is no text; it is written no further than the limit."""
    if form is None or isinstance(form, str):
        return len(form or "") > limit
    sizes = itertools.accumulate(len(part) for part in json.JSONEncoder().iterencode(form))
    return any(size > limit for size in sizes)


def _chars(task: Prompt) -> int:
    if isinstance(task, str):
        return len(task)
    return sum(len(json.dumps(item)) if isinstance(item, Mapping) else 1 for item in task)
