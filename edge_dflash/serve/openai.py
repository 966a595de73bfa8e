"""Bodies of the OpenAI API, read: what of a request becomes which option of a plan.

Everything that is sent is used or refused by name. Parameters that OpenAI and servers of other models define and that
have one meaning here (``best_of``, penalties) are taken at that meaning only. What has no word there stands under
``edge_dflash``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from edge_dflash.decode.options import DECLARED, PlanOptions
from edge_dflash.decode.sampling import MOST_ALTERNATIVES, Sampling
from edge_dflash.runner.planning import MOST_CANDIDATES
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.fields import BodyFields, Refusal, session_name
from edge_dflash.serve.limits import bound_request
from edge_dflash.serve.messages import check_results, read_messages, read_tools
from edge_dflash.serve.openapi import NAME
from edge_dflash.serve.shapes import EFFORTS, NEUTRAL, PROMPT, PROMPT_WHY, STOP
from edge_dflash.text.template import Message

Prompt: TypeAlias = str | list[Message] | tuple[int, ...]


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
    n: int  # choices: candidate i has the seed plus i

    @property
    def distinct(self) -> int:
        """How many of the choices differ: without a temperature all are the same."""
        return self.n if self.options["temperature"] else 1


def chat_call(body: Mapping[str, Any], config: ServeConfig) -> Call:
    """Read the body of ``/v1/chat/completions``. Raises Refusal."""
    fields = BodyFields(body)
    messages = read_messages(fields)
    call = _call(fields, messages, read_tools(fields), config, chat=True)
    if call.session is None:  # else its earlier messages count, too
        check_results(messages)
    return call


def completion_call(body: Mapping[str, Any], config: ServeConfig) -> Call:
    """Read the body of ``/v1/completions``. Raises Refusal."""
    fields = BodyFields(body)
    prompt = _prompt(fields)
    fields.only("suffix", "", why="text behind the answer cannot be given")
    return _call(fields, prompt, PlanOptions(), config, chat=False)


def _call(fields: BodyFields, task: Prompt, options: PlanOptions, config: ServeConfig, *, chat: bool) -> Call:
    _form(fields, options)
    model = fields.text("model")
    stream = fields.flag("stream") or False
    include_usage = _stream_options(fields, stream)
    _sampling(fields, options, config.defaults.temperature)
    _logprobs(fields, options, chat=chat)
    budget_is_default = _budget(fields, options, config.limits.new_tokens)
    _stop(fields, options)
    extra = fields.inner("edge_dflash") or BodyFields({}, "edge_dflash")
    session, with_tokens = _extension(extra, options)
    _several_names(fields, options, config, chat=chat)
    if (n := fields.integer("n", 1, MOST_CANDIDATES) or 1) > 1 and session is not None:
        fields.fail("n", n, "a session goes on from one answer; give 1, or leave session out")
    _fixed(fields)
    fields.done()
    bound_request(task, options, config.limits)
    return Call(task, options, chat, model, stream, include_usage, session, with_tokens, budget_is_default, n)


def _form(fields: BodyFields, options: PlanOptions) -> None:
    if (form := fields.inner("response_format")) is None:
        return
    kind = form.kind("type", "text", "json_object", "json_schema")
    if kind == "json_object":
        options["schema"] = {"type": "object"}
    elif kind == "json_schema":
        wanted = 'give {"name": ..., "schema": {...}}'
        inner = form.inner("json_schema", needed=wanted) or BodyFields({})
        options["schema"] = inner.mapping("schema", needed=wanted)
        inner.text("name")
        inner.text("description")
        inner.flag("strict")  # a schema is always obeyed
        inner.done()
    form.done()


def _stream_options(fields: BodyFields, stream: bool) -> bool:
    """Whether the usage is wanted."""
    if (given := fields.inner("stream_options")) is None:
        return False
    if not stream:
        fields.fail("stream_options", {}, "it needs stream: true")
    usage = given.flag("include_usage") or False
    given.only("include_obfuscation", False, why="nothing is padded here; give false")
    given.only("continuous_usage_stats", False, why="the usage comes last; give false")
    given.done()
    return usage


def _sampling(fields: BodyFields, options: PlanOptions, default: float) -> None:
    temperature = fields.number("temperature", 0.0, 2.0)
    options["temperature"] = Sampling(default if temperature is None else temperature).temperature
    if (top_p := fields.number("top_p", 0.0, 1.0)) is not None:
        options["top_p"] = top_p
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    if seed is not None or options["temperature"] > 0:  # drawn anew for each request, and told in the answer
        options["seed"] = secrets.randbits(32) if seed is None else seed % 2**64


def _logprobs(fields: BodyFields, options: PlanOptions, *, chat: bool) -> None:
    """A chat says whether, and how many alternatives; a completion says both in one number."""
    if not chat:
        options["logprobs"] = fields.integer("logprobs", 0, MOST_ALTERNATIVES)
        fields.only("top_logprobs", 0, why="a completion has logprobs as a number of alternatives; leave it out")
        return
    wanted, alternatives = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives and not wanted:
        fields.fail("top_logprobs", alternatives, "it needs logprobs: true")
    options["logprobs"] = (alternatives or 0) if wanted else None


def _budget(fields: BodyFields, options: PlanOptions, most: int) -> bool:
    """Set the budget, at most ``most`` tokens if that is not 0; return whether it is the service's own."""
    names = ("max_completion_tokens", "max_tokens")
    given = _agreed({name: fields.integer(name, 1, most or 2**31) for name in names})
    options["max_new_tokens"] = most or None if given is None else given
    return given is None


