"""The order of waiting requests: by priority, in turns among callers, and nobody waits for ever.

The worker owns one and guards it with its lock.

A *line* is what one caller has waiting at one priority, first come first served. The next item is the head of the line
with the highest rank, and among equal ranks that of the account, then the caller, served longest ago. A line's rank is
its priority plus one for every ``patience`` times that another line was served while its head waited. Only heads
age: a caller with many requests waiting gains nothing by them.

A caller named ``account/name`` is one of several of an account; any other is an account by itself. Caller, account and
queue are bounded. Where a bound is reached, an item goes in all the same if one of lower rank waits there: the lowest
is *displaced*, of the account that has most waiting, the youngest. So urgent items always find a place, and a caller
with many items displaces its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from edge_dflash.errors import QueueFullError

T = TypeVar("T")

PATIENCE = 8  # times passed over until a waiting head rises by one priority
REMEMBERED = 1024  # callers whose last turn is kept


def shares(limit: int) -> tuple[int, int]:
    """Of a queue of this length, the places that one caller can take, and one account: a half, and three quarters."""
    caller = max(1, limit // 2)
    return caller, max(caller, limit - max(1, limit // 4))


@dataclass
class _Line(Generic[T]):
    priority: int
    caller: str | None
    number: int  # of the line's making: older lines first, where nothing else decides
    items: dict[int, T] = field(default_factory=dict)  # by the number of their coming, the oldest first
    passed: int = 0  # times that another line was served while the head waited

    @property
    def account(self) -> str:
        return account(self.caller or "")


def account(caller: str) -> str:
    """The account of a caller."""
    return caller.partition("/")[0] or caller


class FairQueue(Generic[T]):
    """A bounded queue. Not thread-safe."""

    def __init__(self, limit: int, per_caller: int, patience: int = PATIENCE, per_account: int | None = None) -> None:
        """Hold at most ``limit`` items, of a caller ``per_caller``, of an account ``per_account`` (None: ``limit``)."""
        if min(limit, per_caller, patience) < 1:
            raise ValueError(f"limits are {limit} and {per_caller}, patience is {patience}; wanted at least 1")
        self._limit = limit
        self._per_caller = per_caller
        self._per_account = limit if per_account is None else per_account
        self._patience = patience
        self._lines: dict[tuple[int, str | None], _Line[T]] = {}
        self._turns: dict[tuple[str, ...], int] = {}  # account, or account and caller -> number of its last turn
        self._turn = 0
        self._made = 0

    def __len__(self) -> int:
        return sum(len(line.items) for line in self._lines.values())

    def __iter__(self) -> Iterator[T]:
        """Items line by line, not in the order of service."""
        return (item for line in self._lines.values() for item in line.items.values())

    def push(self, item: T, priority: int, caller: str | None) -> T | None:
        """Queue an item behind what its caller has waiting at its priority; returns the item that it displaces.

        ``caller`` None takes no place, displaces nothing and is never displaced. Raises QueueFullError, naming the
        limit, and TypeError for a priority that lines cannot be ordered by.
        """
        if not isinstance(priority, int):
            raise TypeError(f"priority is {priority!r}; wanted an int")
        self._made += 1
        line = self._lines.get((priority, caller)) or _Line(priority, caller, self._made)
        displaced = None if caller is None else self._make_room(priority, caller)
        self._lines[priority, caller] = line
        line.items[self._made] = item
        return displaced

    def check(self, priority: int, caller: str | None) -> None:
        """Raise QueueFullError where :meth:`push` would."""
        if caller is not None:
            self._lowest(priority, caller)

    def _make_room(self, priority: int, caller: str) -> T | None:
        """The item that gives its place to one of this priority; None: there is room. Raises QueueFullError."""
        if (lowest := self._lowest(priority, caller)) is None:
            return None
        _, item = lowest.items.popitem()
        self._drop_empty(lowest)
        return item

    def _lowest(self, priority: int, caller: str) -> _Line[T] | None:
        """The line whose youngest item is displaced by one of this priority; None: there is room."""
        lines = [line for line in self._lines.values() if line.caller is not None]
        mine = [line for line in lines if line.account == account(caller)]
        own = [line for line in mine if line.caller == caller]
        for bounded, limit, named in (
            (own, self._per_caller, f"caller {caller!r}"),
            (mine, self._per_account, f"account {account(caller)!r}"),
            (lines, self._limit, ""),
        ):
            if (waiting := sum(len(line.items) for line in bounded)) < limit:
                continue
            lowest = min(bounded, key=lambda line: self._displacement(line, lines))
            if self._tail_rank(lowest) >= priority:
                raise _full(waiting, limit, named)
            return lowest
        return None

    def _tail_rank(self, line: _Line[T]) -> int:
        """Rank of the youngest item of a line: only a head has risen."""
        return line.priority if len(line.items) > 1 else self._rank(line)

    def _displacement(self, line: _Line[T], lines: list[_Line[T]]) -> tuple[int, int, int]:
        """The line with the lowest of these gives up its youngest item first."""
        of_account = sum(len(other.items) for other in lines if other.account == line.account)
        return self._tail_rank(line), -of_account, -next(reversed(line.items))

    def pop(self, above: int | None = None) -> T:
        """Take the next item, of those with a priority ``above`` that if it is given. Raises IndexError without one."""
        lines = [line for line in self._lines.values() if above is None or line.priority > above]
        if not lines:
            raise IndexError("the queue is empty" if above is None else f"nothing waits with a priority above {above}")
        line = max(lines, key=self._precedence)
        item = line.items.pop(next(iter(line.items)))
        for other in self._lines.values():
            other.passed += 1
        line.passed = 0
        self._turn += 1
        for turn in _turns_of(line):
            self._turns.pop(turn, None)
            self._turns[turn] = self._turn
        while len(self._turns) > REMEMBERED:
            del self._turns[next(iter(self._turns))]
        self._drop_empty(line)
        return item

    def remove(self, item: T) -> bool:
        """Take an item out of its line; False when it is not waiting."""
        for line in self._lines.values():
            for place, (number, waiting) in enumerate(line.items.items()):
                if waiting is item:
                    line.passed = line.passed if place else 0
                    del line.items[number]
                    self._drop_empty(line)
                    return True
        return False

    def _rank(self, line: _Line[T]) -> int:
        return line.priority + line.passed // self._patience

    def _precedence(self, line: _Line[T]) -> tuple[int, ...]:
        """The line with the highest is served next."""
        return self._rank(line), *(-self._turns.get(turn, 0) for turn in _turns_of(line)), -line.number

    def _drop_empty(self, line: _Line[T]) -> None:
        if not line.items:
            del self._lines[line.priority, line.caller]


def _turns_of(line: _Line[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Under what the turns of a line are counted: its account, and its caller."""
    return (line.account,), (line.account, line.caller or "")


def _full(waiting: int, limit: int, named: str) -> QueueFullError:
    """``named``: whose limit it is; "": that of the queue."""
    if named:
        return QueueFullError(
            f"{named} has {waiting} requests waiting, the limit for one {named.partition(' ')[0]} is {limit}; "
            "wait for one of them to end, or cancel one, and send this again"
        )
    return QueueFullError(
        f"{waiting} requests are waiting, the limit is {limit}; "
        "send this again when some have ended, or open the engine with a longer queue"
    )
