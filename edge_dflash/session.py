"""A conversation with the planner: its messages, their tokens, and the state of both.

A turn that committed tokens is part of the conversation, however it ended: cancelled, at its deadline, or by an error,
the text that was committed stays as the partial answer. A turn that committed none leaves no trace.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edge_dflash.common.rules import PATH, checked, is_deeper
from edge_dflash.decode.options import Options, PlanOptions, Task, as_messages
from edge_dflash.decode.pictured import Placed
from edge_dflash.decode.saved import SessionState, load_session, save_session
from edge_dflash.decode.session import Session, SessionManager
from edge_dflash.errors import RequestError, one_line
from edge_dflash.result import Plan
from edge_dflash.runner.engine import Engine
from edge_dflash.runner.job import Home, Job
from edge_dflash.runner.looking import Shown, name_of
from edge_dflash.runner.request import Encoder, Model, Prompt, as_message, as_said, next_turn, prepare
from edge_dflash.runner.stream import UNWANTED, AsyncPlanStream, PlanStream
from edge_dflash.text.chat import Answer, for_templates
from edge_dflash.text.images import sources_of
from edge_dflash.text.template import Message

if TYPE_CHECKING:
    from edge_dflash.planner import Planner

_ARGUMENTS = {"path": PATH.saying("the path of a file")}


class PlannerSession:
    """One conversation; its turns come one after another. Made by ``Planner.session``; used from any thread."""

    def __init__(
        self, planner: Planner, engine: Engine, model: Model, encoder: Encoder, system: str | None = None
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._model = model
        self._encoder = encoder
        self._lock = threading.Lock()  # never held while a picture, a form or a disk is waited for
        self._saving = threading.Lock()  # taken before the other one: files are written in the order of their states
        self._messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._state: Session | None = None  # from the first turn on
        self._tools: str = ""  # that the conversation began with, as JSON
        self._thinking = False  # the last answer was cut inside a thinking span
        self._turn: Job | None = None  # the newest; its stream may be dropped
        self._preparing = False  # its next turn
        self._closed = False

    def __enter__(self) -> PlannerSession:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation in OpenAI form, up to the last turn that ended."""
        return tuple(self._messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All its tokens, up to the last commit."""
        return self._state.tokens if self._state is not None else ()

    @property
    def busy(self) -> bool:
        """Whether a turn is prepared, waits or runs, and was not cancelled: another one would be refused."""
        return self._preparing or self._runs

    @property
    def _runs(self) -> bool:
        return self._turn is not None and not (self._turn.ticket.done or self._turn.cancelled)

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

    def fork(self) -> PlannerSession:
        """Another conversation that goes on from here, without computing anything again."""
        with self._held():
            self._wait_for_turn()
            other = PlannerSession(self._planner, self._engine, self._model, self._encoder)
            other._messages, other._tools, other._thinking = list(self._messages), self._tools, self._thinking
            if self._state is not None:
                other._state = self._engine.run(self._state.fork)
            return other

    def save(self, path: Path | str) -> int:
        """Write the conversation with its state to a file, whole or not at all; returns its bytes.

        A file that is there is replaced, whatever it holds: to keep each state, give each a path. Only its owner may
        read it, and only the bundle that made it can load it. Raises StorageError when it cannot be written.
        """
        checked(_ARGUMENTS, {"path": path})
        with self._held(self._saving):
            with self._held():
                self._wait_for_turn()
                if self._state is None:
                    raise RequestError("the session has no turn yet, there is nothing to save; save it after the first")
                note = {"messages": self._messages, "tools": self._tools, "thinking": self._thinking}
                state = self._engine.run(self._state.state)
            return save_session(path, replace(state, note=json.dumps(note, default=dict)))

    def close(self) -> None:
        """Cancel its turn and give its memory back. Closing twice does no harm.

        Called by an observer, on the engine's own thread, it returns at once: the memory is given back by the turn when
        it has ended, or by who uses the session.
        """
        self._closed = True  # ends what is prepared, too
        self._let_go(wait=not self._engine.here)

    def _let_go(self, *, wait: bool) -> None:
        """See :meth:`close`. Without ``wait``, the turn or who holds the lock does what cannot be done now."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            if self._turn is not None:
                self._turn.cancelled = True
                self._turn.ticket.cancel()
                if not wait and not self._turn.ticket.done:
                    return
                self._turn.ticket.exception()
            if self._state is not None:
                self._state.close()
        finally:
            self._lock.release()

    @classmethod
    def _load(
        cls, planner: Planner, engine: Engine, model: Model, encoder: Encoder, path: Path | str
    ) -> PlannerSession:
        state = load_session(path, engine.manager.bundle)
        session = cls(planner, engine, model, encoder)
        try:
            session._messages, session._tools, session._thinking = _conversation(state)
        except (ValueError, KeyError, TypeError, RecursionError, RequestError) as error:
            raise RequestError(
                f"{path} holds no conversation of a planner; give a file that save() wrote ({one_line(error)})"
            ) from None
        session._state = engine.call(lambda: engine.manager.adopt(state))
        return session

    def _next(self, engine: Engine, task: Task, options: Options, began: float) -> Job:
        """The next turn, ready to be queued."""
        if engine is not self._engine:
            raise RequestError("the session belongs to another planner; use the one that made it")
        with self._held():
            self._wait_for_turn()
            if self._preparing:
                raise _running()
            self._preparing, known = True, self._known
        try:
            return self._prepared(known, task, options, began)
        finally:
            self._preparing = False

    def _prepared(self, known: _Known, task: Task, options: Options, began: float) -> Job:
        """The next turn, whose pictures are decoded and whose form is compiled while the session may be closed."""
        engine, gone = self._engine, UNWANTED.get()
        unwanted = UNWANTED.set(lambda: self._closed or gone())
        try:
            pictures = {name_of(placed.picture): placed.picture for placed in known.placed}
            shown = self._encoder.read(as_said(self._model, task), pictures, options, began)
            shown = replace(shown, pictures={**pictures, **shown.pictures})
            tools = json.dumps(options.tools or [], default=dict)
            prompt = replace(self._prompt(known, task, shown, options, tools), ended=shown.ended)
            request = prepare(self._model, options, prompt, began)
        finally:
            UNWANTED.reset(unwanted)
        with self._held():
            self._wait_for_turn()
            self._turn = Job(request, _Turn(self, shown.messages, tools), engine.manager, engine.pace)
            return self._turn

    @property
    def _known(self) -> _Known:
        state = self._state
        tokens, placed = (state.tokens, state.pictures) if state is not None else ((), ())
        return _Known(tokens, placed, self._messages, self._tools, self._thinking)

    def _prompt(self, known: _Known, task: Task, shown: Shown, options: Options, tools: str) -> Prompt:
        """The whole conversation with one more turn, its end as it was generated if that can be."""
        if known.tokens and tools == known.tools:
            what = (self._model, known.tokens, known.messages, task, options)
            prompt = next_turn(*what, thinking=known.thinking, shown=shown, placed=known.placed)
            if prompt is not None:
                return prompt
        if not known.messages:
            return self._encoder.prompt(task, options, shown=shown)
        return self._encoder.conversation(Shown([*known.messages, *shown.messages], shown.pictures), options)

    @contextmanager
    def _held(self, lock: threading.Lock | None = None) -> Iterator[None]:
        """Nobody else changes the session. Raises RequestError where waiting for them would stop the engine."""
        lock = lock or self._lock
        if not lock.acquire(blocking=not self._engine.here):
            raise RequestError("the session is in use by another thread, which waits for this one; call on another one")
        try:
            yield
        finally:
            lock.release()
            if self._closed:  # perhaps meanwhile, on the engine's thread, which does not wait
                self._let_go(wait=False)

    def _wait_for_turn(self) -> None:
        """Wait for a cancelled turn to let go. Raises RequestError while another one runs, or when closed."""
        if self._closed:
            raise RequestError("the session is closed; open a new one")
        if self._turn is None:
            return
        if self._runs:
            raise _running()
        self._turn.ticket.exception()


@dataclass(frozen=True)
class _Known:
    """A conversation as it is before its next turn; see PlannerSession."""

    tokens: tuple[int, ...]
    placed: tuple[Placed, ...]  # pictures of its tokens
    messages: Sequence[Message]  # never changed: a turn that ends makes another list
    tools: str
    thinking: bool


def _running() -> RequestError:
    return RequestError("a turn of this session is still running; wait for its end, or cancel it")


class _Turn(Home):
    """The place of a turn: its session, which takes it over when it has ended."""

    def __init__(self, session: PlannerSession, said: Sequence[Message], tools: str) -> None:
        self._session = session
        self._said = said
        self._tools = tools

    def open(self, manager: SessionManager) -> Session:
        session = self._session
        if session._state is None:
            session._state = manager.open()
        return session._state

    def settle(self, state: Session, answer: Answer, *, committed: bool, thinking: bool) -> None:
        session = self._session
        if committed:
            session._messages = [*session._messages, *self._said, as_message(answer)]
            session._tools, session._thinking = self._tools, thinking
        if session._closed:
            state.close()


_DEEPEST = 200  # levels of a note, far below those at which writers and templates give up


def _conversation(state: SessionState) -> tuple[list[Message], str, bool]:
    """Messages, tools, and whether thinking is open, of a saved session's note.

    Raises ValueError, KeyError, TypeError, RecursionError or RequestError for what :meth:`PlannerSession.save` never
    writes.
    """
    note = json.loads(state.note)
    messages, tools, thinking = note["messages"], note["tools"], note["thinking"]
    if not isinstance(messages, list) or not isinstance(tools, str) or not isinstance(thinking, bool):
        raise TypeError("messages, tools or thinking are of another type")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise TypeError("a message is no object with a role")
    if is_deeper(note, _DEEPEST):
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    said = as_messages(messages) or [] if messages else []
    for index, message in enumerate(said):
        for_templates(message, index)
    names = {name_of(placed.picture) for placed in state.pictures}
    if strange := [source for source in sources_of(said) if source not in names]:
        raise ValueError(f"image {strange[0]!r:.60} of its messages is none of its images")
    return said, tools, thinking
