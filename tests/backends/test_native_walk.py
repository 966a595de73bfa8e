"""Drafters whose drafts depend on each other, without a device: what is taken, steps, kernels and their arguments."""

from dataclasses import replace

import numpy as np
import pytest
from control_gpu import ControlGpu
from native_support import NATIVE_PAIR, formats_of, random_store, write_native_bundle
from store_weights import StoreWeights

from edge_dflash.backends.cuda import backend as native_backend
from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.backends.cuda.kernels.walk import WalkBuffers, WalkShape
from edge_dflash.backends.cuda.memory import Allocator
from edge_dflash.backends.cuda.schedule import schedule
from edge_dflash.backends.cuda.steps import Convolve, Draft, Project
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.weights import BundleWeights
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Asked, Precision
from edge_dflash.decode.sampling import Sampling
from edge_dflash.errors import BackendError
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import GroupedConvSpec, MarkovSpec, SelectorSpec

KINDS = {
    "dflash2": {"kind": "dflash2", "conv": GroupedConvSpec(2, 16), "head": SelectorSpec(32, 16)},
    "vanilla": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("vanilla", 64, 32, "markov")},
    "gated": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("gated", 32)},
    "rnn": {"kind": "dspark", "anchor_drafts": True, "head": MarkovSpec("rnn", 32, 20, "hidden")},
    "anchor": {"kind": "dspark", "anchor_drafts": True},
}
BLOCK = NATIVE_PAIR.drafter.block_size


def pair(kind, **changes):
    return replace(NATIVE_PAIR, drafter=replace(NATIVE_PAIR.drafter, **KINDS[kind] | changes))


def load(monkeypatch, kind):
    gpu, made = ControlGpu(), pair(kind)
    formats = formats_of(pair=made)
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    weights, state = StoreWeights(random_store(formats, made), formats), Precision("bfloat16", "fp8")
    return gpu, NativeBackend(made, weights, state, cubin=lambda unit: b"", max_context=128, prefill_chunk=16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cycle_verifies_the_drafts_and_the_anchor(monkeypatch, kind):
    gpu, backend = load(monkeypatch, kind)
    rows = BLOCK + (kind != "dflash2")
    assert (backend.shape.block_size, backend.shape.verify_rows) == (BLOCK, rows)
    assert len(backend.propose(3)) == rows - 1
    assert len(backend.verify([1] * rows)) == rows
    backend.commit(rows)
    for sampling in (Sampling(), Sampling(0.7)):
        for drafts in (None, 2, 1):
            gpu.accept, count = rows, rows - 1 if drafts is None else drafts
            gpu.launches.clear()
            cycle = backend.cycle(Asked(5, sampling, drafts=drafts))
            assert (cycle.drafts, cycle.accepted, len(cycle.tokens)) == (count, count, count + 1)
            walks = [name for name in gpu.launches if name.startswith("walk_")]
            steps = rows - 1 if kind in ("gated", "rnn") else 1
            assert (walks.count("walk_rows"), walks.count("walk_mix")) == {
                "anchor": (0, 0), "gated": (steps, steps), "rnn": (steps, steps),
            }.get(kind, (1, 0))  # fmt: skip
            assert ("sample_choose" in gpu.launches) == (sampling.temperature > 0)
            assert gpu.launches.count("sample_choose") == (sampling.temperature > 0) * (1 + (kind == "anchor"))
            backend.commit(1)


def test_the_walk_is_asked_again_only_where_it_is_steered(monkeypatch):
    gpu, backend = load(monkeypatch, "dflash2")
    rows = backend.propose(3)
    gpu.launches.clear()
    assert rows.argmax() == [0] * (BLOCK - 1)
    assert gpu.launches == []
    assert rows.choose(Sampling(), 7, [None], 1) == [0]
    assert gpu.launches.count("walk_rows") == 1
    gpu.launches.clear()
    rows.argmax()
    rows.argmax()
    assert gpu.launches.count("walk_rows") == 1
    with pytest.raises(ValueError, match="2 choices from row 2 on were asked of 3 rows"):
        rows.choose(Sampling(), 7, [None] * 2, 2)
    assert rows.confidence() == []


@pytest.mark.parametrize("kind", ["dflash2", "gated"])
def test_a_bundle_gives_a_walk_its_weights_as_they_were(tmp_path, monkeypatch, kind):
    made, gpu = pair(kind), ControlGpu()
    store = write_native_bundle(tmp_path, formats_of(pair=made), made)
    weights, op = BundleWeights(Bundle.open(tmp_path)), pair_programs(made).propose.walk
    sent = []
    monkeypatch.setattr(gpu, "upload", lambda array: sent.append(array.copy()))
    for name in op.weights:
        if name.endswith(".bias"):
            assert np.array_equal(weights.vector(name), store[name].float32())
        else:
            weights.embedding(gpu, name)
            assert np.array_equal(sent[-1], store[name].data)
    assert len(sent) == 3
    monkeypatch.undo()
    monkeypatch.setattr(native_backend, "Gpu", lambda: gpu)
    state = Precision("bfloat16", "fp8")
    backend = NativeBackend(made, weights, state, cubin=lambda unit: b"", max_context=128, prefill_chunk=16)
    held = sum(2 * store[name].data.size for name in op.weights if not name.endswith(".bias"))
    assert held <= backend.budget["walk"] <= held + (64 << 10)


def test_convolutions_take_residual_and_norm_along():
    made = pair("dflash2")
    steps = schedule(pair_programs(made).propose, formats_of(pair=made), wide=False).steps
    found = [step for step in steps if isinstance(step, Convolve)]
    layers = made.drafter.num_layers
    assert [(len(step.reads), len(step.writes)) for step in found] == [(2, 1), (3, 2)] * 2 * layers
    assert all(len(step.reads) == 1 for step in steps if isinstance(step, Project))
    assert isinstance(steps[-1], Draft)
    assert steps[-1].first == 1


def test_what_the_kernels_do_not_take_is_refused():
    cases = [
        (pair("dflash2", head=SelectorSpec(20, 16)), "rank 20"),
        (pair("gated", block_size=32), "33 rows"),
    ]
    for made, message in cases:
        with pytest.raises(BackendError, match=message):
            check_native(made, formats_of(pair=made))
    op = pair_programs(pair("vanilla")).propose.walk
    for changes, vocabulary, message in (
        ({"top_k": None}, 5000, "all 5000 tokens"),
        ({"top_k": 300}, 5000, "at most 256"),
        ({"top_k": 200}, 500_000, "at most 132"),
    ):
        with pytest.raises(BackendError, match=message):
            WalkShape(replace(op, **changes), 7, 64, vocabulary)
    selector = pair_programs(pair("dflash2")).propose.walk
    with pytest.raises(BackendError, match="rank 768 over 31 rows of 16 candidates needs 102624 bytes of shared"):
        WalkShape(replace(selector, rank=768), 31, 5120, 248_320)


def test_a_walk_stages_its_candidates_and_keeps_little():
    selector = pair_programs(pair("dflash2")).propose.walk
    shape = WalkShape(replace(selector, rank=256), 7, 5120, 248_320)
    memory = Allocator(None)
    WalkBuffers.take(memory, shape)
    assert shape.staged
    assert memory.total < 1 << 20
