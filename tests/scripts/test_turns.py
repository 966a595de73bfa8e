"""Turns on a device: tests side by side, a test that is alone, and no test that overtakes it."""

import time
from contextlib import ExitStack
from threading import Event, Thread

from turns import turn


def waiting(folder, log, name, *, alone):
    """A thread that has a turn, and an event that ends it."""
    end = Event()

    def run():
        with turn(folder, alone=alone):
            log.append(name)
            end.wait(60)
            log.append(f"{name} ends")

    thread = Thread(target=run)
    thread.start()
    return thread, end


def there(log, count):
    """Wait for so many entries."""
    stop = time.monotonic() + 60
    while len(log) < count and time.monotonic() < stop:
        time.sleep(0.01)
    return list(log)


def test_who_is_alone_waits_for_others_and_is_not_overtaken(tmp_path):
    log = []
    with ExitStack() as stack:
        first, second = (waiting(tmp_path, log, name, alone=False) for name in ("a", "b"))
        for _, end in (first, second):
            stack.callback(end.set)
        assert sorted(there(log, 2)) == ["a", "b"]
        alone = waiting(tmp_path, log, "alone", alone=True)
        time.sleep(0.2)  # it waits
        late = waiting(tmp_path, log, "late", alone=False)
        time.sleep(0.2)
        assert len(log) == 2
        for _, end in (first, second):
            end.set()
        assert there(log, 5)[4] == "alone"
        time.sleep(0.1)
        assert len(log) == 5
        alone[1].set(), late[1].set()
        assert there(log, 8)[5:] == ["alone ends", "late", "late ends"]
    for thread, _ in (first, second, alone, late):
        thread.join(60)
