"""The queue of requests: by priority, then fairly among callers, then by deadline and arrival; bounded for each.

Fair queueing: a caller has been served so many times, one that comes new counts as served once more
than who was served last, and the caller with the lowest count is next. So a flood of one caller, or of made-up names,
delays another's request by no more than one of each of them. A caller named ``account/name`` is one of several of an
account: accounts take turns, then the callers of one; any other caller is an account by itself.

Where a bound is reached, a request goes in all the same if a less urgent one waits there, which is evicted: the lowest
priority, of the account that has most waiting the youngest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Generic, Protocol, TypeVar

from edge_dflash.errors import QueueFullError

REMEMBERED = 1024  # callers and accounts whose counts are kept


class Waiting(Protocol):
    """What the queue reads of a request."""

    priority: int  # higher ones go first
    caller: str  # perhaps account/name
    deadline: float | None  # time.perf_counter() by which it has to end


T = TypeVar("T", bound=Waiting)


class Queue(Generic[T]):
    """Requests that wait. Not thread-safe: the engine's lock guards it."""

    def __init__(self, limit: int) -> None:
        """Hold at most ``limit`` requests: of one caller a half, of one account three quarters, at least one each."""
        self._limit, self._of_caller = limit, max(1, limit // 2)
        self._of_account = max(self._of_caller, limit - max(1, limit // 4))
        self._waiting: dict[T, int] = {}  # number of its arrival
        self._arrivals = count()
        self._served: dict[Hashable, int] = {}  # requests served of each account, and of each caller in its account
        self._last: dict[Hashable, int] = {}  # of the account served last, and of each account's caller served last

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        """Requests in the order of their arrival."""
        return iter(self._waiting)

    def push(self, request: T) -> T | None:
        """Queue a request; returns the request that it evicts. Raises QueueFullError, naming the limit."""
        evicted = self.check(request.priority, request.caller)
        if evicted is not None:
            del self._waiting[evicted]
        for group, member in _memberships(request.caller):
            self._served[member] = max(self._served.get(member, 0), self._last.get(group, -1) + 1)
        self._waiting[request] = next(self._arrivals)
        if len(self._served) > REMEMBERED:
            self._forget()
        return evicted

    def check(self, priority: int, caller: str) -> T | None:
        """The request that one of this priority would evict; None: there is room. Raises as :meth:`push` does."""
        account = _account(caller)
        for waiting, limit, whose in (
            ([one for one in self if one.caller == caller], self._of_caller, f"caller {caller!r}"),
            ([one for one in self if _account(one.caller) == account], self._of_account, f"account {account!r}"),
            (list(self), self._limit, ""),
        ):
            if len(waiting) < limit:
                continue
            lowest = min(waiting, key=self._eviction)
            if lowest.priority >= priority:
                raise _full(len(waiting), limit, whose)
            return lowest
        return None

    def pop(self, above: float = -math.inf) -> T | None:
        """Take the next request with a priority ``above`` that; None without one."""
        if (one := min(self, key=self._order, default=None)) is None or one.priority <= above:
            return None
        del self._waiting[one]
        for group, member in _memberships(one.caller):
            self._last[group] = self._served[member]
            self._served[member] += 1
        if not self._waiting:
            self._forget()
        return one

    def remove(self, request: T) -> bool:
        """Take a request out; False when it does not wait."""
        return self._waiting.pop(request, None) is not None

    def _order(self, request: T) -> tuple[float, ...]:
        """The request with the lowest is next."""
        (_, account), (_, caller) = _memberships(request.caller)
        within = self._served[caller] if "/" in request.caller else 0  # other accounts take turns with accounts
        deadline = math.inf if request.deadline is None else request.deadline
        return -request.priority, self._served[account], within, deadline, self._waiting[request]

    def _eviction(self, request: T) -> tuple[int, int, int]:
        """The request with the lowest is evicted first."""
        of_account = sum(_account(other.caller) == _account(request.caller) for other in self)
        return request.priority, -of_account, -self._waiting[request]

    def _forget(self) -> None:
        """Forget the counts of those that have nothing waiting."""
        kept = {key for one in self for pair in _memberships(one.caller) for key in pair}
        self._served = {key: served for key, served in self._served.items() if key in kept}
        self._last = {key: served for key, served in self._last.items() if key in kept}


def _account(caller: str) -> str:
    return caller.partition("/")[0] or caller


def _memberships(caller: str) -> tuple[tuple[Hashable, Hashable], tuple[Hashable, Hashable]]:
    """Among whom a caller takes turns, and as whom: its account among all, it itself in its account."""
    account = _account(caller)
    return ("", (account,)), ((account,), (account, caller))


def _full(waiting: int, limit: int, whose: str) -> QueueFullError:
    """``whose`` limit it is; "": that of the queue."""
    if whose:
        return QueueFullError(
            f"{whose} has {waiting} requests waiting, the limit for one {whose.partition(' ')[0]} is {limit}; "
            "wait for one of them to end, or cancel one, and send this again"
        )
    return QueueFullError(
        f"{waiting} requests are waiting, the limit is {limit}; "
        "send this again when some have ended, or open the engine with a longer queue"
    )
