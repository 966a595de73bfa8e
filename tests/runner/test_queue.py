"""The queue: order, turns of callers and accounts, bounds, and what is evicted."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.errors import QueueFullError
from edge_dflash.runner import queue
from edge_dflash.runner.queue import Queue


@dataclass(eq=False)
class One:
    name: str
    priority: int = 0
    caller: str = ""
    deadline: float | None = None


def queued(limit, *items):
    q = Queue(limit)
    for name, *rest in items:
        q.push(One(name, *rest))
    return q


def names(q):
    return [q.pop().name for _ in range(len(q))]


@pytest.mark.parametrize(
    ("items", "order"),
    [
        ("a1 a2 a3 b1 b2 c1", "a1 b1 c1 a2 b2 a3"),
        ("x/1 x/2 x/3 y1 y2", "x/1 y1 x/2 y2 x/3"),  # accounts take turns
        ("x/p:1 x/p:2 x/p:3 x/q:1 x/q:2", "x/p:1 x/q:1 x/p:2 x/q:2 x/p:3"),  # and the callers of one
    ],
)
def test_callers_of_one_priority_take_turns(items, order):
    def caller(name):
        return name.partition(":")[0] if "/" in name else name[0]

    assert " ".join(names(queued(100, *((name, 0, caller(name)) for name in items.split())))) == order


def test_higher_priorities_go_first_then_the_earlier_deadline_of_a_caller_then_who_came_first():
    items = [("low", -1), ("late", 0, "", 9.0), ("mid", 0), ("soon", 0, "", 5.0), ("high", 7), ("mid2", 0)]
    assert names(queued(100, *items)) == ["high", "soon", "late", "mid", "mid2", "low"]
    deadlines = [("a1", 0, "a", 1.0), ("a2", 0, "a", 2.0), ("b", 0, "b")]
    assert names(queued(100, *deadlines)) == ["a1", "b", "a2"]  # no deadline takes another caller's turn


def test_a_caller_whose_line_was_empty_for_a_moment_does_not_go_first_again():
    q, served = queued(100, *((f"b{number}", 0, "b") for number in range(3))), []
    for number in range(3):
        q.push(One(f"a{number}", 0, "a"))
        served += [q.pop().name, q.pop().name]
    assert served == ["b0", "a0", "b1", "a1", "b2", "a2"]


@pytest.mark.parametrize(
    "names_of", [lambda number: "flood", lambda number: f"new {number}", lambda number: f"x/{number}"]
)
def test_no_flood_delays_another_callers_request_by_more_than_a_turn_of_each(names_of):
    q, served = Queue(1000), [""]
    for number in range(40):
        q.push(One("flood", 0, names_of(number)))
        if number == 20:
            q.push(One("before", 0, "single"))
    while served[-1] != "before":  # it has had its turn as often as the others
        served.append(q.pop().name)
    q.push(One("single", 0, "single"))
    served.clear()
    for number in range(100):  # it goes on while the other waits
        q.push(One("flood", 0, names_of(100 + number)))
        served.append(q.pop().name)
    assert served.index("single") <= 20


def test_what_was_cancelled_costs_its_caller_no_turn():
    q = queued(100, ("b1", 0, "b"), ("b2", 0, "b"))
    gone = [One("gone", 0, "a") for _ in range(9)]
    for one in gone:
        q.push(one)
    assert all(q.remove(one) for one in gone)
    assert not q.remove(gone[0])
    q.push(One("a", 0, "a"))
    assert names(q) == ["b1", "a", "b2"]
    assert q.pop() is None


def test_only_what_is_more_urgent_is_taken_in_anothers_place():
    q = queued(9, ("low", 1), ("high", 3))
    assert q.pop(above=3) is None
    assert q.pop(above=2).name == "high"
    assert q.pop(above=1) is None
    assert q.pop().name == "low"


def test_limits():
    q = queued(4, ("a", 0, "a"), ("a", 5, "a"))
    with pytest.raises(QueueFullError, match="caller 'a' has 2 requests waiting, the limit for one caller is 2"):
        q.push(One("a", 0, "a"))
    q.push(One("b", 0, "b"))
    q.push(One("c", 0, "c"))
    with pytest.raises(QueueFullError, match="4 requests are waiting, the limit is 4"):
        q.push(One("d", 0, "d"))
    q.pop()
    q.push(One("d", 0, "d"))
    assert len(q) == 4
    account = queued(8, *(("x", 0, f"x/{number}") for number in range(6)))
    with pytest.raises(QueueFullError, match="account 'x' has 6 requests waiting, the limit for one account is 6"):
        account.push(One("x", 0, "x/6"))
    account.push(One("y", 0, "y"))
    assert Queue(1).push(One("a")) is None


def test_an_urgent_request_evicts_the_youngest_of_the_lowest():
    q = queued(6, ("a1", 0, "a"), ("a2", 0, "a"), ("a3", -5, "a"), ("b1", -5, "b"), ("b2", 3, "b"), ("d", 3, "d"))
    assert q.push(One("c1", 9, "c")).name == "a3"  # as low as b1, and a has more
    assert q.push(One("c2", 9, "c")).name == "b1"
    assert q.push(One("c3", 9, "c")).name == "a2"
    with pytest.raises(QueueFullError, match="3 requests waiting, the limit for one caller is 3"):
        q.push(One("c4", 9, "c"))
    assert q.check(10, "c").name == "c3"
    assert q.push(One("c4", 10, "c")).name == "c3"  # its own, where its share is full
    with pytest.raises(QueueFullError, match="6 requests are waiting, the limit is 6"):
        q.push(One("e1", 0, "e"))
    assert names(q) == ["c4", "c1", "c2", "b2", "d", "a1"]


def test_turns_of_callers_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(queue, "REMEMBERED", 8)
    q = queued(4, ("stays", -1, "stays"))
    for number in range(50):
        q.push(One("one", 0, str(number)))
        q.pop()
    assert len(q._served) <= 8
    assert len(q._last) <= 8
    q.pop()
    assert (q._served, q._last) == ({}, {})


CALLERS = st.sampled_from(["a", "b", "x/1", "x/2", "x/3", "x/4"])


@given(st.lists(st.tuples(CALLERS, st.integers(-2, 2), st.integers(0, 9)), max_size=120))
def test_nothing_is_lost_every_bound_holds_and_who_waits_is_served(ops):
    """Within a line first come, first served; none is passed over, at its priority, more often than that."""
    q, inside, passed = Queue(8), [], defaultdict(int)

    def take():
        one = q.pop()
        line = (one.priority, one.caller)
        assert one is next(other for other in inside if (other.priority, other.caller) == line)
        assert one.priority == max(other.priority for other in inside)
        inside.remove(one)
        passed[line] = 0
        for other in {(other.priority, other.caller) for other in inside} - {line}:
            passed[other] += other[0] == one.priority
            assert passed[other] <= 12

    for caller, priority, action in ops:
        if action > 7:
            if inside:
                take()
            continue
        one = One("", priority, caller)
        try:
            evicted = q.push(one)
        except QueueFullError:
            assert one not in set(q)
        else:
            inside.append(one)
            if evicted is not None:
                inside.remove(evicted)
                assert evicted.priority < priority
        assert list(q) == inside
        assert len(inside) <= 8
        assert sum(one.caller.startswith("x/") for one in inside) <= 6
        assert all(sum(one.caller == name for one in inside) <= 4 for name in ("a", "b", "x/1"))
    if len(inside) == 8:
        assert q.push(One("", 100, "new")) in inside
        return
    while inside:
        take()
