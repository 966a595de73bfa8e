"""The TensorRT backend's schedule on a GPU, with our kernels where engines would run: the native backend's results."""

from functools import cache

import numpy as np
import pytest
from engine_schedule_support import scheduled_backend
from native_backend_support import ENGINE, checkpoint, device_cubin, native, prompt, store
from store_weights import StoreWeights

from edge_dflash.checks.lossless import verify_lossless
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options

pytestmark = pytest.mark.gpu

CASES = (("demo", "nvfp4"), ("demo", "bf16"), ("hybrid", "mixed"))
NEW = 40


@cache
def scheduled(name, kind):
    pair, programs, _ = checkpoint(name)
    weights = StoreWeights(store(name, kind), {n: store(name, kind).get(n).format for n in programs.weights})
    return scheduled_backend(pair, weights, ENGINE, device_cubin, max_context=256, prefill_chunk=64)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_passes_give_the_native_backends_logits(name, kind):
    """Ops are fused in other ways, so values are rounded elsewhere; a wrong address or order gives errors near 1."""
    ours, theirs, ids = scheduled(name, kind), native(name, kind), prompt(name, 90)
    ours.reset(), theirs.reset()
    for method, argument in (("prefill", ids), ("propose", ids[0]), ("verify", ids[:16]), ("verify", ids[:3])):
        a, b = (getattr(backend, method)(argument).logits() for backend in (ours, theirs))
        assert a.shape == b.shape
        error = np.sqrt(np.square(a - b).mean() / np.square(b).mean())
        assert error < 0.1, (method, error)
        if name == "demo":  # trained: its largest logit stands out
            assert (a.argmax(1) == b.argmax(1)).mean() > 0.8, method


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_speculative_equals_plain_bit_for_bit(name, kind):
    result = verify_lossless(scheduled(name, kind), [prompt(name, 21), prompt(name, 70, seed=1)], max_new_tokens=NEW)
    assert result.ok, result.differences[:3]


def test_a_cycle_on_the_device_is_propose_verify_and_accept():
    backend, ids = scheduled("demo", "nvfp4"), prompt("demo", 30)
    backend.reset()
    anchor = backend.prefill(ids).argmax()[0]
    before = backend.snapshot()
    cycle = backend.cycle(Asked(anchor))
    backend.restore(before)
    drafts = backend.propose(anchor).argmax()
    choices = backend.verify([anchor, *drafts]).argmax()
    assert list(cycle.tokens[:-1]) == drafts[: cycle.accepted]
    assert list(cycle.tokens) == choices[: cycle.accepted + 1]


def test_nothing_is_allocated_after_the_load():
    backend, ids = scheduled("demo", "nvfp4"), prompt("demo", 30)
    backend.reset()
    before = backend.gpu.allocations
    generate(backend, ids, Options(max_new_tokens=NEW))
    assert backend.gpu.allocations == before
