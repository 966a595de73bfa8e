"""The OpenAI API as servers speak it: options of a plan as the body of a request, a streamed answer as a plan.

Three kinds of servers are known: a service of this package, which takes everything; vLLM; and whatever else speaks the
API. An option that a server has no word for is refused by name unless it has its default.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from edge_dflash.decode.accept import FinishReason
from edge_dflash.decode.drafts import Drafting
from edge_dflash.decode.grammar.schema_check import schema_text
from edge_dflash.decode.options import CONFIDENCES, PRIORITIES, Options, Task, as_messages, token_ids
from edge_dflash.decode.sampling import TokenLogprob
from edge_dflash.errors import (
    BundleError,
    ContextError,
    EdgeDflashError,
    QueueFullError,
    RequestError,
    ServiceError,
    StorageError,
)
from edge_dflash.result import Increment, Plan, PlanTimings, json_object, json_value
from edge_dflash.text.template import Message
from edge_dflash.text.tool_calls import MalformedToolCall, ToolCall

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
    server: Server, task: Task, options: Options, before: Sequence[Message] = (), *, session: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for a plan. ``before``: messages of a conversation that the server does not keep.

    Raises RequestError for a task of another kind and for options that the server has no word for.
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
        body["messages"] = [*before, *messages]
    chat = "messages" in body
    body |= {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
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


def _refuse_unknown(server: Server, options: Options) -> None:
    usual = Options()
    for name in (*_EXTRAS, "logprobs"):  # other servers name tokens by their text, not by ids
        value = getattr(options, name)
        if name not in _KNOWN[server.kind] and value != getattr(usual, name):
            raise RequestError(f"{name} is {value!r}, and {server} has no word for it; leave {name} out")
    if not isinstance(options.relaxed, bool):
        raise RequestError("relaxed is a Relaxation, whose bounds cannot be sent; give True or False")


_FINISH: dict[str, FinishReason] = {"stop": "stop", "tool_calls": "stop", "length": "length"}


@dataclass
class Reading:
    """One answer, as far as it has come."""

    options: Options
    began: float  # time.perf_counter() of the call
    own: bool  # the server is a service of this package
    _first: float = 0.0  # time.perf_counter() of the first piece
    _text: str = ""
    _thinking: str = ""
    _tokens: tuple[int, ...] = ()
    _logprobs: tuple[TokenLogprob, ...] = ()
    _lengths: list[int] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)  # by their index
    _reason: str | None = None
    _usage: Mapping[str, Any] = field(default_factory=dict)
    _extra: Mapping[str, Any] = field(default_factory=dict)

    def add(self, data: str) -> Increment | None:
        """Take the data of one event. Raises the error that it carries, ServiceError when it is none of the API."""
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping):
            raise ServiceError(f"the server sent {data[:60]!r}, which is no chunk of an answer")
        if chunk.get("error"):
            raise error_of(500, chunk)
        if isinstance(usage := chunk.get("usage"), Mapping):
            self._usage = usage
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            return None
        return self._choice(choices[0], chunk)

    def _choice(self, choice: Mapping[str, Any], chunk: Mapping[str, Any]) -> Increment | None:
        extra = chunk.get("edge_dflash") or {}
        if choice.get("finish_reason"):
            self._reason, self._extra = str(choice["finish_reason"]), extra
        delta = choice.get("delta") or {}
        text = str(delta.get("content") or choice.get("text") or "")
        thinking = str(delta.get("reasoning_content") or delta.get("reasoning") or "")
        if not self.own:
            tokens = tuple(choice.get("token_ids") or ())  # of vLLM
        else:
            tokens = () if self._reason else tuple(extra.get("tokens") or ())  # the last chunk repeats them all
        whole = self._tool_calls(delta.get("tool_calls") or ())
        if not (text or thinking or tokens or whole):
            return None
        self._first = self._first or time.perf_counter()
        self._text += text
        self._thinking += thinking
        if tokens and self._tokens:
            self._lengths.append(len(tokens))
        self._tokens += tokens
        logprobs = tuple(_logprob(entry) for entry in (choice.get("logprobs") or {}).get("content") or ())
        self._logprobs += logprobs
        return Increment(text, tokens, thinking, whole, logprobs)

    def _tool_calls(self, deltas: Any) -> tuple[ToolCall, ...]:
        """Note pieces of calls. A service of this package sends calls whole; others in pieces, told at the end."""
        whole = []
        for delta in deltas:
            function = delta.get("function") or {}
            call = self._calls.setdefault(int(delta.get("index", 0)), {"id": "", "name": "", "arguments": ""})
            call["id"] += str(delta.get("id") or "")
            for key in ("name", "arguments"):
                call[key] += str(function.get(key) or "")
            if self.own:
                whole.append(ToolCall(**call))
        return tuple(whole)

    @property
    def finished(self) -> bool:
        """Whether the server said how the answer ended."""
        return self._reason is not None

    def plan(self, cut: FinishReason | None = None) -> Plan:
        """What it adds up to. ``cut`` is why the reader stopped; None: the answer ended by itself.

        Raises ServiceError when it ended in a way that is not known.
        """
        now, extra, details = time.perf_counter(), self._extra, self._usage.get("prompt_tokens_details") or {}
        reason: FinishReason | None = cut or extra.get("finish_reason") or _FINISH.get(str(self._reason))
        if reason is None:
            raise ServiceError(f"the server ended the answer by {self._reason!r}, which is not known here")
        calls, malformed = [], []
        for _, call in sorted(self._calls.items()):
            if isinstance(json_value(call["arguments"] or "{}"), dict) and call["name"]:
                calls.append(ToolCall(**call))
            else:
                malformed.append(MalformedToolCall(call["arguments"], "the arguments are no JSON object"))
        malformed += [MalformedToolCall(**one) for one in extra.get("malformed", ())]
        value = json_value(self._text) if self.options.schema is not None and reason == "stop" else None
        lengths = tuple(extra.get("accept_lengths", self._lengths if self.own else ()))
        first, decoding = (self._first - self.began, now - self._first) if self._first else (0.0, 0.0)
        timings = PlanTimings(0.0, first, first, decoding, now - self.began)  # as seen from here, the queue included
        return Plan(
            object=json_object(self._text) if self.options.schema is None else value,
            text=self._text,
            thinking=self._thinking,
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
            tokens=self._tokens,
            finish_reason=reason,
            prompt_tokens=int(self._usage.get("prompt_tokens") or extra.get("prompt_tokens") or 0),
            reused_tokens=int(extra.get("reused_tokens") or details.get("cached_tokens") or 0),
            accept_lengths=lengths,
            accept_length=sum(lengths) / len(lengths) if lengths else 0.0,
            timings=PlanTimings(**extra["timings"]) if "timings" in extra else timings,
            speculative=self.options.speculative,
            lossy=bool(extra.get("lossy", False)),
            relaxed_tokens=int(extra.get("relaxed_tokens", 0)),
            logprobs=self._logprobs,
            drafting=Drafting(tuple(extra.get("drafts", ())), tuple(extra.get("accepted_drafts", ()))),
        )


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    """An entry that a service of this package wrote; no other is asked for them."""
    top = tuple(map(_logprob, entry.get("top_logprobs", ())))
    text = None if entry["bytes"] is None else bytes(entry["bytes"])
    return TokenLogprob(entry["token_id"], entry["logprob"], top, text)


def error_of(status: int, body: object) -> EdgeDflashError:
    """The error that a server's answer means."""
    error = body.get("error") if isinstance(body, Mapping) else None
    found = error if isinstance(error, Mapping) else {}
    message = " ".join(str(found.get("message") or error or f"the server answered with status {status}").split())
    code = found.get("code")
    if status == 429 or code == "queue_full":
        return QueueFullError(message)
    if code in ("storage_full", "storage_failed"):
        return StorageError(message, full=code == "storage_full")
    if code in ("context_length_exceeded", "session_mismatch"):
        return ContextError(message) if code == "context_length_exceeded" else BundleError(message)
    return ServiceError(message) if status in (401, 403) or status >= 500 else RequestError(message)
