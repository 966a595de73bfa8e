"""The OpenAI API as servers speak it: options of a plan as the body of a request.

Three kinds of servers are known: a service of this package, which takes everything; vLLM; and whatever else speaks the
API. An option that a server has no word for is refused by name unless it has its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from edge_dflash.decode.grammar.schema_check import schema_text
from edge_dflash.decode.options import CONFIDENCES, PRIORITIES, Options, Task, as_messages, token_ids
from edge_dflash.errors import RequestError, ServiceError
from edge_dflash.pictures.decode import data_url
from edge_dflash.text.images import changed
from edge_dflash.text.template import Message

Kind = Literal["edge-dflash", "vllm", "openai"]

# Options that stand under "edge_dflash" of a request by their own names: the type of each, and its range if it has one.
WORDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("regex", "grammar", "caller"), (str,)),
    **dict.fromkeys(("whitespace", "relaxed", "speculative", "raw", "thinking"), (bool,)),
    "top_k": (int, 0, 2**31),
    "draft_confidence": (float, *CONFIDENCES),
    "priority": (int, *PRIORITIES),
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

    def __str__(self) -> str:
        return {"edge-dflash": "this service", "vllm": "vLLM"}.get(self.kind, "an OpenAI API")

    def needs(self, what: str) -> Mapping[str, Any]:
        """The card of a service of this package. Raises RequestError for another server, which lacks ``what``."""
        if not self.own:
            raise RequestError(f"{self} does not offer {what}; it needs a service of edge-dflash")
        return self.card


def pick(listing: object, model: str | None, url: str) -> Server:
    """The model of a server's ``/v1/models``. Raises ServiceError when it lists none, or none of that name."""
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
    server: Server,
    task: Task,
    options: Options,
    before: Sequence[Message] = (),
    *,
    session: str | None = None,
    count: int = 1,
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for a plan, or for ``count`` candidates.

    ``before``: messages of a conversation that the server does not keep. Raises
    RequestError for a task of another kind and for options that the server has no word for.
    """
    _refuse_unknown(server, options)
    body: dict[str, Any] = {"model": server.model, "stream": True, "stream_options": {"include_usage": True}}
    messages = as_messages(task)
    if messages is None:
        if before:
            raise RequestError("token ids cannot follow messages on this server; give text or messages")
        body["prompt"] = list(token_ids(task))
    elif options.raw and (before or not isinstance(task, str)):
        raise RequestError("raw is given with messages; give one text, or leave raw out")
    elif options.raw or (isinstance(task, str) and not server.card.get("chat", True) and not before):
        body["prompt"] = task
    else:
        body["messages"] = [*before, *with_urls(messages)]
    chat = "messages" in body
    body |= {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    if count > 1:
        body["n"] = count
    if options.max_new_tokens is not None:
        body["max_tokens"] = options.max_new_tokens
    if options.stops:
        body["stop"] = list(options.stops)
    if options.schema is not None:
        form = {"name": "answer", "schema": json.loads(schema_text(options.schema)), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if options.tools:
        if messages is None:
            raise RequestError("tools are given with token ids; give messages, whose template describes the tools")
        body["tools"] = list(options.tools)
        if options.forced_tools:
            named = {"type": "function", "function": {"name": options.tool_choice}}
            body["tool_choice"] = "required" if options.tool_choice == "required" else named
    if server.own:
        extra = {name: getattr(options, name) for name in _EXTRAS}
        body["edge_dflash"] = {**extra, **({} if session is None else {"session": session}), "tokens": True}
        if (alternatives := options.logprobs) is not None:
            body |= {"logprobs": True, "top_logprobs": alternatives} if chat else {"logprobs": alternatives}
    elif server.kind == "vllm":
        _for_vllm(body, options, chat=chat)
    return "/v1/chat/completions" if chat else "/v1/completions", body


def _for_vllm(body: dict[str, Any], options: Options, *, chat: bool) -> None:
    """vLLM's parameters beyond OpenAI's: docs.vllm.ai, "OpenAI-Compatible Server", "Extra parameters"."""
    body["return_token_ids"] = True
    if chat:
        body["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    if options.top_k:
        body["top_k"] = options.top_k
    if options.regex is not None:
        body["structured_outputs"] = {"regex": options.regex}


def with_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are data URLs, as the API takes them. Raises ImageError."""
    return changed(messages, lambda source: {"type": "image_url", "image_url": {"url": data_url(source)}})


def _refuse_unknown(server: Server, options: Options) -> None:
    usual = Options()
    for name in (*_EXTRAS, "logprobs"):  # other servers name tokens by their text, not by ids
        value = getattr(options, name)
        if name not in _KNOWN[server.kind] and value != getattr(usual, name):
            hint = ", and order candidates by rank" if name == "logprobs" else ""
            raise RequestError(f"{name} is {value!r}, and {server} has no word for it; leave {name} out{hint}")
    if not isinstance(options.relaxed, bool):
        raise RequestError("relaxed is a Relaxation, whose bounds cannot be sent; give True or False")
