"""Tests that measure times have the device to themselves, whatever the number of workers."""

from pathlib import Path

import pytest
from turns import turn

LOCKS = Path(__file__).parents[2] / "build"  # git-ignored


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run a test in its turn: marked ``alone``, with no other beside it."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with turn(LOCKS, alone=item.get_closest_marker("alone") is not None):
        return (yield)
