"""Conversations by owner and name: open ones in memory, saved ones in directories, opened again when asked for.

An owner is an account; what others have is not there for it. Names were checked. Every method but the constructors may
wait for the engine, so none is called on the loop's thread. Where the disk fails, a session stays as it is in memory
and is saved at the next occasion.

No file is written over but that which the session itself wrote or came from, or, if asked, an earlier state of it.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from edge_dflash.decode.saved import load_session
from edge_dflash.errors import EdgeDflashError
from edge_dflash.planner import Planner
from edge_dflash.serve.errors import Refusal
from edge_dflash.serve.limits import own
from edge_dflash.serve.state_dir import Mark, SessionFiles
from edge_dflash.session import PlannerSession

log = logging.getLogger("edge_dflash.serve")
_EXISTS = "session_exists"
_LETS_GO = 5.0  # seconds that a request which has ended may take to let its session go


@dataclass
class _Slot:
    """A name that is in use. Its lock is held while it is loaded, saved or forked."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: PlannerSession | None = None
    saved: int = 0  # tokens that the file holds
    file: Mark | None = None  # which the session came from or wrote last
    users: int = 0  # who is about to hold it, or does
    held: bool = False  # by one request
    due: bool = False  # to be saved when its turn has ended


class Sessions:
    """Named sessions of one owner, on one planner. Used from any thread."""

    def __init__(self, planner: Planner, directory: Path, *, limit: int, saved_limit: int, save: str) -> None:
        """Keep at most ``limit`` open and ``saved_limit`` files; ``save``: turn, shutdown or never."""
        self._planner = planner
        self._files = SessionFiles(directory, saved_limit)
        self._limit = limit
        self._save = save
        self._changed = threading.Condition()  # a user let go
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._slots)

    def acquire(self, name: str) -> PlannerSession:
        """The session of this name: open, loaded from its file, or new. Give it back with :meth:`release`."""
        slot = self._take(name, room=True)
        try:
            until = time.monotonic() + _LETS_GO
            while (session := self._held(name, slot)) is None:
                with self._changed:
                    if not self._changed.wait_for(lambda: not slot.held, until - time.monotonic()):
                        raise _busy(name)
            return session
        except BaseException:
            self._let_go(name, slot)
            raise

    def release(self, name: str) -> None:
        """A request has no more to do with it; it is saved if that was put off."""
        with self._changed:
            slot = self._slots[name]
            slot.held, due, slot.due = False, slot.due, False
            self._changed.notify_all()
        try:
            if due and (problem := self._saved(name, slot)):
                log.error("not saved: %s", problem)
        finally:
            self._let_go(name, slot)

    def entries(self) -> list[dict[str, Any]]:
        """All names, open and saved."""
        with self._changed:
            opened = {name: slot for name, slot in self._slots.items() if slot.session is not None}
        return [self._entry(name, opened.get(name)) for name in sorted({*opened, *self._files.names()})]

    def info(self, name: str) -> dict[str, Any]:
        """One session; with messages and tokens when it is open. Raises Refusal for an unknown name."""
        with self._changed:
            slot = self._slots.get(name)
        entry = self._entry(name, slot)
        if slot is not None and (session := slot.session) is not None:
            return {**entry, "messages": list(session.messages), "token_ids": list(session.tokens)}
        if not entry["saved"]:
            raise _unknown(name)
        return entry

    def save(self, name: str, to: str | None = None, *, replace: bool = False) -> int:
        """Write a session, under its own name or a new one; returns the file's bytes.

        ``replace``: under ``to`` may be an earlier state of this session. Raises Refusal for what else is there.
        """
        to = to or name
        with self._used(name, there=True) as slot, self._used(to) as target, ExitStack() as locks:
            for _, one in sorted({name: slot, to: target}.items()):  # nobody opens the other one meanwhile
                locks.enter_context(one.lock)
            return self._written(name, slot, to, target, replace=replace)

    def fork(self, name: str, to: str) -> None:
        """Let the session ``to`` go on from where ``name`` stands."""
        self.info(name)
        if to == name:
            raise Refusal(f"session {name!r} cannot be forked to itself; give another name", status=409, param="to")
        source = self.acquire(name)
        try:
            with self._used(to, room=True) as target, target.lock:
                if target.session is not None or self._files.mark(to) is not None:
                    raise _exists(to)
                target.session = source.fork()
        finally:
            self.release(name)

    def delete(self, name: str) -> None:
        """Forget a session and its file. Raises Refusal for an unknown name."""
        until = time.monotonic() + _LETS_GO
        with self._changed:
            while (slot := self._slots.get(name)) is not None and slot.users:
                running = slot.session is None or slot.session.busy
                if running or not self._changed.wait(until - time.monotonic()):  # who held it has ended, and lets it go
                    raise _busy(name)
            found = self._files.remove(name)  # first: where it fails nothing has changed
            self._slots.pop(name, None)
        if slot is None and not found:
            raise _unknown(name)
        if slot is not None and slot.session is not None:
            slot.session.close()

    def save_all(self, *, soon: bool = False) -> list[str]:
        """Save what is not saved; returns what went wrong. ``soon``: one whose turn runs is saved when that ends."""
        if self._save == "never":
            return []
        with self._changed:
            for slot in self._slots.values() if soon else ():
                slot.due = slot.session is not None and slot.session.busy
            names = [name for name, slot in self._slots.items() if not (soon and slot.due)]
        problems = []
        for name in names:
            with suppress(Refusal), self._used(name, there=True) as slot:  # else it was deleted meanwhile
                problems.append(self._saved(name, slot))
        return [problem for problem in problems if problem]

    def _saved(self, name: str, slot: _Slot) -> str:
        """Save a session if it is not saved; returns what went wrong."""
        with slot.lock:
            try:
                if _unsaved(slot):
                    self._written(name, slot, name, slot)
                return ""
            except EdgeDflashError as error:
                problem = f"session {name}: {error}"
                if not isinstance(error, Refusal) or error.code != _EXISTS:
                    return problem
            tokens = array("I", slot.session.tokens if slot.session is not None else ())
            beside = f"{name[:50]}-{blake2b(tokens, digest_size=6).hexdigest()}"  # its file became another's
        try:
            self.save(name, beside, replace=True)
            return f"{problem}; it is saved as {beside!r}"
        except EdgeDflashError as error:
            return f"{problem}; {error}"

    def _take(self, name: str, *, there: bool = False, room: bool = False) -> _Slot:
        """The slot of a name, with one more user. Raises Refusal where it is to be there and is not.

        ``room``: it is used now; another one is closed if there are too many.
        """
        with self._changed:
            if there and name not in self._slots:
                raise _unknown(name)
            if room and name not in self._slots and len(self._slots) >= self._limit:
                self._evict()
            slot = self._slots.setdefault(name, _Slot())
            if room:
                self._slots.move_to_end(name)
            slot.users += 1
            return slot

    def _let_go(self, name: str, slot: _Slot) -> None:
        """One user less; a slot that nobody uses and that came to nothing is dropped."""
        with self._changed:
            slot.users -= 1
            self._changed.notify_all()
            if slot.users or (slot.session is not None and slot.session.tokens):
                return
            if slot.session is not None:
                slot.session.close()
            del self._slots[name]

    @contextmanager
    def _used(self, name: str, *, there: bool = False, room: bool = False) -> Iterator[_Slot]:
        """The slot of a name, with one more user in the block; see :meth:`_take`."""
        slot = self._take(name, there=there, room=room)
        try:
            yield slot
        finally:
            self._let_go(name, slot)

    def _held(self, name: str, slot: _Slot) -> PlannerSession | None:
        """Hold a session. None: the request that held it has ended, or was cancelled, and is about to let it go."""
        with slot.lock:
            if slot.held:
                if slot.session is None or slot.session.busy:
                    raise _busy(name)
                return None
            if slot.session is None and self._files.has(name):
                slot.file = self._files.mark(name)
                slot.session = self._planner.load_session(self._files.path(name))
                slot.saved = len(slot.session.tokens)
            elif slot.session is None:
                slot.session = self._planner.session()
            slot.held = True
            return slot.session

    def _evict(self) -> None:
        """Close the session that was used longest ago and is not in use. Nothing is lost: else it is refused."""
        unsaved: EdgeDflashError | None = None
        for name, slot in self._slots.items():
            if slot.users or slot.session is None or not slot.lock.acquire(blocking=False):
                continue
            try:
                if _unsaved(slot) and self._save == "never":
                    continue
                if _unsaved(slot):
                    self._written(name, slot, name, slot)
            except EdgeDflashError as error:
                unsaved = unsaved or error
                continue
            finally:
                slot.lock.release()
            slot.session.close()
            del self._slots[name]
            return
        if unsaved is not None:
            raise unsaved
        raise Refusal(
            f"{len(self._slots)} sessions are open, which is the limit, and none can be put away; delete one",
            status=429,
            code="session_limit",
            retry_after=5,
        )

    def _written(self, name: str, slot: _Slot, to: str, target: _Slot, *, replace: bool = False) -> int:
        """Write a session to the file of ``to``, whose slot is ``target``; both are locked."""
        if slot.session is None:
            raise _unknown(name)
        if slot.session.busy:
            raise _busy(name)
        self._files.make_room(to)
        there = self._files.mark(to)
        if target is slot and there not in (None, slot.file):
            why = f"the file of session {name!r} is not the one that this session wrote or came from"
            raise Refusal(f"{why}; save to another name, or move it away", status=409, code=_EXISTS)
        taken = target is not slot and (target.session is not None or there is not None)
        if taken and not (replace and self._is_earlier(to, target, there, slot.session.tokens)):
            raise _exists(to)
        held = len(slot.session.tokens)  # at least: a turn may end before the state is taken, and while it is written
        size = slot.session.save(self._files.path(to))
        if target is slot:
            slot.saved, slot.file = held, self._files.mark(to)
        elif target.session is not None:
            target.session.close()
            target.session = None
        return size

    def _is_earlier(self, name: str, slot: _Slot, there: Mark | None, tokens: tuple[int, ...]) -> bool:
        """Whether all that a name holds, open and in its file, is the beginning of these tokens."""
        held = [] if slot.session is None else [slot.session.tokens]
        if slot.held or (slot.session is not None and slot.session.busy):
            raise _busy(name)
        if there is not None:
            if not self._files.has(name):
                return False
            held.append(load_session(self._files.path(name), self._planner.fingerprint).tokens)
        return all(tokens[: len(one)] == one for one in held)

    def _entry(self, name: str, slot: _Slot | None) -> dict[str, Any]:
        session = slot.session if slot is not None else None
        return {
            "id": name,
            "object": "edge_dflash.session",
            "open": session is not None,
            "tokens": len(session.tokens) if session is not None else None,
            "saved": self._files.has(name),
        }


