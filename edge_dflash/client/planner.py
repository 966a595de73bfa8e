"""A planner somewhere else: the interface of ``Planner``, over a Unix socket or HTTP.

A service of this package does all that an open bundle does, sessions and deadlines included. Of other servers, a
deadline is kept from here (the connection is left), a conversation is sent whole with every turn, and what else they
cannot do is refused by name. Tokens and accept lengths are empty where a server does not tell them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Never, Unpack

from edge_dflash.client.connection import GRACE, Connection
from edge_dflash.client.dialect import ask, pick
from edge_dflash.client.reading import Reading
from edge_dflash.client.session import RemoteSession
from edge_dflash.common import rules
from edge_dflash.common.rules import Rule
from edge_dflash.decode.backend import PairShape
from edge_dflash.decode.options import Options, PlanOptions, Task, as_messages, token_ids
from edge_dflash.errors import RequestError
from edge_dflash.result import Plan
from edge_dflash.runner.stream import AsyncPlanStream, PlanStream
from edge_dflash.text.tokenizer import Message

_ARGUMENTS = {
    "url": Rule(rules.text, "unix:/PATH, or http:// or https:// and the server's address"),
    "model": Rule(rules.optional(rules.text), "the name of a model of the server, or None"),
    "api_key": Rule(rules.optional(rules.text), "a text, or None"),
    "timeout": Rule(rules.number(0.001), "seconds, more than 0"),
}
_SESSION = {
    "session": Rule(rules.instance_of(RemoteSession), "one that session() of this planner made"),
    "system": Rule(rules.optional(rules.text), "the text of a system prompt, or None"),
    "path": Rule(rules.path, "the name under which the session was saved"),
}


class RemotePlanner:
    """A pair that another process serves. Made by ``Planner.connect``; all methods may be called from any thread."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        """Connect and ask what is served; see ``Planner.connect``."""
        given = {"url": url, "model": model, "api_key": api_key, "timeout": timeout}
        timeout = rules.checked(_ARGUMENTS, given)["timeout"]
        self._connection = Connection(url, api_key, timeout)
        try:
            self._server = pick(self._connection.call("GET", "/v1/models"), model, url)
        except BaseException:
            self._connection.close()
            raise
        weakref.finalize(self, self._connection.abandon)

    def __enter__(self) -> RemotePlanner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the requests of this planner. The server goes on. Closing twice does no harm."""
        self._connection.close()

    def warm_up(self) -> None:
        """Do nothing: a service begins to build what forms need when it starts."""

    @property
    def model(self) -> str:
        """Name of the model on the server."""
        return self._server.model

    @property
    def shape(self) -> PairShape:
        """Sizes of the pair. Raises RequestError where the server does not tell them."""
        card = self._card("shape")
        return PairShape(**{field.name: card[field.name] for field in fields(PairShape)})

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a plan. Raises RequestError where the server does not tell them."""
        return tuple(self._card("stop_token_ids")["stop_token_ids"])

    @property
    def fingerprint(self) -> str:
        """Of the bundle. Raises RequestError where the server has none."""
        return str(self._card("fingerprint")["fingerprint"])

    @property
    def waiting(self) -> int:
        """Requests in the server's queue. Raises RequestError where the server does not tell."""
        self._card("waiting")
        return int(self._connection.call("GET", "/health")["waiting"])

    @property
    def backend(self) -> Never:
        """Raises RequestError: a backend is used where it runs."""
        self._refuse("backend")

    @property
    def tokenizer(self) -> Never:
        """Raises RequestError: the server keeps its tokenizer; see :meth:`encode`."""
        self._refuse("tokenizer")

    @property
    def prefixes(self) -> Never:
        """Raises RequestError: the server keeps its prefixes."""
        self._refuse("prefixes")

    @property
    def self_test(self) -> Never:
        """Raises RequestError: the server tested itself before it answered; its metrics say how."""
        self._refuse("self_test")

    @property
    def failure(self) -> Never:
        """Raises RequestError: a service whose engine fails ends, and its requests fail with ServiceError."""
        self._refuse("failure")

    @property
    def drafting(self) -> Never:
        """Raises RequestError: the server's metrics say whether it drafts."""
        self._refuse("drafting")

    def plan(self, task: Task, *, session: RemoteSession | None = None, **options: Unpack[PlanOptions]) -> Plan:
        """Make the whole plan; see :meth:`stream`."""
        return self.stream(task, session=session, **options).plan

    def stream(self, task: Task, *, session: RemoteSession | None = None, **options: Unpack[PlanOptions]) -> PlanStream:
        """Send a request and return its increments; see ``Planner.stream``.

        Raises RequestError for bad input and for options that the server has no word for, ContextError,
        QueueFullError, and ServiceError when the server cannot be reached or fails. Cancelling leaves the connection:
        what came until then is the plan, and the server ends the request within a cycle.
        """
        began, chosen = time.perf_counter(), Options.of(options)
        if session is not None:
            rules.checked(_SESSION, {"session": session})
            return session._stream(self, task, chosen, began)
        return self._ask(task, chosen, began)

    async def aplan(self, task: Task, *, session: RemoteSession | None = None, **options: Unpack[PlanOptions]) -> Plan:
        """Make the whole plan without blocking the loop; see :meth:`stream`."""
        return await self.astream(task, session=session, **options).result()

    def astream(
        self, task: Task, *, session: RemoteSession | None = None, **options: Unpack[PlanOptions]
    ) -> AsyncPlanStream:
        """:meth:`stream` for ``async for`` and ``async with``; its errors come with the first ``await``."""
        return AsyncPlanStream(partial(self.stream, task, session=session, **options))

    def encode(self, task: Task, *, thinking: bool = False, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a task. Raises RequestError where the server cannot tell them."""
        self._card("encode")
        chosen = Options(thinking=thinking, raw=raw)
        messages = as_messages(task)
        if messages is None:
            return token_ids(task)
        body: dict[str, Any] = {"text": task} if isinstance(task, str) else {"messages": messages}
        body |= {"thinking": chosen.thinking, "raw": chosen.raw}
        return tuple(self._connection.call("POST", "/v1/edge_dflash/encode", body)["tokens"])

    def session(self, system: str | None = None) -> RemoteSession:
        """A new conversation: kept by a service of this package, else sent whole with every turn."""
        rules.checked(_SESSION, {"system": system})
        return RemoteSession(self, system)

    def load_session(self, path: Path | str) -> RemoteSession:
        """A conversation that goes on from the one that was saved under this name.

        It lies on the server: the name is no path. Raises RequestError when there is none, BundleError when it was made
        with another bundle.
        """
        self._card("load_session")
        rules.checked(_SESSION, {"path": path})
        return RemoteSession._load(self, str(path))

    # ------------------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        task: Task,
        options: Options,
        began: float,
        before: tuple[Message, ...] = (),
        name: str | None = None,
        ended: Callable[[Plan], None] = lambda plan: None,
    ) -> PlanStream:
        """Send a request. ``name``: the server's session; ``before``: messages of a conversation kept here."""
        server = self._server
        question = ask(server, task, options, before, session=name)
        deadline = None if options.deadline is None else began + options.deadline
        if server.own and options.deadline is not None:
            question.body["edge_dflash"]["deadline_s"] = max(0.0, began + options.deadline - time.perf_counter())
            deadline = began + options.deadline + GRACE
        reading = Reading(options, began, own=server.own)
        asking, ticket = self._connection.submit(question, reading, deadline=deadline, ended=ended)
        return PlanStream(asking, ticket, owner=self)

    def _card(self, what: str) -> dict[str, Any]:
        if not self._server.own:
            raise RequestError(f"{self._server.describe()} does not offer {what}; it needs a service of edge-dflash")
        return dict(self._server.card)

    def _refuse(self, what: str) -> Never:
        raise RequestError(f"{what} belongs to the process that serves the model; open the bundle to use it")
