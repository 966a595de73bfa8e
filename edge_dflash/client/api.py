"""Options of a plan as the body of a request to a service of this package."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_dflash.decode.grammar.schema import schema_text
from edge_dflash.decode.options import DECLARED, Options
from edge_dflash.errors import RequestError, ServiceError
from edge_dflash.pictures.decode import data_url
from edge_dflash.text.images import changed
from edge_dflash.text.prompt import Task, as_messages, token_ids
from edge_dflash.text.template import Message

OWNER = "edge-dflash"  # of the models that a service of this package lists

_EXTRAS = tuple(name for name, place in DECLARED.items() if place.http)


@dataclass(frozen=True)
class Served:
    """A bundle that a service serves."""

    model: str  # its name there
    card: Mapping[str, Any]  # what the service says of it


def pick(listing: object, model: str | None, url: str) -> Served:
    """The model of a service's ``/v1/models``.

    Raises ServiceError when it lists none of that name, is another server, or has not loaded its bundle yet.
    """
    data = listing.get("data") if isinstance(listing, Mapping) else None
    cards = [card for card in data or () if isinstance(card, Mapping) and isinstance(card.get("id"), str)]
    if not any(card.get("owned_by") == OWNER for card in cards):
        raise ServiceError(f"{url} is no service of edge-dflash; other OpenAI APIs are reached with the package openai")
    card = next((card for card in cards if model in (None, card["id"])), None)
    if card is None:
        raise ServiceError(f"{url} has no model {model!r}; it has {', '.join(card['id'] for card in cards[:8])}")
    if not isinstance(details := card.get("edge_dflash"), Mapping):
        raise ServiceError(f"the service at {url} has not loaded its bundle; connect again when /ready answers 200")
    return Served(card["id"], details)


def ask(
    served: Served, task: Task, options: Options, *, session: str | None = None, count: int = 1
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for a plan, or for ``count`` candidates.

    Raises RequestError for a task of another kind and for what cannot be sent.
    """
    if not isinstance(options.relaxed, bool):
        raise RequestError("relaxed is a Relaxation, whose bounds cannot be sent; give True or False")
    body: dict[str, Any] = {"model": served.model, "stream": True}
    messages = as_messages(task)
    if messages is None:
        body["prompt"] = list(token_ids(task))
    elif options.raw and not isinstance(task, str):
        raise RequestError("raw is given with messages; give one text, or leave raw out")
    elif options.raw or (isinstance(task, str) and not served.card.get("chat", True)):
        body["prompt"] = task
    else:
        body["messages"] = with_urls(messages)
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
    if (alternatives := options.logprobs) is not None:
        chat = {"logprobs": True, "top_logprobs": alternatives}
        body |= chat if "messages" in body else {"logprobs": alternatives}
    extra = {name: getattr(options, name) for name in _EXTRAS}
    body["edge_dflash"] = {**extra, **({} if session is None else {"session": session}), "tokens": True}
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", body


def with_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are data URLs, as the API takes them. Raises ImageError."""
    return changed(messages, lambda source: {"type": "image_url", "image_url": {"url": data_url(source)}})