def _unsaved(slot: _Slot) -> bool:
    return slot.session is not None and len(slot.session.tokens) > slot.saved


def _unknown(name: str) -> Refusal:
    return Refusal(f"there is no session {name!r}; a request with it makes one", status=404, code="session_not_found")


def _exists(name: str) -> Refusal:
    return Refusal(f"session {name!r} exists; give a new name, or delete it", status=409, code=_EXISTS, param="to")


def _busy(name: str) -> Refusal:
    return Refusal(f"session {name!r} is in use; wait for its turn to end", status=409, code="session_busy")


class AllSessions:
    """The sessions of all owners, by owner. Used from any thread.

    Files of the service's own user lie in the directory itself, as those of versions without owners; files of any other
    account lie in a directory of its name.
    """

    def __init__(self, planner: Planner, directory: Path, *, limit: int, saved_limit: int, save: str) -> None:
        """The limits are those of one owner; see :class:`Sessions`."""
        self._make = partial(Sessions, planner, limit=limit, saved_limit=saved_limit, save=save)
        self._directory = directory
        self._lock = threading.Lock()
        self._owners: dict[str, Sessions] = {}

    def __len__(self) -> int:
        return sum(map(len, self._all()))

    def of(self, owner: str) -> Sessions:
        """The sessions of one owner."""
        with self._lock:
            if owner not in self._owners:
                self._owners[owner] = self._make(self._directory if owner == own() else self._directory / owner)
            return self._owners[owner]

    def save_all(self, *, soon: bool = False) -> list[str]:
        """See Sessions."""
        return [problem for sessions in self._all() for problem in sessions.save_all(soon=soon)]

    def _all(self) -> list[Sessions]:
        with self._lock:
            return list(self._owners.values())
