"""Whose sessions there are. An owner is an account; what others have is not there for it.

Files of the service's own user lie in the directory itself, as those of versions that knew no owners; files of any
other account lie in a directory of its name.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from edge_dflash.planner import Planner
from edge_dflash.serve.accounts import own
from edge_dflash.serve.sessions import Sessions


class AllSessions:
    """The sessions of all owners, by owner. Used from any thread."""

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

    def save_all(self) -> list[str]:
        """See Sessions."""
        return [problem for sessions in self._all() for problem in sessions.save_all()]

    def save_soon(self) -> list[str]:
        """See Sessions."""
        return [problem for sessions in self._all() for problem in sessions.save_soon()]

    def _all(self) -> list[Sessions]:
        with self._lock:
            return list(self._owners.values())
