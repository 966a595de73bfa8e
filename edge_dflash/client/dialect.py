"""What a server can do, and how it wants to be asked: options of a plan as the body of a request.

Three kinds are known: a service of this package, which takes everything; vLLM; and whatever else speaks the OpenAI API.
An option that a server has no word for is refused by name unless it has its default. Knows no connections.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from edge_dflash.decode.grammar.schema_check import schema_text
from edge_dflash.decode.options import PRIORITIES, Options, Task, as_messages, token_ids
from edge_dflash.errors import RequestError, ServiceError
from edge_dflash.text.tokenizer import Message

Kind = Literal["edge-dflash", "vllm", "openai"]

# Options that stand under "edge_dflash" of a request by their own names: the type of each, or its range.
WORDS: dict[str, type | tuple[int, int]] = {
    "regex": str,
    "grammar": str,
    "whitespace": bool,
    "relaxed": bool,
    "speculative": bool,
    "raw": bool,
    "thinking": bool,
    "top_k": (0, 2**31),
    "priority": PRIORITIES,
    "caller": str,
}
_EXTRAS = tuple(one.name for one in fields(Options) if one.name in WORDS)
_KNOWN: dict[Kind, frozenset[str]] = {
    "edge-dflash": frozenset((*_EXTRAS, "logprobs")),
    "vllm": frozenset(("regex", "top_k", "thinking", "raw")),
    "openai": frozenset(),
}


@dataclass(frozen=True)
class Server:
    """A model on a server."""

    kind: Kind
    model: str
    card: Mapping[str, Any]  # what a service of this package says of its bundle; empty for others

    @property
    def own(self) -> bool:
        """Whether it is a service of this package."""
        return self.kind == "edge-dflash"

    @property
    def chats(self) -> bool:
        """Whether texts are messages; else they are continued as they are."""
        return bool(self.card.get("chat", True))

    def describe(self) -> str:
        """The server, for messages."""
        return {"edge-dflash": "this service", "vllm": "vLLM"}.get(self.kind, "an OpenAI API")


@dataclass(frozen=True)
class Question:
    """A request's path and body."""

    path: str
    body: dict[str, Any]


def pick(listing: object, model: str | None, url: str) -> Server:
    """The model of a server's ``/v1/models``. Raises ServiceError when there is none, or none of that name."""
    data = listing.get("data") if isinstance(listing, Mapping) else None
    cards = [card for card in data or () if isinstance(card, Mapping) and isinstance(card.get("id"), str)]
    if not cards:
        raise ServiceError(f"{url} lists no models; give the address of an OpenAI API")
    names = [card["id"] for card in cards]
    if model is None and len(cards) > 1:
        raise ServiceError(f"{url} has {len(cards)} models; give model=, one of {', '.join(names[:8])}")
    card = next((card for card in cards if card["id"] == (model or names[0])), None)
    if card is None:
        raise ServiceError(f"{url} has no model {model!r}; it has {', '.join(names[:8])}")
    owner, details = card.get("owned_by"), card.get("edge_dflash")
    kind: Kind = "vllm" if owner == "vllm" else "openai"
    if owner == "edge-dflash" and isinstance(details, Mapping):
        return Server("edge-dflash", card["id"], details)
    return Server(kind, card["id"], {})


def ask(
    server: Server, task: Task, options: Options, before: Sequence[Message] = (), *, session: str | None = None
) -> Question:
    """The request for a plan. ``before`` are the messages of a conversation that the server does not keep.

    Raises RequestError for a task of another kind and for options that the server has no word for.
    """
    _refuse_unknown(server, options)
    body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    messages = as_messages(task)
    if messages is None:
        if before:
            raise RequestError("token ids cannot follow messages on this server; give text or messages")
        path, body["prompt"] = "/v1/completions", list(token_ids(task))
    elif options.raw:
        if before or not isinstance(task, str):
            raise RequestError("raw is given with messages; give one text, or leave raw out")
        path, body["prompt"] = "/v1/completions", task
    elif isinstance(task, str) and not server.chats and not before:
        path, body["prompt"] = "/v1/completions", task
    else:
        path, body["messages"] = "/v1/chat/completions", [*before, *messages]
    _common(body, options)
    if options.tools:
        if messages is None:
            raise RequestError("tools are given with token ids; give messages, whose template describes the tools")
        body["tools"] = list(options.tools)
        if options.forced_tools:
            named = {"type": "function", "function": {"name": options.tool_choice}}
            body["tool_choice"] = "required" if options.tool_choice == "required" else named
    if server.own:
        body["edge_dflash"] = _extension(options, session)
        if options.logprobs is not None:
            alternatives = options.logprobs
            body |= (
                {"logprobs": True, "top_logprobs": alternatives} if "messages" in body else {"logprobs": alternatives}
            )
    elif server.kind == "vllm":
        _for_vllm(body, options, chat="messages" in body)
    return Question(path, body)


def _common(body: dict[str, Any], options: Options) -> None:
    body["temperature"], body["top_p"], body["seed"] = options.temperature, options.top_p, options.seed
    if options.max_new_tokens is not None:
        body["max_tokens"] = options.max_new_tokens
    if options.stops:
        body["stop"] = list(options.stops)
    if options.schema is not None:
        schema = json.loads(schema_text(options.schema))
        form = {"name": "answer", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}


def _extension(options: Options, session: str | None) -> dict[str, Any]:
    extra: dict[str, Any] = {name: getattr(options, name) for name in _EXTRAS}
    if session is not None:
        extra["session"] = session
    return {**extra, "tokens": True}


def _for_vllm(body: dict[str, Any], options: Options, *, chat: bool) -> None:
    """vLLM's parameters beyond OpenAI's: docs.vllm.ai, "OpenAI-Compatible Server", "Extra parameters"."""
    body["return_token_ids"] = True
    if chat:
        body["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    if options.top_k:
        body["top_k"] = options.top_k
    if options.regex is not None:
        body["structured_outputs"] = {"regex": options.regex}


def _refuse_unknown(server: Server, options: Options) -> None:
    usual = Options()
    for name in (*_EXTRAS, "logprobs"):  # other servers name tokens by their text, not by ids
        value = getattr(options, name)
        if name not in _KNOWN[server.kind] and value != getattr(usual, name):
            raise RequestError(f"{name} is {value!r}, and {server.describe()} has no word for it; leave {name} out")
    if not isinstance(options.relaxed, bool):
        raise RequestError("relaxed is a Relaxation, whose bounds cannot be sent; give True or False")
