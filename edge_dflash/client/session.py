"""A conversation with a planner somewhere else.

On a service of this package it lies there, under a name that nobody else has; saved copies have names that the caller
gives. Elsewhere the messages are kept here and sent whole with every turn. Its turns come one after another.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edge_dflash.decode.options import Options, PlanOptions, Task, as_messages
from edge_dflash.errors import EdgeDflashError, RequestError
from edge_dflash.result import Plan
from edge_dflash.runner.request import as_message
from edge_dflash.runner.stream import AsyncPlanStream, PlanStream
from edge_dflash.text.chat import Answer
from edge_dflash.text.tokenizer import Message

if TYPE_CHECKING:
    from edge_dflash.client.planner import RemotePlanner

_PATH = "/v1/edge_dflash/sessions"


class RemoteSession:
    """One conversation, with the interface of ``PlannerSession``. Made by ``RemotePlanner.session``."""

    def __init__(self, planner: RemotePlanner, system: str | None = None) -> None:
        self._planner = planner
        self._name = secrets.token_hex(16) if planner._server.own else None  # on the server
        self._lock = threading.Lock()
        self._messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._begun = False  # the server knows it
        self._stale: str | None = None  # the name under which a first turn came to nothing
        self._busy = False
        self._closed = False

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation in OpenAI form, up to the last turn that ended."""
        if self._name is not None and self._begun:
            return tuple(self._planner._connection.call("GET", f"{_PATH}/{self._name}")["messages"])
        return tuple(self._messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All its tokens. Raises RequestError where the server does not tell them."""
        self._planner._card("tokens")
        if not self._begun:
            return ()
        return tuple(self._planner._connection.call("GET", f"{_PATH}/{self._name}")["token_ids"])

    @property
    def busy(self) -> bool:
        """Whether a turn is under way: another one would be refused."""
        return self._busy

    def plan(self, task: Task, **options: Unpack[PlanOptions]) -> Plan:
        """Answer the next turn; see ``Planner.stream``. A turn that is still running is refused a successor."""
        return self._planner.plan(task, session=self, **options)

    def stream(self, task: Task, **options: Unpack[PlanOptions]) -> PlanStream:
        """Increments of the next turn; see ``Planner.stream``."""
        return self._planner.stream(task, session=self, **options)

    async def aplan(self, task: Task, **options: Unpack[PlanOptions]) -> Plan:
        """:meth:`plan` for asyncio."""
        return await self._planner.aplan(task, session=self, **options)

    def astream(self, task: Task, **options: Unpack[PlanOptions]) -> AsyncPlanStream:
        """:meth:`stream` for asyncio."""
        return self._planner.astream(task, session=self, **options)

    def fork(self) -> RemoteSession:
        """Another conversation that goes on from here."""
        other = RemoteSession(self._planner)
        with self._lock:
            self._check(idle=True)
            other._messages = list(self._messages)
            if self._name is not None and self._begun:
                self._planner._connection.call("POST", f"{_PATH}/{self._name}/fork", {"to": other._name})
                other._begun = True
        return other

    def save(self, path: Path | str) -> int:
        """Save the conversation on the server, under a name that is no path; returns its bytes.

        Raises RequestError where the server keeps no conversations, and for a name with other characters than letters,
        digits and ``. _ -``.
        """
        self._planner._card("save")
        with self._lock:
            self._check(idle=True)
            if not self._begun:
                raise RequestError("the session has no turn yet, there is nothing to save; save it after the first")
            saved = self._planner._connection.call("POST", f"{_PATH}/{self._name}/save", {"to": str(path)})
        return int(saved["bytes"])

    def close(self) -> None:
        """Forget it, on the server too; saved copies stay. Closing twice does no harm."""
        if self._closed:
            return
        self._closed = True
        self._forget(self._stale)
        self._forget(self._name if self._begun else None)

    def _forget(self, name: str | None) -> None:
        if name is not None:
            with contextlib.suppress(EdgeDflashError):
                self._planner._connection.call("DELETE", f"{_PATH}/{name}")

    @classmethod
    def _load(cls, planner: RemotePlanner, name: str) -> RemoteSession:
        from urllib.parse import quote

        session = cls(planner)
        planner._connection.call("POST", f"{_PATH}/{quote(name, safe='')}/fork", {"to": session._name})
        session._begun = True
        return session

    def _stream(self, planner: RemotePlanner, task: Task, options: Options, began: float) -> PlanStream:
        if planner is not self._planner:
            raise RequestError("the session belongs to another planner; use the one that made it")
        with self._lock:
            self._check(idle=True)
            self._busy = True
        said, first = as_messages(task), self._name is not None and not self._begun

        def ended(plan: Plan) -> None:
            if self._name is None and said is not None and (plan.text or plan.thinking or plan.tool_calls):
                answer = Answer(plan.thinking, plan.text or "", plan.tool_calls)
                self._messages = [*self._messages, *said, as_message(answer)]
            if first and not plan.tokens:  # it begins anew with the next turn, and with its system prompt
                self._begun, self._stale, self._name = False, self._name, secrets.token_hex(16)
            self._busy = False

        try:
            if self._name is None:
                return planner._ask(task, options, began, tuple(self._messages), None, ended)
            self._forget(self._stale)
            self._begun, self._stale = True, None
            before = self._messages if first else []
            return planner._ask(_with(before, task), options, began, (), self._name, ended)
        except BaseException:
            if first:
                self._begun, self._stale = False, None  # it was not taken
            self._busy = False
            raise

    def _check(self, *, idle: bool) -> None:
        if self._closed:
            raise RequestError("the session is closed; open a new one")
        if idle and self._busy:
            raise RequestError("a turn of this session is still running; wait for its end, or cancel it")


def _with(first: Sequence[Message], task: Task) -> Task:
    """A first turn, behind the system prompt."""
    messages = as_messages(task)
    return [*first, *messages] if first and messages is not None else task
