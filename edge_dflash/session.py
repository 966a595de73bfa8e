"""A conversation with the planner: its messages, their tokens, and the state of both.

A turn that committed tokens is part of the conversation, however it ended: cancelled, at its deadline, or by an error,
the text that was committed stays as the partial answer. A turn that committed none leaves no trace.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_dflash.common.nested import is_deeper
from edge_dflash.common.rules import PATH, checked
from edge_dflash.decode.options import Options
from edge_dflash.decode.saved import SessionState, adopt, load_session, save_session, state_of
from edge_dflash.errors import RequestError, one_line
from edge_dflash.runner.astream import Unwanted
from edge_dflash.runner.job import Job
from edge_dflash.runner.planning import Conversing
from edge_dflash.text.chat import Answer
from edge_dflash.text.images import name_of, sources_of
from edge_dflash.text.prompt import Conversation, Task, as_message, as_messages, tools_of
from edge_dflash.text.template import Message, for_templates

if TYPE_CHECKING:
    from edge_dflash.planner import Planner

_ARGUMENTS = {"path": PATH.saying("the path of a file")}


class PlannerSession(Conversing):
    """One conversation; its turns come one after another. Made by ``Planner.session``; used from any thread."""

    _planner: Planner

    def __init__(self, planner: Planner, system: str | None = None) -> None:
        self._planner, self._engine = planner, planner._engine
        self._lock = threading.Lock()  # never held while a picture, a form or a disk is waited for
        self._saving = threading.Lock()  # taken before the other one: files are written in the order of their states
        said: tuple[Message, ...] = ({"role": "system", "content": system},) if system is not None else ()
        self._known = Conversation(said)  # up to the last turn that ended, its tokens and pictures apart
        self._state = self._engine.manager.open()  # has them
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
        return tuple(self._known.messages)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All its tokens, up to the last commit."""
        return self._state.tokens

    @property
    def busy(self) -> bool:
        """Whether a turn is prepared, waits or runs, and was not cancelled: another one would be refused."""
        return self._preparing or self._runs

    @property
    def _runs(self) -> bool:
        return self._turn is not None and not (self._turn.ticket.done or self._turn.cancelled)

    def fork(self) -> PlannerSession:
        """Another conversation that goes on from here, without computing anything again."""
        with self._held():
            self._wait_for_turn()
            other = PlannerSession(self._planner)
            other._known = self._known
            if self._state.tokens:
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
                if not self._state.tokens:
                    raise RequestError("the session has no turn yet, there is nothing to save; save it after the first")
                known = self._known
                note = {"messages": list(known.messages), "tools": known.tools, "thinking": known.thinking}
                state = self._engine.run(partial(state_of, self._state))
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
                self._turn.ticket.wait()
            self._state.close()
        finally:
            self._lock.release()

    @classmethod
    def _load(cls, planner: Planner, path: Path | str) -> PlannerSession:
        session = cls(planner)
        engine = session._engine
        state = load_session(path, engine.manager.bundle)
        try:
            session._known = _conversation(state)
        except (ValueError, KeyError, TypeError, RecursionError, RequestError) as error:
            raise RequestError(
                f"{path} holds no conversation of a planner; give a file that save() wrote ({one_line(error)})"
            ) from None
        session._state = engine.call(lambda: adopt(engine.manager, state))
        return session

    def _next(self, planner: object, task: Task, options: Options, began: float, unwanted: Unwanted) -> Job:
        """The next turn, ready to be queued. The session may be closed while it is prepared."""
        if planner is not self._planner:
            raise RequestError("the session belongs to another planner; use the one that made it")
        with self._held():
            self._wait_for_turn()
            if self._preparing:
                raise _running()
            self._preparing = True
            known = replace(self._known, tokens=self._state.tokens, pictures=self._state.pictures)
        try:
            request = self._planner._preparer.prepare(task, options, began, lambda: self._closed or unwanted(), known)
            with self._held():
                self._wait_for_turn()
                settled = partial(self._settled, request.turn, tools_of(options))
                self._turn = Job(request, self._engine.manager, self._engine.pace, self._state, settled)
                return self._turn
        finally:
            self._preparing = False

    def _settled(self, said: Sequence[Message], tools: str, answer: Answer, *, committed: bool, thinking: bool) -> None:
        """Take over a turn that has ended, with what was ``said`` in it; see runner.job.Settled."""
        if committed:
            messages = [*self._known.messages, *said, as_message(answer)]
            self._known = Conversation(messages, tools=tools, thinking=thinking)
        if self._closed:
            self._state.close()

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
        self._turn.ticket.wait()


def _running() -> RequestError:
    return RequestError("a turn of this session is still running; wait for its end, or cancel it")


_DEEPEST = 200  # levels of a note, far below those at which writers and templates give up


def _conversation(state: SessionState) -> Conversation:
    """The conversation of a saved session's note.

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
    return Conversation(said, tools=tools, thinking=thinking)
