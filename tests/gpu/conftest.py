"""The device of a module's tests; those that measure times have it to themselves, whatever the number of workers."""

from pathlib import Path

import pytest
from turns import turn

LOCKS = Path(__file__).parents[2] / "build"  # git-ignored


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
