"""TensorRT's nested phases as one share."""

from types import SimpleNamespace

import pytest

from edge_dflash.backends.cuda.tensorrt.compile import Phases, monitor


def test_steps_of_inner_phases_are_parts_of_a_step_outside():
    phases = Phases()
    assert phases.share == 0
    phases.start("engine", 4)
    phases.step("engine", 0)
    assert phases.share == pytest.approx(1 / 4)
    phases.start("tactics", 2)
    phases.step("tactics", 0)
    assert phases.share == pytest.approx(1 / 4 + 1 / 8)
    phases.finish("tactics")
    assert phases.share == pytest.approx(3 / 8)  # never falls
    phases.step("engine", 3)
    assert phases.share == 1


def test_phases_that_are_not_known_or_have_no_steps_do_no_harm():
    phases = Phases()
    phases.step("nothing", 3)
    phases.finish("nothing")
    phases.start("empty", 0)
    phases.step("empty", 7)
    assert phases.share == 1


def test_the_monitor_tells_and_stops():
    told = []
    made = monitor(
        SimpleNamespace(IProgressMonitor=object_with_init()), lambda share: told.append(share) or len(told) < 2
    )
    made.phase_start("engine", None, 2)
    assert made.step_complete("engine", 0)
    assert not made.step_complete("engine", 1)
    made.phase_finish("engine")
    assert told == [0.5, 1.0]


def object_with_init():
    class Base:
        pass

    return Base
