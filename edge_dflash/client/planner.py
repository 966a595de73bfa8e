"""A planner somewhere else: the interface of ``Planner``, over a Unix socket or HTTP to a service of this package.

Deadlines and sessions are kept there. Programs for other servers use the package ``openai``.
"""

from __future__ import annotations

import json
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from edge_dflash.client.choice import RemoteChoice
from edge_dflash.client.connection import Connection
from edge_dflash.common import rules
from edge_dflash.common.rules import PATH, TEXT
from edge_dflash.decode.grammar.schema import schema_text
from edge_dflash.decode.options import DECLARED, Options
from edge_dflash.decode.shape import PairShape
from edge_dflash.errors import EdgeDflashError, RequestError, ServiceError
from edge_dflash.pictures.decode import data_url
from edge_dflash.result import Plan
from edge_dflash.runner.astream import Unwanted
from edge_dflash.runner.planning import Conversing, Planning, never
from edge_dflash.runner.stream import PlanStream
from edge_dflash.text.images import changed
from edge_dflash.text.prompt import Task, as_messages, token_ids
from edge_dflash.text.template import Message

OWNER = "edge-dflash"  # of the models that a service of this package lists
_ARGUMENTS = {
    "url": TEXT.saying("unix:/PATH, or http:// or https:// and the server's address"),
    "model": TEXT.saying("the name of a model of the server").or_none(),
    "api_key": TEXT.or_none(),
    "timeout": rules.number(0.001).saying("seconds, more than 0"),
    "system": TEXT.saying("the text of a system prompt").or_none(),
    "path": PATH.saying("the name under which the session was saved"),
}


_EXTRAS = tuple(name for name, place in DECLARED.items() if place.http)


def pick(listing: object, model: str | None, url: str) -> Mapping[str, Any]:
    """The entry of a model in a service's ``/v1/models``: its name there, and what the service says of it.

    Raises ServiceError when it lists none of that name, is another server, or has not loaded its bundle yet.
    """
    data = listing.get("data") if isinstance(listing, Mapping) else None
    cards = [card for card in data or () if isinstance(card, Mapping) and isinstance(card.get("id"), str)]
    if not any(card.get("owned_by") == OWNER for card in cards):
        raise ServiceError(f"{url} is no service of edge-dflash; other OpenAI APIs are reached with the package openai")
    card = next((card for card in cards if model in (None, card["id"])), None)
    if card is None:
        raise ServiceError(f"{url} has no model {model!r}; it has {', '.join(card['id'] for card in cards[:8])}")
    if not isinstance(card.get("edge_dflash"), Mapping):
        raise ServiceError(f"the service at {url} has not loaded its bundle; connect again when /ready answers 200")
    return card


def ask(
    served: Mapping[str, Any], task: Task, options: Options, *, session: str | None = None, count: int = 1
) -> tuple[str, dict[str, Any]]:
    """Path and body of the request for a plan, or for ``count`` candidates; ``session``: its name there.

    Raises RequestError for a task of another kind and for what cannot be sent.
    """
    if not isinstance(options.relaxed, bool):
        raise RequestError("relaxed is a Relaxation, whose bounds cannot be sent; give True or False")
    body: dict[str, Any] = {"model": served["id"], "stream": True}
    messages = as_messages(task)
    if messages is None:
        body["prompt"] = list(token_ids(task))
    elif options.raw and not isinstance(task, str):
        raise RequestError("raw is given with messages; give one text, or leave raw out")
    elif options.raw or (isinstance(task, str) and not served["edge_dflash"].get("chat", True)):
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
        if options.prompt_logprobs:
            if "messages" in body:
                raise RequestError("prompt_logprobs is given with messages; give the ids that encode() makes of them")
            body["echo"] = True
        chat = {"logprobs": True, "top_logprobs": alternatives}
        body |= chat if "messages" in body else {"logprobs": alternatives}
    extra = {name: getattr(options, name) for name in _EXTRAS}
    body["edge_dflash"] = {**extra, **({} if session is None else {"session": session}), "tokens": True}
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", body


