"""A target without a drafter on the GPU: the tokens and the state of its pair's plain decoding."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from native_backend_support import ENGINE, checkpoint, device_cubin, native, prompt, store
from store_weights import StoreWeights

from edge_dflash.backends.cuda.backend import NativeBackend
from edge_dflash.decode.backend import Asked
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.model import pair_programs

pytestmark = pytest.mark.gpu

NEW = 24


@cache
def alone(name, kind):
    pair = replace(checkpoint(name)[0], drafter=None)
    held = store(name, kind)
    weights = StoreWeights(held, {n: held.get(n).format for n in pair_programs(pair).weights})
    return NativeBackend(pair, weights, ENGINE, cubin=device_cubin, max_context=256, prefill_chunk=64)


@pytest.mark.parametrize("options", [Options(max_new_tokens=NEW), Options(max_new_tokens=NEW, temperature=2.0, seed=5)])
@pytest.mark.parametrize(
    ("name", "kind"), [("demo", "nvfp4"), ("demo", "bf16"), ("dense", "mixed"), ("hybrid", "nvfp4")]
)
def test_a_target_alone_is_its_pair_decoding_plainly(name, kind, options):
    ids = prompt(name, 70, seed=2)
    pair, single = native(name, kind), alone(name, kind)
    for backend in (pair, single):
        backend.reset()
    wanted = generate(pair, ids, replace(options, speculative=False))
    found = generate(single, ids, options)
    assert found.tokens == wanted.tokens
    assert set(found.accept_lengths) == {1}
    state, other = single.snapshot().arrays, pair.snapshot().arrays
    assert state.keys() == {key for key in other if not key.startswith("drafter.")}
    for key, array in state.items():
        np.testing.assert_array_equal(array, other[key], err_msg=key)


def test_nothing_of_the_drafter_is_on_the_device():
    pair, single = native("demo", "nvfp4"), alone("demo", "nvfp4")
    assert "drafter weights" not in single.budget
    assert sum(single.budget.values()) < sum(pair.budget.values())
    anchor = single.prefill(prompt("demo", 9)).argmax()[0]
    cycle = single.cycle(Asked(anchor))
    assert (len(cycle.tokens), cycle.propose_seconds) == (1, 0.0)
