"""A stack repacked in blocks of rows is the stack repacked at once, and turned back it is what it was.

One matrix at a time, in little memory, from several threads.
"""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bundle_support import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from native_support import formats_of, same, write_native_bundle

from edge_dflash.bundle.reader import Bundle
from edge_dflash.weights import layout
from edge_dflash.weights.layout import AT_ONCE, Layout, pack, repack, row_blocks, unpack_matrix


@settings(max_examples=60)
@given(
    st.sampled_from(["nvfp4", "fp8", "bf16"]),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 20_000),
)
def test_blocks_behind_each_other_are_the_whole(form, columns, k, gated, nbytes):
    columns = columns[:1] * 2 if gated else columns
    rng = np.random.default_rng(sum(columns))
    weights = [random_weight(rng, (n, 16 * k), form, None) for n in columns]
    whole = repack(weights, swiglu=gated)
    packed = [pack(block) for block in row_blocks(weights, Layout(form, tuple(columns), 16 * k, gated), nbytes)]
    assert np.array_equal(np.concatenate([p.data for p in packed]), whole.data)
    assert np.array_equal(np.concatenate([p.scale for p in packed]), whole.scale)


@pytest.mark.parametrize("form", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_matrix_takes_its_own_bytes_and_little_else(form, gated):
    rng = np.random.default_rng(0)
    stack = [random_weight(rng, (4096, 2048), form, None) for _ in range(2)]
    repacked = repack(stack, swiglu=gated)
    tracemalloc.start()
    try:
        found = unpack_matrix(repacked, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    same(stack[1], found)
    assert peak < found.nbytes + 6 * AT_ONCE, peak - found.nbytes


@pytest.mark.parametrize("size", [1, 5000, 1 << 30])
def test_pieces_that_are_read_at_once_change_nothing(size, monkeypatch):
    rng = np.random.default_rng(1)
    for form in ("nvfp4", "fp8", "bf16"):
        stack = [random_weight(rng, (n, 176), form, None) for n in (70, 33, 96)]
        repacked = repack(stack)
        monkeypatch.setattr(layout, "AT_ONCE", size)
        for index, weight in enumerate(stack):
            same(weight, unpack_matrix(repacked, index))


def test_several_threads_get_their_own_weights(tmp_path):
    store = write_native_bundle(tmp_path / "bundle", formats_of("nvfp4", mlp__down_proj="fp8", q_proj="bf16"))
    bundle = Bundle.open(tmp_path / "bundle")
    names = sorted(store) * 4
    with ThreadPoolExecutor(4) as pool:
        for name, found in zip(names, pool.map(bundle.get, names), strict=True):
            same(store[name], found)
