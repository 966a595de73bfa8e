"""The order of waiting requests: by priority, in turns among callers, and nobody waits for ever.

Knows no threads and no jobs; the scheduler owns one and guards it with its lock.

A *line* is what one caller has waiting at one priority, first come first served. The next item is the head of the line
with the highest rank, and among equal ranks that of the caller who was served longest ago. A line's rank is its
priority plus one for every ``patience`` times that another line was served while its head waited. Only heads
age: a caller with many requests waiting gains nothing by them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edge_dflash.errors import QueueFullError

T = TypeVar("T")

PATIENCE = 8  # times passed over until a waiting head rises by one priority
REMEMBERED = 1024  # callers whose last turn is kept


@dataclass
class _Line(Generic[T]):
    priority: int
    caller: str
    number: int  # of the line's making: older lines first, where nothing else decides
    items: deque[T] = field(default_factory=deque)
    passed: int = 0  # times that another line was served while the head waited


class FairQueue(Generic[T]):
    """A bounded queue. Not thread-safe."""

    def __init__(self, limit: int, limit_per_caller: int, patience: int = PATIENCE) -> None:
        """Hold at most ``limit`` items, of one caller at most ``limit_per_caller``."""
        if min(limit, limit_per_caller, patience) < 1:
            raise ValueError(f"limits are {limit} and {limit_per_caller}, patience is {patience}; wanted at least 1")
        self._limit = limit
        self._limit_per_caller = limit_per_caller
        self._patience = patience
        self._lines: dict[tuple[int, str], _Line[T]] = {}
        self._turns: dict[str, int] = {}  # caller -> number of its last turn, longest ago first
        self._turn = 0
        self._made = 0

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())

    def __iter__(self) -> Iterator[T]:
        """Items line by line, not in the order of service."""
        return (item for line in self._lines.values() for item in line.items)

    def push(self, item: T, priority: int, caller: str) -> None:
        """Queue an item behind what its caller has waiting at its priority.

        Raises QueueFullError, naming the limit, and TypeError for a priority that lines cannot be ordered by.
        """
        if not isinstance(priority, int):
            raise TypeError(f"priority is {priority!r}; wanted an int")
        own = sum(len(line.items) for line in self._lines.values() if line.caller == caller)
        if own >= self._limit_per_caller:
            raise QueueFullError(
                f"caller {caller!r} has {own} requests waiting, the limit for one caller is {self._limit_per_caller}; "
                "wait for one of them to end, or cancel one, and send this again"
            )
        if (waiting := len(self)) >= self._limit:
            raise QueueFullError(
                f"{waiting} requests are waiting, the limit is {self._limit}; "
                "send this again when some have ended, or open the engine with a longer queue"
            )
        key = (priority, caller)
        if key not in self._lines:
            self._made += 1
            self._lines[key] = _Line(priority, caller, self._made)
        self._lines[key].items.append(item)

    def pop(self, above: int | None = None) -> T:
        """Take the next item, of those with a priority ``above`` that if it is given. Raises IndexError without one."""
        lines = [line for line in self._lines.values() if above is None or line.priority > above]
        if not lines:
            raise IndexError("the queue is empty" if above is None else f"nothing waits with a priority above {above}")
        line = max(lines, key=self._precedence)
        item = line.items.popleft()
        for other in self._lines.values():
            other.passed += 1
        line.passed = 0
        self._turn += 1
        self._turns.pop(line.caller, None)
        self._turns[line.caller] = self._turn
        if len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        self._drop_empty(line)
        return item

    def remove(self, item: T) -> bool:
        """Take an item out of its line; False when it is not waiting."""
        for line in self._lines.values():
            if item in line.items:
                if line.items[0] is item:
                    line.passed = 0
                line.items.remove(item)
                self._drop_empty(line)
                return True
        return False

    def _precedence(self, line: _Line[T]) -> tuple[int, int, int]:
        rank = line.priority + line.passed // self._patience
        return rank, -self._turns.get(line.caller, 0), -line.number

    def _drop_empty(self, line: _Line[T]) -> None:
        if not line.items:
            del self._lines[line.priority, line.caller]
