"""A stack repacked in blocks of rows is the stack repacked at once."""

import numpy as np
import pytest
from bundle_support import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import Layout, pack, repack, row_blocks


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


def test_blocks_have_about_the_size_asked_for():
    weight = random_weight(np.random.default_rng(0), (1024, 64), "bf16", None)
    blocks = list(row_blocks([weight], Layout("bf16", (1024,), 64), 16 * 1024))
    assert [block[0].shape[0] for block in blocks] == [128] * 8


def test_what_the_kernels_do_not_take_is_refused():
    weight = random_weight(np.random.default_rng(0), (32, 64), "f32", None)
    with pytest.raises(BackendError, match="BF16 cannot hold"):
        pack((weight,))
