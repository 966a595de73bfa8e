"""TensorRT's nested phases as one share."""

from types import SimpleNamespace

import pytest

from edge_dflash.backends.cuda.tensorrt.compile import monitor


def test_steps_of_inner_phases_are_parts_of_a_step_outside():
    told = []
    made = monitor(
        SimpleNamespace(IProgressMonitor=type("Base", (), {})), lambda share: told.append(share) or share < 1
    )
    assert made.step_complete("nothing", 3)
    made.phase_start("engine", None, 4)
    assert made.step_complete("engine", 0)
    made.phase_start("tactics", "engine", 2)
    assert made.step_complete("tactics", 0)
    made.phase_finish("tactics")
    assert made.step_complete("engine", 0)  # never falls
    made.phase_start("empty", "engine", 0)
    made.phase_finish("empty")
    assert not made.step_complete("engine", 3)
    assert told == pytest.approx([0, 1 / 4, 1 / 4 + 1 / 8, 1 / 4 + 1 / 8, 1])
