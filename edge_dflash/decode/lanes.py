"""Which session's state each lane of a backend holds, and who gives way where another one needs a place.

S3 a lane holds the state of at most one session; it is moved out only when the place is needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from edge_dflash.decode.backend import Backend, Snapshot

if TYPE_CHECKING:
    from edge_dflash.decode.session import Session

_RUNS = 2  # inconvenience of a lane whose session has a pass soon


class Lanes:
    """The lanes of one backend."""

    def __init__(self, backend: Backend, copied: Callable[[int], Snapshot]) -> None:
        """``copied`` gives a lane's state, for a session that is moved out."""
        self._backend, self._copied = backend, copied
        self._held: list[weakref.ref[Session] | None] = [None] * backend.shape.lanes
        self._used, self._uses = [0] * backend.shape.lanes, 0  # by which lane was entered last

    def of(self, session: Session) -> int | None:
        """The lane that holds a session's state."""
        return next((lane for lane in range(len(self._held)) if self._holder(lane) is session), None)

    def take(self) -> int:
        """A lane for a newcomer, where it is nobody's until somebody occupies it: who rests longest moves out."""
        self.park(lane := min(range(len(self._held)), key=self._inconvenience))
        return lane

    def share(self, lane: int, heirs: Sequence[Session]) -> None:
        """Give what a lane holds to sessions: the first one has the lane, others copies in lanes that are free or rest.

        Those for whom no lane is left share a snapshot.
        """
        first, *others = heirs
        self.occupy(first, lane)
        spare = sorted((one for one in range(len(self._held)) if one != lane), key=self._inconvenience)
        spare = [one for one in spare if self._inconvenience(one)[0] < _RUNS]
        for heir, target in zip(others, spare, strict=False):
            self.park(target)
            self._backend.copy(lane, target)
            self.occupy(heir, target)
        if left := others[len(spare) :]:
            snapshot = self._copied(lane)
            for heir in left:
                heir.snapshot = snapshot

    def enter(self, lane: int) -> None:
        """Note that a pass of a lane comes next."""
        self._uses += 1
        self._used[lane] = self._uses

    def occupy(self, session: Session, lane: int) -> None:
        """Note whose state a lane holds (S1)."""
        self._held[lane] = weakref.ref(session)

    def forget(self, session: Session) -> None:
        """No lane holds the session's state, nor what it left behind when its request ended before its first token."""
        self._held = [None if held is not None and held() is session else held for held in self._held]

    def park(self, lane: int) -> None:
        """Move the session out of a lane."""
        session, self._held[lane] = self._holder(lane), None
        if session is not None and session.snapshot is None:
            session.snapshot = self._copied(lane)

    def vacate(self) -> None:
        """Move all sessions out."""
        for lane in range(len(self._held)):
            self.park(lane)

    def lose(self) -> None:
        """The states of all lanes are given up."""
        self._held = [None] * len(self._held)

    def _inconvenience(self, lane: int) -> tuple[int, int]:
        """Of taking a lane: nobody's before one that rests, before one that runs; longest ago first."""
        holder = self._holder(lane)
        return 0 if holder is None else 1 if holder.resting else _RUNS, self._used[lane]

    def _holder(self, lane: int) -> Session | None:
        """The session whose state a lane holds, if it still does."""
        held = self._held[lane]
        session = held() if held is not None else None
        if session is None or session.closed or self._backend.length(lane) != session.rows:
            return None
        return session
