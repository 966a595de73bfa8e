"""The device of a module's tests; those that measure times have it to themselves, whatever the number of workers."""

import fcntl
from contextlib import contextmanager
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[2] / "build"  # git-ignored


@contextmanager
def turn(folder, *, alone):
    """Hold the device beside others, or without them. Who waits to be alone lets nobody else begin."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "gpu-gate.lock").open("w") as gate, (folder / "gpu.lock").open("w") as device:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="module")
def device():
    from native_state_support import Device, threads
    from torch import set_num_threads

    set_num_threads(threads(8))
    return Device()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test in its turn: marked ``alone``, with no other beside it."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with turn(LOCKS, alone=item.get_closest_marker("alone") is not None):
        return (yield)