def with_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are data URLs, as the API takes them. Raises ImageError."""
    return changed(messages, lambda source: {"type": "image_url", "image_url": {"url": data_url(source)}})


def _kept_there(name: str) -> Any:
    """A property that a planner somewhere else cannot have."""

    def refuse(self: object) -> None:
        raise RequestError(f"{name} belongs to the process that serves the model; open the bundle to use it")

    return property(refuse, doc="Raises RequestError.")


class RemotePlanner(Planning["RemoteSession"], AbstractContextManager["RemotePlanner"]):
    """A pair that another process serves. Made by ``Planner.connect``; all methods may be called from any thread.

    Requests raise ServiceError when it cannot be reached or fails. Cancelling the last stream of a request leaves the
    connection: what came until then is the plan, and the service ends the request within a cycle.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        """Connect and ask what is served; see ``Planner.connect``."""
        given = {"url": url, "model": model, "api_key": api_key, "timeout": timeout}
        timeout = rules.checked(_ARGUMENTS, given)["timeout"]
        self._connection = Connection(url, api_key, timeout)
        try:
            self._served = pick(self._connection.call("GET", "/v1/models"), model, url)
        except BaseException:
            self._connection.close()
            raise
        weakref.finalize(self, self._connection.abandon)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the requests of this planner. The server goes on. Closing twice does no harm."""
        self._connection.close()

    def warm_up(self) -> None:
        """Do nothing: a service begins to build what forms need when it starts."""

    @property
    def model(self) -> str:
        """Name of the model on the service."""
        return str(self._served["id"])

    @property
    def shape(self) -> PairShape:
        """Sizes of the pair."""
        return PairShape.told(self._served["edge_dflash"])

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a plan."""
        return tuple(self._served["edge_dflash"]["stop_token_ids"])

    @property
    def fingerprint(self) -> str:
        """Of the bundle."""
        return str(self._served["edge_dflash"]["fingerprint"])

    @property
    def waiting(self) -> int:
        """Requests in the service's queue."""
        return int(self._connection.call("GET", "/health")["waiting"])

    # what only the process that serves has
    backend = _kept_there("backend")
    tokenizer = _kept_there("tokenizer")
    prefixes = _kept_there("prefixes")
    pictures = _kept_there("pictures")
    recorded = _kept_there("recorded")
    self_test = _kept_there("self_test")
    failure = _kept_there("failure")
    drafting = _kept_there("drafting")

    def _ask(
        self,
        task: Task,
        session: RemoteSession | None,
        options: Options,
        began: float,
        n: int = 1,
        unwanted: Unwanted = never,
    ) -> Sequence[PlanStream]:
        """Send a request, which its server queues."""
        if session is None:
            choices = self._connection.ask(*ask(self._served, task, options, count=n), options, began, count=n)
        else:
            rules.checked(_SESSION, {"session": session})
            choices = session._ask(self, task, options, began)
        return [PlanStream(choice, owner=self) for choice in choices]

    def _submit(self, answer: object) -> None:
        """It was sent."""

    def encode(self, task: Task, *, thinking: bool = False, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a task. Raises RequestError when it is of another kind, empty, or cannot be turned into ids."""
        chosen = Options(thinking=thinking, raw=raw)
        if (messages := as_messages(task)) is None:
            return token_ids(task)
        body: dict[str, Any] = {"text": task} if isinstance(task, str) else {"messages": with_urls(messages)}
        body |= {"thinking": chosen.thinking, "raw": chosen.raw}
        return tuple(self._connection.call("POST", "/v1/edge_dflash/encode", body)["tokens"])

    def session(self, system: str | None = None) -> RemoteSession:
        """A new conversation, kept by the service."""
        rules.checked(_ARGUMENTS, {"system": system})
        return RemoteSession(self, system)

    def load_session(self, path: Path | str) -> RemoteSession:
        """A conversation that goes on from the one that was saved under this name.

        It lies on the service: the name is no path. Raises RequestError for an unknown name, BundleError when it was
        made with another bundle.
        """
        rules.checked(_ARGUMENTS, {"path": path})
        session = RemoteSession(self)._continue(quote(str(path), safe=""))
        session._saved.add(str(path))
        return session


class RemoteSession(Conversing, AbstractContextManager["RemoteSession"]):
    """One conversation, with the interface of ``PlannerSession``. Made by ``RemotePlanner.session``.

    It lies on the service, under a name that nobody else has; saved copies have names that the caller gives. Its turns
    come one after another.
    """

    _planner: RemotePlanner

    def __init__(self, planner: RemotePlanner, system: str | None = None) -> None:
        self._planner = planner
        self._connection = planner._connection
        self._name = secrets.token_hex(16)  # on the service
        self._lock = threading.Lock()
        self._system: tuple[Message, ...] = () if system is None else ({"role": "system", "content": system},)
        self._begun = False  # whether the service has it
        self._stale: str | None = None  # the name under which a first turn came to nothing
        self._saved: set[str] = set()  # names that it wrote, or came from
        self._busy = False
        self._closed = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation in OpenAI form, up to the last turn that ended."""
        return tuple(self._connection.session("GET", self._name)["messages"]) if self._begun else self._system

    @property
    def tokens(self) -> tuple[int, ...]:
        """All its tokens."""
        return tuple(self._connection.session("GET", self._name)["token_ids"]) if self._begun else ()

    @property
    def busy(self) -> bool:
        """Whether a turn is under way: another one would be refused."""
        return self._busy

    def fork(self) -> RemoteSession:
        """Another conversation that goes on from here."""
        other = RemoteSession(self._planner)
        with self._lock:
            self._check()
            other._system = self._system
            return other._continue(self._name) if self._begun else other

    def _continue(self, name: str) -> RemoteSession:
        """Go on from a session on the service."""
        self._connection.session("POST", f"{name}/fork", {"to": self._name})
        self._begun = True
        return self

    def save(self, path: Path | str) -> int:
        """Save the conversation on the service, under a name that is no path; returns its bytes.

        A name that this conversation saved to, or was loaded from, holds its new state then. Raises RequestError for
        one that another has or has gone on with, for one with other characters than letters, digits and ``. _ -``, and
        where the service keeps no conversations.
        """
        with self._lock:
            self._check()
            if not self._begun:
                raise RequestError("the session has no turn yet, there is nothing to save; save it after the first")
            body = {"to": str(path), **({"replace": True} if str(path) in self._saved else {})}
            size = int(self._connection.session("POST", f"{self._name}/save", body)["bytes"])
            self._saved.add(str(path))
            return size

    def close(self) -> None:
        """Forget it, on the service too; saved copies stay. Closing twice does no harm."""
        if not self._closed:
            self._closed = True
            self._forget(self._stale)
            self._forget(self._name if self._begun else None)

    def _forget(self, name: str | None) -> None:
        if name is not None:
            with suppress(EdgeDflashError):
                self._connection.session("DELETE", name)

    def _ask(self, planner: RemotePlanner, task: Task, options: Options, began: float) -> tuple[RemoteChoice, ...]:
        if planner is not self._planner:
            raise RequestError("the session belongs to another planner; use the one that made it")
        with self._lock:
            self._check()
            self._busy = True
        first = not self._begun

        def ended(plan: Plan) -> None:
            if first and not plan.tokens:  # it begins anew with the next turn, and with its system prompt
                self._begun, self._stale, self._name = False, self._name, secrets.token_hex(16)
            self._busy = False

        try:
            if first and self._system and (said := as_messages(task)) is not None:
                task = [*self._system, *said]
            self._forget(self._stale)
            self._begun, self._stale = True, None
            asked = ask(planner._served, task, options, session=self._name)
            return self._connection.ask(*asked, options, began, ended=ended)
        except BaseException:
            if first:
                self._begun, self._stale = False, None  # it was not taken
            self._busy = False
            raise

    def _check(self) -> None:
        if self._closed:
            raise RequestError("the session is closed; open a new one")
        if self._busy:
            raise RequestError("a turn of this session is still running; wait for its end, or cancel it")


_SESSION = {"session": rules.instance_of(RemoteSession, "one that session() of this planner made")}
