"""One plan, traced: how many calls lie between Planner.plan and the launch of its passes, and in how many files."""

import pytest
from control_gpu import ControlGpu, ReplayedGraph

from edge_dflash.planner import Planner
from tests.backends.test_native_backend import load
from tests.scripts.calls import Trace, report

CALLS, FILES = 6, 4  # the driver's launch is one of the calls, and its file not counted


@pytest.mark.parametrize(("what", "launches"), [("prefill", 0), ("cycle", 1)])
def test_a_plan_reaches_the_device_in_few_calls(monkeypatch, what, launches):
    """Frames of the caller's stack where the request is handed over, then those of the worker's at the launch."""
    left = [launches]

    def launched(frame, event, argument):
        if event == "call" and frame.f_code is ReplayedGraph.launch.__code__:
            left[0] -= 1
        return left[0] < 0

    backend, trace = load(monkeypatch, ControlGpu()), Trace("plan", launched)
    with trace.installed(), Planner(backend, None) as planner:
        trace.armed = True
        assert len(planner.plan([5, 6, 7], max_new_tokens=8).tokens) == 8
    print(f"Planner.plan to the launch of the {what}:")
    found = report(trace.chain)
    assert found["calls"] + 1 <= CALLS
    assert found["files"] <= FILES
