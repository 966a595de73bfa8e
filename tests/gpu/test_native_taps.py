"""Taps that the native backend reads behind its prefill, beside the reference's."""

from types import SimpleNamespace

import numpy as np
import pytest
from native_backend_support import ENGINE, checkpoint, device_cubin, store
from store_weights import StoreWeights

from edge_dflash.backends.cuda.taps import NativeTapper
from edge_dflash.training.taps import reference_taps
from edge_dflash.weights.formats import bf16_to_f32

pytestmark = pytest.mark.gpu
LENGTHS = (1, 17, 64, 150)  # chunks have 64 rows


def bundle(name, kind):
    """What the tappers ask of a bundle."""
    pair, _, _ = checkpoint(name)
    manifest = SimpleNamespace(precision=ENGINE, max_context=256, prefill_chunk=64)
    held = store(name, kind)
    return SimpleNamespace(pair=pair, manifest=manifest, cubin=device_cubin, get=held.get, kv_scale=held.kv_scale)


@pytest.mark.parametrize(("name", "kind"), [("demo", "nvfp4"), ("dense", "mixed"), ("hybrid", "nvfp4")])
def test_rows_are_those_of_the_reference(name, kind):
    one = bundle(name, kind)
    _, programs, _ = checkpoint(name)
    weights = StoreWeights(store(name, kind), {n: store(name, kind).get(n).format for n in programs.weights})
    ours, theirs = NativeTapper(one, last=True, weights=weights), reference_taps(one, last=True)
    rng = np.random.default_rng(0)
    try:
        for length in LENGTHS:
            ids = rng.integers(0, one.pair.target.vocab_size, length).tolist()
            found, wanted = ours.rows(ids), theirs(ids)
            assert found.keys() == wanted.keys() == {"taps", "last"}
            for role in found:
                a, b = bf16_to_f32(found[role]), bf16_to_f32(wanted[role])
                assert a.shape == b.shape
                assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b), (role, length)
            again = ours.rows(ids)
            assert all(np.array_equal(again[role], found[role]) for role in found)
    finally:
        ours.close()
