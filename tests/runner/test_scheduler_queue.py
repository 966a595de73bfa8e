from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_dflash.errors import QueueFullError
from edge_dflash.runner import queue
from edge_dflash.runner.queue import FairQueue


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
        q.push(3, 0, "a")
    q.push(3, 0, "b")
    with pytest.raises(QueueFullError, match="3 requests are waiting, the limit is 3"):
        q.push(4, 0, "c")
    q.pop()
    q.push(4, 0, "c")
    assert len(q) == 3
    for limits in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="wanted at least 1"):
            FairQueue(*limits)


def test_an_urgent_item_displaces_the_youngest_of_the_lowest():
    q = FairQueue(4, 3)
    for item, priority in (("a1", 0), ("a2", 0), ("a3", -5), ("b1", -5)):
        q.push(item, priority, item[0])
    assert q.push("c1", 9, "c") == "a3"  # as low as b1, and a has more
    assert q.push("c2", 9, "c") == "b1"
    assert q.push("c3", 9, "c") == "a2"
    with pytest.raises(QueueFullError, match="3 requests waiting, the limit for one caller is 3"):
        q.push("c4", 9, "c")
    assert q.push("c4", 10, "c") == "c3"  # its own, where its share is full
    with pytest.raises(QueueFullError, match="4 requests are waiting, the limit is 4"):
        q.push("d1", 0, "d")
    assert drain(q) == ["c4", "c1", "c2", "a1"]


def test_who_rose_by_waiting_is_displaced_by_what_goes_before_it_only():
    q = FairQueue(2, 2, patience=2)
    q.push("low", 0, "a")
    for number in range(4):
        q.push(number, 5, str(number))
        assert q.pop() == number
    q.push("low2", 0, "a")  # behind the head, it has not risen
    assert q.push("two", 2, "b") == "low2"
    with pytest.raises(QueueFullError):
        q.push("two2", 2, "c")  # low counts as 2 now
    assert q.push("three", 3, "c") == "two"
    assert drain(q) == ["three", "low"]


def test_an_account_has_a_share_and_its_turn_whatever_names_it_makes_up():
    q = FairQueue(8, 4, per_account=6)
    for number in range(6):
        q.push(("x", number), 0, f"x/{number}")
    with pytest.raises(QueueFullError, match="account 'x' has 6 requests waiting, the limit for one account is 6"):
        q.push(("x", 6), 0, "x/6")
    q.push(("y", 0), 0, "y")
    q.push(("y", 1), 0, "y")
    assert drain(q) == [("x", 0), ("y", 0), ("x", 1), ("y", 1), *(("x", number) for number in range(2, 6))]


def test_work_of_the_engine_takes_no_place():
    q = FairQueue(2, 1)
    q.push("a", 0, "a")
    q.push("b", 0, "b")
    assert q.push("work", 100, None) is None
    assert len(q) == 3
    assert q.push("c", 50, "c") == "b"
    assert drain(q) == ["work", "c", "a"]


def test_turns_of_callers_that_are_gone_are_forgotten(monkeypatch):
    monkeypatch.setattr(queue, "REMEMBERED", 5)
    q = FairQueue(10, 10)
    for number in range(50):
        q.push(number, 0, str(number))
        q.pop()
    assert len(q._turns) == 5


OPS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-2, 2), st.integers(0, 9)), max_size=120)


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


CALLERS = st.sampled_from(["a", "b", "x/1", "x/2", "x/3", "x/4"])


@given(st.lists(st.tuples(CALLERS, st.integers(-2, 2), st.integers(0, 9)), max_size=120))
def test_every_bound_holds_and_what_gives_way_is_less_urgent(ops):
    q, inside, number = FairQueue(8, 4, 3, per_account=6), set(), 0
    for caller, priority, action in ops:
        item = (caller, priority, number := number + 1)
        if action > 7 and inside:
            inside.remove(q.pop())
            continue
        try:
            displaced = q.push(item, priority, caller)
        except QueueFullError:
            assert item not in set(q)
        else:
            inside.add(item)
            if displaced is not None:
                inside.remove(displaced)
                assert displaced[1] < priority
        assert set(q) == inside
        assert len(inside) <= 8
        assert sum(one[0].startswith("x/") for one in inside) <= 6
        assert all(sum(one[0] == name for one in inside) <= 4 for name in "ab")
    if len(inside) == 8:
        assert q.push(("new", 100, 0), 100, "new") in inside
