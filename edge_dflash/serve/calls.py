"""Bodies of the OpenAI API, read: what of a request becomes which option of a plan."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never, TypeAlias, cast

from edge_dflash.common.nested import Object
from edge_dflash.common.rules import FieldError
from edge_dflash.decode.options import DECLARED, PlanOptions
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import RequestError, short
from edge_dflash.serve import bodies
from edge_dflash.serve.bodies import CHOICES, EFFORTS
from edge_dflash.serve.config import LimitConfig, ServeConfig
from edge_dflash.serve.errors import Refusal, refusal
from edge_dflash.text.images import read_content, renamed, sources_of
from edge_dflash.text.template import Message

Prompt: TypeAlias = str | list[Message] | tuple[int, ...]
Given: TypeAlias = Mapping[str, Any]


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
    echo: bool = False  # the prompt is repeated before each answer

    @property
    def distinct(self) -> int:
        """How many of the choices differ: without a temperature all are the same."""
        return self.n if self.options["temperature"] else 1


def chat_call(body: Given, config: ServeConfig) -> Call:
    """Read the body of ``/v1/chat/completions``. Raises Refusal."""
    given = _read(bodies.chat(config.limits.new_tokens), body)
    messages, options = conversation(given["messages"]), _tools(given, body)
    alternatives = given.get("top_logprobs", 0)
    if alternatives and not given.get("logprobs"):
        _refuse("top_logprobs", alternatives, "it needs logprobs: true")
    options["logprobs"] = alternatives if given.get("logprobs") else None
    options["thinking"] = _thinking(given, config.defaults.thinking)
    call = _call(given, messages, options, config, chat=True)
    if call.session is None:  # else its earlier messages count, too
        check_results(messages)
    return call


def completion_call(body: Given, config: ServeConfig) -> Call:
    """Read the body of ``/v1/completions``. Raises Refusal."""
    given = _read(bodies.completion(config.limits.new_tokens), body)
    options = PlanOptions(logprobs=given.get("logprobs"), thinking=False)
    if own := given.get("edge_dflash", {}).get("thinking"):
        _refuse("edge_dflash.thinking", own, "a completion has no chat template, which opens it; send messages")
    echo, scored = given.get("echo", False), options["logprobs"] is not None
    for name in bodies.BUDGETS:
        if given.get(name) == 0 and not (echo and scored):
            _refuse(name, 0, "0 is for echo with logprobs; give at least 1")
    if echo and scored and given.get("n", 1) > 1:
        _refuse("n", given["n"], "echo with logprobs gives the prompt once; give 1")
    options["prompt_logprobs"] = echo and scored
    return replace(_call(given, given["prompt"], options, config, chat=False), echo=echo)


def encoded(body: Given, config: ServeConfig) -> tuple[Any, bool, bool]:
    """What is to be encoded, whether the template is to open thinking, and whether the text is used as it is."""
    given = _read(bodies.ENCODE, body)
    if (task := given.get("text")) is None:
        if "messages" not in given:
            raise Refusal("messages is missing; give messages, or a text", param="messages")
        check_results(task := conversation(given["messages"]))
    elif "messages" in given:
        _refuse("messages", given["messages"], "text is given too; give one of them")
    return task, given.get("thinking", False), given.get("raw", False)


def _read(shape: Object, body: Given) -> dict[str, Any]:
    try:
        return shape.read(body)
    except FieldError as error:
        raise refusal(error) from None


def _call(given: Given, task: Prompt, options: PlanOptions, config: ServeConfig, *, chat: bool) -> Call:
    extra = given.get("edge_dflash", {})
    own = {name: value for name, value in extra.items() if name in DECLARED and name != "thinking"}
    options |= cast(PlanOptions, own)
    if "deadline_s" in extra:
        options["deadline"] = extra["deadline_s"]
    _form(given, options)
    _sampling(given, options, config)
    most = config.limits.new_tokens
    budget = _agreed({name: given.get(name) for name in ("max_completion_tokens", "max_tokens")})
    options["max_new_tokens"] = most or None if budget is None else budget
    caller = _agreed({"user": given.get("user"), "edge_dflash.caller": extra.get("caller")})
    options["caller"] = (caller or "")[:64]
    stream, n, session = given.get("stream", False), given.get("n", 1), extra.get("session")
    if "stream_options" in given and not stream:
        _refuse("stream_options", {}, "it needs stream: true")
    if n > 1 and session is not None:
        _refuse("n", n, "a session goes on from one answer; give 1, or leave session out")
    usage = given.get("stream_options", {}).get("include_usage", False)
    tokens = extra.get("tokens", False)
    _bound(task, options, config.limits)
    return Call(task, options, chat, given.get("model"), stream, usage, session, tokens, budget is None, n)


def _form(given: Given, options: PlanOptions) -> None:
    form = given.get("response_format", {})
    if form.get("type") == "json_object":
        options["schema"] = {"type": "object"}
    elif form.get("type") == "json_schema":
        options["schema"] = form["json_schema"]["schema"]  # always obeyed, strict or not
    if "stop" in given:
        if given["stop"] and "schema" in options:
            _refuse("stop", given["stop"], "only its own end ends a response_format: leave stop or response_format out")
        options["stop"] = given["stop"]


def _sampling(given: Given, options: PlanOptions, config: ServeConfig) -> None:
    defaults = config.defaults
    options["temperature"] = Sampling(given.get("temperature", defaults.temperature)).temperature
    options.setdefault("draft_confidence", defaults.draft_confidence)
    top_k = given.get("top_k")
    options["top_k"] = _agreed({"top_k": top_k and max(top_k, 0), "edge_dflash.top_k": options.get("top_k")}) or 0
    if (top_p := given.get("top_p", 1.0)) == 0.0:  # the smallest set of tokens: the best one
        top_p, options["top_k"] = 1.0, 1
    options["top_p"] = top_p
    seed = given.get("seed")
    if seed is not None or options["temperature"] > 0:  # drawn anew for each request, and told in the answer
        options["seed"] = secrets.randbits(32) if seed is None else seed % 2**64


def _thinking(given: Given, default: bool) -> bool:
    effort = given.get("reasoning_effort")
    said = {
        "edge_dflash.thinking": given.get("edge_dflash", {}).get("thinking"),
        "reasoning_effort": None if effort is None else EFFORTS[effort],
        "enable_thinking": given.get("enable_thinking"),
        "chat_template_kwargs.enable_thinking": given.get("chat_template_kwargs", {}).get("enable_thinking"),
    }
    return default if (thinking := _agreed(said)) is None else bool(thinking)


def _tools(given: Given, body: Given) -> PlanOptions:
    """The options that ``tools`` and ``tool_choice`` mean. Tools stay as they came: templates write them."""
    names = [tool["function"]["name"] for tool in given.get("tools", ())]
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none") and not names:
        _refuse("tool_choice", choice, "no tools are given: give tools, or auto")
    if choice not in CHOICES and choice not in names:
        _refuse("tool_choice", choice, f"give auto, none, required, or the name of a tool that is given: {names}")
    if given.get("parallel_tool_calls") is False and choice in ("auto", "none"):  # a forced call is one call
        _refuse("parallel_tool_calls", False, "the model decides how many tools it calls; leave it out")
    return PlanOptions(tools=body["tools"] if names else None, tool_choice=choice)


def conversation(given: Sequence[Given]) -> list[Message]:
    """Messages as chat templates want them. Raises Refusal."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(given)]


