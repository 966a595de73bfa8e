"""A native backend whose target has experts, without a device: its budget, its launches, what benchmarks force."""

from dataclasses import replace

import numpy as np
import pytest
from control_gpu import ControlGpu
from native_support import NATIVE_PAIR, formats_of, random_store
from store_weights import StoreWeights

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda import loading
from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.bench.device import experts_read, force_experts
from edge_dflash.decode.backend import Asked, Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.specs import ExpertsSpec

SPEC = ExpertsSpec(10, 3, 32, 64, True)
LAYERS = NATIVE_PAIR.target.num_layers


def pair(spec=SPEC):
    target = replace(NATIVE_PAIR.target, architecture="qwen3_5_moe", experts=spec, intermediate_size=0)
    return replace(NATIVE_PAIR, target=target)


def load(monkeypatch, gpu, spec=SPEC, form="nvfp4", **others):
    formats = formats_of(form, pair(spec), mlp__gate="bf16", shared_expert_gate="bf16", **others)
    weights = StoreWeights(random_store(formats, pair(spec)), formats)
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    state = Precision("bfloat16", "fp8")
    return NativeBackend(pair(spec), weights, state, cubin=lambda unit: b"", max_context=128, prefill_chunk=16)


@pytest.mark.parametrize("form", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("shared", [None, 32, 64])
def test_the_budget_counts_everything_that_loading_takes(monkeypatch, shared, form):
    spec = replace(SPEC, shared_intermediate=shared)

    def load_in(free):
        gpu = ControlGpu()
        gpu.free = free
        return load(monkeypatch, gpu, spec, form), gpu

    backend, gpu = load_in(1 << 40)
    total = sum(backend.budget.values())
    assert sum(gpu.sizes) == total
    assert backend.budget["experts"] > 0
    least = total + loading._SLACK
    load_in(least)
    with pytest.raises(BackendError, match="the pair needs"):
        load_in(least - 1)


def test_every_layer_runs_its_experts_in_every_pass_of_the_target(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    for run, times in ((lambda: backend.prefill([1] * 8), 1), (lambda: backend.cycle(Asked(1)), 1)):
        del gpu.launches[:]
        run()
        assert gpu.launches.count("experts_sum") == times * LAYERS
    del gpu.launches[:]
    backend.reset()
    backend.propose(1)
    assert "experts_sum" not in gpu.launches
    assert backend.shape.varying
    assert experts_read(backend) == 0


def test_up_and_down_may_have_formats_of_their_own_and_the_experts_of_a_layer_one(monkeypatch):
    load(monkeypatch, ControlGpu(), down_proj="fp8")
    with pytest.raises(BackendError, match="read the experts of a layer, its shared one with them, in one format"):
        load(monkeypatch, ControlGpu(), experts__3__gate_proj="fp8")


def test_what_the_kernels_do_not_take_is_refused_before_anything_is_loaded(monkeypatch):
    gpu = ControlGpu()
    with pytest.raises(BackendError, match="a row chooses 17 of 20 experts"):
        load(monkeypatch, gpu, replace(SPEC, count=20, chosen=17))
    assert gpu.allocations == 0


def test_experts_are_forced_by_a_table_of_different_ones(monkeypatch):
    gpu = ControlGpu()
    backend = load(monkeypatch, gpu)
    before = backend.graphs[1].greedy
    force_experts(backend, np.array([[0, 1, 2], [9, 4, 3]], np.int32))
    assert backend.graphs[1].greedy is not before
    for bad in ([[0, 1]], [[0, 1, 1]], [[0, 1, 10]], [[-1, 1, 2]]):
        with pytest.raises(BackendError, match=r"forced experts are not \[positions, 3\] different ones of 10"):
            force_experts(backend, np.array(bad, np.int32))
    force_experts(backend, None)


def test_a_dense_pair_has_no_experts_to_force(monkeypatch):
    monkeypatch.setattr(native_backend, "Gpu", ControlGpu)
    weights = StoreWeights(random_store(formats_of()), formats_of())
    state = Precision("bfloat16", "fp8")
    backend = NativeBackend(NATIVE_PAIR, weights, state, cubin=lambda unit: b"", max_context=128, prefill_chunk=16)
    assert experts_read(backend) == 0
    assert not backend.shape.varying
    with pytest.raises(BackendError, match="has no experts on this backend"):
        force_experts(backend, np.zeros((1, 1), np.int32))
