from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.errors import QueueFullError
from edge_dflash.scheduler import queue
from edge_dflash.scheduler.queue import FairQueue


def drain(q):
    return [q.pop() for _ in range(len(q))]


def test_callers_of_one_priority_take_turns():
    q = FairQueue(100, 100)
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        q.push(item, 0, item[0])
    assert sorted(q) == ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert drain(q) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_caller_whose_line_was_empty_for_a_moment_does_not_go_first_again():
    q, served = FairQueue(100, 100), []
    for number in range(3):
        q.push(f"b{number}", 0, "b")
    for number in range(3):
        q.push(f"a{number}", 0, "a")
        served += [q.pop(), q.pop()]
    assert served == ["b0", "a0", "b1", "a1", "b2", "a2"]


def test_higher_priorities_go_first():
    q = FairQueue(100, 100, patience=50)
    for item, priority in (("low", -1), ("mid", 0), ("high", 7), ("mid2", 0)):
        q.push(item, priority, "a")
    assert drain(q) == ["high", "mid", "mid2", "low"]


@pytest.mark.parametrize(("patience", "gap"), [(1, 3), (4, 2), (8, 1)])
def test_who_waits_rises_by_one_priority_each_time_its_patience_ends(patience, gap):
    q = FairQueue(1000, 1000, patience)
    q.push("low", 0, "low")
    served = []
    for number in range(100):
        q.push(number, gap, f"caller {number}")
        served.append(q.pop())
        if served[-1] == "low":
            break
    assert patience * gap <= len(served) - 1 <= patience * (gap + 1)


def test_many_waiting_requests_do_not_age_past_another_callers_only_one():
    q = FairQueue(1000, 1000, patience=2)
    for number in range(100):
        q.push(("flood", number), 0, "flood")
    for _ in range(20):
        q.pop()
    q.push(("single", 0), 0, "single")
    assert ("single", 0) in [q.pop(), q.pop()]


def test_removing():
    q = FairQueue(100, 100)
    for item in ("a1", "a2", "b1"):
        q.push(item, 0, item[0])
    assert q.remove("a1")
    assert not q.remove("a1")
    assert drain(q) == ["a2", "b1"]
    assert not q.remove("b1")
    with pytest.raises(IndexError, match="the queue is empty"):
        q.pop()


def test_who_moves_up_by_a_removal_has_not_waited_yet():
    q, served = FairQueue(100, 100, patience=2), []
    for item in ("a1", "a2", "a3"):
        q.push(item, 0, "a")
    for number in range(5):
        q.push(number, 1, str(number))  # a new caller each time, who has not waited either
        served.append(q.pop())
        if number == 1:
            assert q.remove("a1")
        if number == 2:
            assert q.remove("a3")  # not the head: nothing changes for a2
    assert served == [0, 1, 2, 3, "a2"]


def test_limits():
    q = FairQueue(3, 2)
    q.push(1, 0, "a")
    q.push(2, 5, "a")
    with pytest.raises(QueueFullError, match="caller 'a' has 2 requests waiting, the limit for one caller is 2"):
        q.push(3, 9, "a")
    q.push(3, 0, "b")
    with pytest.raises(QueueFullError, match="3 requests are waiting, the limit is 3"):
        q.push(4, 9, "c")
    q.pop()
    q.push(4, 9, "c")
    assert len(q) == 3
    for limits in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="wanted at least 1"):
            FairQueue(*limits)


def test_turns_of_callers_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(queue, "REMEMBERED", 5)
    q = FairQueue(10, 10)
    for number in range(50):
        q.push(number, 0, str(number))
        q.pop()
    assert len(q._turns) == 5


OPS = st.lists(st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(0, 9)), max_size=120)


@settings(deadline=None)
@given(OPS, st.integers(1, 5))
def test_nothing_is_lost_lines_are_in_order_and_waiting_is_bounded(ops, patience):
    q, waiting, number = FairQueue(1000, 1000, patience), {}, 0
    taken, passed = [], {}

    def take():
        item = q.pop()
        (priority, caller, _), line = item, waiting[item[0], item[1]]
        assert line.pop(0) == item  # first come, first served within a line
        if not line:
            del waiting[priority, caller]
        taken.append(item)
        passed[priority, caller] = 0
        for key in waiting.keys() - {(priority, caller)}:
            passed[key] = passed.get(key, 0) + 1
            # bound: five priorities to climb, and a turn of each of the 20 lines at every level
            assert passed[key] <= 5 * patience + 20 * patience

    for caller, priority, action in ops:
        if action < 6:
            item = (priority, caller, number := number + 1)
            q.push(item, priority, caller)
            waiting.setdefault((priority, caller), []).append(item)
            passed.setdefault((priority, caller), 0)
        elif waiting:
            take()
        assert len(q) == sum(map(len, waiting.values()))
    while waiting:
        take()
    assert sorted(item[2] for item in taken) == list(range(1, number + 1))