def _message(given: Given, place: str) -> Message:
    role = given["role"]
    try:
        content = read_content(given.get("content"), role, f"{place}.content", only_urls=True)
    except RequestError as error:
        raise Refusal(str(error), param=f"{place}.content") from None
    calls = given.get("tool_calls")
    if content is None and not calls:
        raise Refusal(f"{place} has no content; give a text", param=f"{place}.content")
    made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls:
        made["tool_calls"] = [_earlier_call(call) for call in calls]
    thought = [given[key] for key in ("reasoning_content", "reasoning") if key in given]
    if len(set(thought)) > 1:
        why = "it differs from reasoning_content, which is the same; give one of them"
        _refuse(f"{place}.reasoning", thought[1], why)
    if thought:
        made["reasoning_content"] = thought[0]
    return {**made, **{key: given[key] for key in ("tool_call_id", "name") if key in given}}


def _earlier_call(given: Given) -> dict[str, Any]:
    name = {"id": given["id"]} if "id" in given else {}
    return {**name, "type": "function", "function": given["function"]}


def check_results(messages: Sequence[Message], earlier: Sequence[Message] = ()) -> None:
    """Raise Refusal for a result that no call asked for; ``earlier``: messages before them."""
    asked = {call.get("id") for message in earlier for call in message.get("tool_calls") or ()}
    for index, message in enumerate(messages):
        asked |= {call.get("id") for call in message.get("tool_calls") or ()}
        if message["role"] == "tool" and message["tool_call_id"] not in asked:
            known = ", ".join(str(one)[:60] for one in asked if one) or "none"
            why = f"give the id of a call of an earlier message; there are {known}"
            _refuse(f"messages[{index}].tool_call_id", message["tool_call_id"], why)


def _agreed(given: Given) -> Any:
    """What is given under several names; None when it is under none."""
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        raise Refusal(f"{' and '.join(said)} differ; give one of them", param=next(iter(said)))
    return next(iter(said.values()), None)


def _refuse(place: str, value: object, why: str) -> Never:
    raise Refusal(f"{place} is {short(value)}; {why}", param=place)


def _bound(task: Sequence[Any], options: PlanOptions, limits: LimitConfig) -> None:
    """Refuse forms and texts that are larger than the service takes."""
    most = limits.schema_bytes
    for name in ("schema", "regex", "grammar") if most else ():
        if _larger(options.get(name), most):
            raise Refusal(f"{name} has more than {most} bytes, the limit; give a smaller one")
    most = limits.prompt_chars
    if most and (size := _chars(task)) > most:
        raise Refusal(f"the texts have {size} characters, the limit is {most}; send less")


def _larger(form: object, limit: int) -> bool:
    """Whether a form has more characters, as JSON if it is no text; it is written no further than the limit."""
    if form is None or isinstance(form, str):
        return len(form or "") > limit
    sizes = itertools.accumulate(len(part) for part in json.JSONEncoder().iterencode(form))
    return any(size > limit for size in sizes)


def _chars(task: Sequence[Any]) -> int:
    if task and isinstance(task[0], Mapping):
        return sum(len(json.dumps(message)) for message in renamed(task, [""] * len(sources_of(task))))
    return len(task)
