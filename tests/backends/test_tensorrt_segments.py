"""Our kernels in the place of engines (tests/gpu/engine_schedule_support.py) enqueue every op once."""

import pytest
from control_gpu import ControlGpu
from engine_schedule_support import scheduled_backend
from store_weights import StoreWeights
from tensorrt_support import Formatted, programs_of, runs, spec, units

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Add, Linear, RmsNorm, SwiGlu

LAUNCHES = {RmsNorm: "rms_norm", Add: "add_columns", SwiGlu: "gate_columns"}


@pytest.fixture
def backend(monkeypatch):
    gpu = ControlGpu()
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    store, pair = Formatted("demo", "w4a16"), spec("demo")
    weights = StoreWeights(store, {name: store.get(name).format for name in pair_programs(pair).weights})
    return scheduled_backend(pair, weights, Precision(), lambda unit: b"", max_context=256, prefill_chunk=64)


@pytest.mark.parametrize("which", ["prefill", "verify", "propose"])
def test_every_dense_op_is_launched_once(backend, which):
    graph = backend.graphs[1].prefill if which == "prefill" else getattr(backend.graphs[1], which)
    graph = graph.of(backend.shape.verify_rows) if which == "verify" else graph
    names = [name for name, _ in graph.calls]
    ops = programs_of("demo")[which].ops
    for kind, launch in LAUNCHES.items():
        assert names.count(launch) == sum(isinstance(op, kind) for op in ops)
    linears = [name for name in names if name.startswith("linear_") and not name.endswith("greedy")]
    assert len(linears) == sum(isinstance(op, Linear) for op in ops)


def test_plans_run_in_the_order_of_the_tensorrt_schedule(backend):
    for which, each in backend.loaded.passes.items():
        wanted = [step.key for step in runs(units("demo"), which)]
        assert [step.key for step in each.schedule.steps if step in each.steps] == wanted