def _stop(fields: BodyFields, options: PlanOptions) -> None:
    if (stop := fields.take("stop", {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": 16}]})) is None:
        return
    texts = [stop] if isinstance(stop, str) else stop
    good = isinstance(texts, list) and len(texts) <= 16
    if not good or not all(isinstance(text, str) and 0 < len(text) < 1000 for text in texts):
        fields.fail("stop", stop, "give a text or at most 16, each of 1 to 999 characters")
    if texts and options.get("schema") is not None:
        fields.fail("stop", stop, "only its own end ends a response_format: leave stop or response_format out")
    options["stop"] = tuple(texts)


def _extension(extra: BodyFields, options: PlanOptions) -> tuple[str | None, bool]:
    """Read what stands under ``edge_dflash``; return the session and whether token ids are wanted."""
    for name, place in DECLARED.items():
        if place.http and (value := extra.take(name, place.rule.schema)) is not None:
            options[name] = place.rule.read(value, extra.name(name))  # type: ignore[literal-required]
    if (session := extra.text("session", facts=NAME)) is not None:
        session_name(session, extra.name("session"))
    with_tokens = extra.flag("tokens") or False
    if (deadline := extra.number("deadline_s", 0.0, 86400.0)) is not None:
        options["deadline"] = deadline
    extra.done()
    return session, with_tokens


def _several_names(fields: BodyFields, options: PlanOptions, config: ServeConfig, *, chat: bool) -> None:
    """Options that other servers have a name for, too; and what holds where none is given."""
    top_k = fields.integer("top_k", -1, 2**31)  # -1 and 0: no limit
    options["top_k"] = _agreed({"top_k": top_k and max(top_k, 0), "edge_dflash.top_k": options.get("top_k")}) or 0
    if options.get("top_p") == 0.0:  # the smallest set of tokens: the best one
        options["top_p"], options["top_k"] = 1.0, 1
    caller = _agreed({"user": fields.text("user"), "edge_dflash.caller": options.get("caller")})
    options["caller"] = (caller or "")[:64]
    options.setdefault("draft_confidence", config.defaults.draft_confidence)
    own = options.get("thinking")
    if not chat:
        if own:
            fields.fail("edge_dflash.thinking", own, "a completion has no chat template, which opens it; send messages")
        options["thinking"] = False
        return
    effort = fields.take("reasoning_effort", {"enum": list(EFFORTS)})
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        fields.fail("reasoning_effort", effort, f"give one of {', '.join(EFFORTS)}")
    given = {"edge_dflash.thinking": own, "reasoning_effort": None if effort is None else EFFORTS[effort]}
    given["enable_thinking"] = fields.flag("enable_thinking")
    if (variables := fields.inner("chat_template_kwargs")) is not None:
        given["chat_template_kwargs.enable_thinking"] = variables.flag("enable_thinking")
        variables.done()
    thinking = _agreed(given)
    options["thinking"] = config.defaults.thinking if thinking is None else thinking


def _agreed(given: Mapping[str, Any]) -> Any:
    """What is given under several names; None when it is under none."""
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        raise Refusal(f"{' and '.join(said)} differ; give one of them", param=next(iter(said)))
    return next(iter(said.values()), None)


def _fixed(fields: BodyFields) -> None:
    """Parameters with one meaning here, and those that say nothing about the answer."""
    for name, (why, *accepted) in NEUTRAL.items():
        fields.only(name, *accepted, why=why)
    fields.mapping("metadata")  # the caller's own notes
    fields.text("safety_identifier")
    fields.text("prompt_cache_key")
    fields.text("prompt_cache_retention")


def _prompt(fields: BodyFields) -> str | tuple[int, ...]:
    """The ``prompt`` of a completion: a text or token ids. Raises Refusal."""
    prompt = fields.take("prompt", PROMPT, needed=PROMPT_WHY)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        fields.fail("prompt", prompt, PROMPT_WHY)
    ids = tuple(int(token) if type(token) is float and token.is_integer() else token for token in prompt)
    if not all(type(token) is int and token >= 0 for token in ids):
        fields.fail("prompt", prompt, PROMPT_WHY)
    return ids
