"""Bodies of the OpenAI API, read: what of a request becomes which option of a plan.

Everything that is sent is used or refused by name. Parameters that OpenAI defines and that have one meaning here
(``best_of``, penalties) are taken at that meaning only. What OpenAI does not define stands under ``edge_dflash``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from edge_dflash.client.api import WORDS
from edge_dflash.decode.options import PlanOptions
from edge_dflash.decode.sampling import MOST_ALTERNATIVES, Sampling
from edge_dflash.errors import RequestError
from edge_dflash.runner.planning import MOST_CANDIDATES
from edge_dflash.serve.config import ServeConfig
from edge_dflash.serve.content import read_content
from edge_dflash.serve.fields import BodyFields, Refusal, session_name
from edge_dflash.serve.limits import bound_request
from edge_dflash.serve.openapi import NAME
from edge_dflash.serve.shapes import CALLED, CHOICES, CONTENT, PROMPT, PROMPT_WHY, ROLES, SAID, STOP, TOOL, TOOL_CHOICE
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
    return _call(fields, read_messages(fields), _tools(fields), config, chat=True)


def completion_call(body: Mapping[str, Any], config: ServeConfig) -> Call:
    """Read the body of ``/v1/completions``. Raises Refusal."""
    fields = BodyFields(body)
    prompt = _prompt(fields)
    fields.only("suffix", "", why="text behind the answer cannot be given")
    fields.only("echo", False, why="the prompt cannot be echoed; leave echo out")
    fields.only("best_of", 1, why="as many answers are made as n says; leave it out")
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
    user = fields.text("user")
    extra = fields.inner("edge_dflash") or BodyFields({}, "edge_dflash")
    session, with_tokens = _extension(extra, options, config)
    if (n := fields.integer("n", 1, MOST_CANDIDATES) or 1) > 1 and session is not None:
        fields.fail("n", n, "a session goes on from one answer; give 1, or leave session out")
    options["caller"] = (options.get("caller", user) or "")[:64]
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
    given.done()
    return usage


def _sampling(fields: BodyFields, options: PlanOptions, default: float) -> None:
    temperature = fields.number("temperature", 0.0, 2.0)
    options["temperature"] = Sampling(default if temperature is None else temperature).temperature
    if (top_p := fields.number("top_p", 0.0, 1.0)) is not None:
        options["top_p"] = top_p
        if top_p == 0.0:  # the smallest set of tokens: the best one
            options["top_p"], options["top_k"] = 1.0, 1
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
    given = [value for name in names if (value := fields.integer(name, 1, most or 2**31)) is not None]
    if len(set(given)) > 1:
        raise Refusal(f"{names[0]} and {names[1]} differ; give one of them", param=names[0])
    options["max_new_tokens"] = given[0] if given else most or None
    return not given


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


_F = BodyFields
_READERS: dict[type, Callable[..., Any]] = {str: _F.text, bool: _F.flag, int: _F.integer, float: _F.number}


def _extension(extra: BodyFields, options: PlanOptions, config: ServeConfig) -> tuple[str | None, bool]:
    """Read what stands under ``edge_dflash``; return the session and whether token ids are wanted."""
    options["thinking"], options["draft_confidence"] = config.defaults.thinking, config.defaults.draft_confidence
    for name, (kind, *bounds) in WORDS.items():
        if (value := _READERS[kind](extra, name, *bounds)) is not None:
            options[name] = value  # type: ignore[literal-required]
    if (session := extra.text("session", facts=NAME)) is not None:
        session_name(session, extra.name("session"))
    with_tokens = extra.flag("tokens") or False
    if (deadline := extra.number("deadline_s", 0.0, 86400.0)) is not None:
        options["deadline"] = deadline
    extra.done()
    return session, with_tokens


def _fixed(fields: BodyFields) -> None:
    """Parameters of the OpenAI API with one meaning here, and those that say nothing about the answer."""
    fields.only("logit_bias", {}, why="logits cannot be biased; leave it out")
    fields.only("store", False, why="nothing is stored; give false")
    fields.only("service_tier", "auto", "default", why="there is one tier; leave it out")
    fields.only("modalities", ["text"], why="answers are text")
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0, 0.0, why="it would change what the model says; give 0")
    fields.mapping("metadata")  # the caller's own notes
    fields.text("safety_identifier")
    fields.text("prompt_cache_key")


def read_messages(fields: BodyFields, needed: str = "give at least one message") -> list[Message]:
    """The ``messages`` of a request, as chat templates want them. Raises Refusal."""
    given = fields.array("messages", facts={"minItems": 1}, needed=needed)
    if not given:
        raise Refusal("messages is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Any, path: str) -> Message:
    if not isinstance(given, dict):
        raise Refusal(f"{path} is of type {type(given).__name__}; give an object with role and content", param=path)
    fields = BodyFields(given, path)
    role = fields.kind("role", *ROLES)
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls, assistant = None, role == "assistant"
    if assistant:
        calls = fields.array("tool_calls", facts={"description": "The calls of an earlier answer."})
    else:
        fields.only("tool_calls", why="only an assistant calls tools")
    try:
        content = read_content(fields.take("content", CONTENT), role, fields.name("content"))
    except RequestError as error:
        raise Refusal(str(error), param=fields.name("content")) from None
    fields.also({"anyOf": [SAID, CALLED]} if assistant else SAID)
    if content is None and not calls:
        raise Refusal(f"{path} has no content; give a text", param=f"{path}.content")
    made["content"] = content or ""
    if assistant:
        if calls:
            made["tool_calls"] = calls
        if (thinking := fields.text("reasoning_content")) is not None:
            made["reasoning_content"] = thinking
        fields.take("refusal")  # OpenAI's own answers carry these, null or empty
        fields.take("annotations")
        fields.only("audio", why="audio cannot be read")
        fields.only("function_call", why="give tool_calls instead")
    if role == "tool":
        made["tool_call_id"] = fields.text("tool_call_id") or ""
    if (name := fields.text("name")) is not None:
        made["name"] = name
    fields.done()
    return made


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


def _tools(fields: BodyFields) -> PlanOptions:
    """The options that ``tools`` and ``tool_choice`` mean. Raises Refusal."""
    tools = fields.array("tools", facts={"items": TOOL})
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            fields.fail(f"tools[{index}]", tool, 'give {"type": "function", "function": {"name": ...}}')
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), dict | None):
            fields.fail(f"tools[{index}].function", function, "give it a name, and an object as parameters")
    choice = _tool_choice(fields)
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice not in ("auto", "none") and not names:
        fields.fail("tool_choice", choice, "no tools are given: give tools, or auto")
    if choice not in CHOICES and choice not in names:
        fields.fail("tool_choice", choice, f"give auto, none, required, or the name of a tool that is given: {names}")
    accepted = (True,) if choice in ("auto", "none") else (True, False)  # a forced call is one call
    fields.only("parallel_tool_calls", *accepted, why="the model decides how many tools it calls; leave it out")
    fields.only("functions", why="give tools instead")
    fields.only("function_call", why="give tool_choice instead")
    return PlanOptions(tools=tools or None, tool_choice=choice)


def _tool_choice(fields: BodyFields) -> str:
    """A word of the API, or the name of a tool."""
    choice = fields.take("tool_choice", TOOL_CHOICE)
    if choice is None or choice in CHOICES:
        return choice or "auto"
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        wanted = 'give auto, none, required, or {"type": "function", "function": {"name": ...}}'
        fields.fail("tool_choice", choice, wanted)
    if name in CHOICES:
        fields.fail("tool_choice", choice, "a tool of this name cannot be chosen; name it otherwise")
    return name
