"""What is held in memory for later requests, up to a budget of bytes: states of prompts' beginnings, rows of pictures.

Losing an entry costs a pass and never a token: what is computed again is equal bit for bit. The least recently used
entries are evicted first. Statistics may be read from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np

from edge_dflash.decode.backend import Snapshot


@dataclass(frozen=True)
class Reuse:
    """What a request need not compute again."""

    tokens: int  # leading tokens of the prompt whose state was there already
    source: Literal["session", "store", "nothing"]


@dataclass(frozen=True, kw_only=True)
class PrefixStats:
    """What a store of prefixes holds and how it served."""

    entries: int
    bytes: int  # of the snapshots and their keys
    budget: int  # bytes
    hits: int  # lookups that found something
    misses: int  # lookups that found nothing, by requests that had nothing else either
    tokens: int  # found by all hits together
    evicted: int  # entries dropped for newer ones
    refused: int  # snapshots larger than the whole budget


Key = TypeVar("Key")
Value = TypeVar("Value")


class Budgeted(Generic[Key, Value]):
    """Entries by key, the least recently used first, up to a budget."""

    def __init__(self, budget: int) -> None:
        """Hold at most ``budget`` bytes; 0 stores nothing."""
        if budget < 0:
            raise ValueError(f"the budget is {budget} bytes, wanted 0 or more")
        self.budget = budget
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, Value] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._bytes = self._hits = self._misses = self._evicted = 0

    def _keep(self, key: Key, value: Value, size: int) -> bool:
        """Store an entry of ``size`` bytes as the newest. False, and nothing changed, when it exceeds the budget."""
        if size > self.budget:
            return False
        self._drop(key)
        while self._bytes + size > self.budget:
            self._drop(next(iter(self._entries)))
            self._evicted += 1
        self._entries[key], self._sizes[key] = value, size
        self._bytes += size
        return True

    def _drop(self, key: Key) -> None:
        self._entries.pop(key, None)
        self._bytes -= self._sizes.pop(key, 0)

    def _figures(self) -> dict[str, int]:
        counts = {"hits": self._hits, "misses": self._misses, "evicted": self._evicted}
        return {"entries": len(self._entries), "bytes": self._bytes, "budget": self.budget, **counts}


class PrefixStore(Budgeted[bytes, Snapshot]):
    """Snapshots by the identities of their tokens."""

    def __init__(self, budget: int) -> None:
        """Hold at most ``budget`` bytes; 0 stores nothing."""
        super().__init__(budget)
        self._tokens = self._refused = 0

    def put(self, tokens: Sequence[int], snapshot: Snapshot) -> bool:
        """Store the state after ``tokens`` (:attr:`~edge_dflash.pictures.pictured.Pictured.identities`).

        The caller must not write to its arrays any more. False, and nothing stored or dropped, when it is larger than
        the budget. Raises ValueError when the snapshot holds another number of tokens.
        """
        if snapshot.length != len(tokens) or not tokens:
            raise ValueError(f"a snapshot of {snapshot.length} tokens cannot stand for a prefix of {len(tokens)}")
        key = _key(tokens)
        with self._lock:
            kept = self._keep(key, snapshot, len(key) + sum(array.nbytes for array in snapshot.arrays.values()))
            self._refused += not kept
            return kept

    def longest(self, tokens: Sequence[int], *, longer_than: int = 0, counted: bool = True) -> Snapshot | None:
        """The snapshot of the longest stored prefix of ``tokens`` (up to all of them), or None.

        With ``longer_than``, only a prefix of more tokens is of use. ``counted``: whether it counts in the statistics.
        """
        wanted = _key(tokens)
        with self._lock:
            found = (key for key, entry in self._entries.items() if entry.length > longer_than)
            key = max((key for key in found if wanted.startswith(key)), key=len, default=None)
            if key is None:
                self._misses += counted and longer_than == 0
                return None
            self._entries.move_to_end(key)
            self._hits += counted
            self._tokens += self._entries[key].length * counted
            return self._entries[key]

    def __contains__(self, tokens: Sequence[int]) -> bool:
        with self._lock:
            return _key(tokens) in self._entries

    @property
    def stats(self) -> PrefixStats:
        """Figures of this moment."""
        with self._lock:
            return PrefixStats(**self._figures(), tokens=self._tokens, refused=self._refused)


def _key(tokens: Sequence[int]) -> bytes:
    """Identities as int64: one sequence begins with another exactly when its bytes do."""
    return np.asarray(tokens, dtype=np.int64).tobytes()
