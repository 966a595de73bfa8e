"""Linears of joint passes: the splits of a pass alone on every device, and operands that have one definition."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_support import kernels_ptx, left_operands

from edge_dflash.backends.cuda.kernels.splits import (
    ClusterSplits,
    HopperSplits,
    StreamSplits,
    WideSplits,
    choose_splits,
    kernel_names,
    row_tile,
)
from edge_dflash.errors import BackendError
from edge_dflash.weights.layout import WINDOW, Layout

LAYOUTS = st.builds(
    lambda kind, n, blocks: Layout(kind, (n,), 16 * blocks),
    st.sampled_from(sorted(WINDOW)),
    st.integers(1, 3000) | st.sampled_from((5120, 16384, 34816)),
    st.integers(1, 400) | st.sampled_from((160, 320, 384, 576, 1088)),
)


@settings(max_examples=200)
@given(LAYOUTS, st.sampled_from((78, 132)), st.integers(17, 128))
def test_a_joint_pass_on_hopper_has_the_splits_of_a_pass_alone(layout, sm_count, rows):
    alone, joint = (choose_splits(layout, n, 90, sm_count, most_rows=16) for n in (16, rows))
    assert joint.tile == row_tile(rows)
    assert joint.splits == alone.splits
    if not isinstance(alone, HopperSplits):
        assert isinstance(joint, ClusterSplits)
        assert joint.row_tiles == max(1, joint.tile // 32)
        return
    assert isinstance(joint, WideSplits)
    assert joint.kernel in kernel_names(90, 16, 128)["linear_wide"]
    twins = int(joint.kernel[-1])
    assert joint.groups % twins == 0
    assert joint.blocks == joint.groups * joint.splits <= max(sm_count, joint.splits * twins)
    assert joint.shared_bytes <= 227 << 10
    assert joint.rank_bytes == 8 * joint.blocks * joint.tile
    assert joint.window == WINDOW[layout.format] + 256 * joint.tile


@settings(max_examples=200)
@given(
    LAYOUTS,
    st.sampled_from(((87, 16), (89, 58), (90, 132), (110, 20), (110, 12), (121, 48))),
    st.booleans(),
    st.sampled_from((64, 128)),
)
def test_other_kernels_take_tiles_of_rows_with_the_same_splits(layout, device, may_split, rows):
    alone, joint = (choose_splits(layout, n, *device, may_split=may_split) for n in (16, rows))
    whole = choose_splits(layout, 32, *device, may_split=may_split)
    assert (joint.splits, joint.tile, joint.row_tiles) == (alone.splits, rows, rows // 32)
    assert joint.kernel.split("_")[:3] == whole.kernel.split("_")[:3]
    at_once = joint.blocks * joint.row_tiles
    assert joint.shared_bytes <= 227 << 10
    if isinstance(joint, StreamSplits):
        assert joint.groups == alone.groups == whole.groups  # where a sum begins in K follows from the group
        assert joint.sum_bytes(layout) == rows // 32 * whole.sum_bytes(layout)
    else:
        assert at_once <= max(device[1], joint.splits * joint.row_tiles)  # all tiles go through the weights together


def test_where_no_cluster_is_held_the_error_says_so():
    layout = Layout("nvfp4", (5120,), 6144)

    def clusters(kernel, *block):
        return 0 if "wide" in kernel else 15

    with pytest.raises(BackendError, match="64 rows needs clusters of 8 blocks"):
        choose_splits(layout, 64, 90, 132, most_rows=16, clusters=clusters)


def test_a_launch_of_one_sequence_is_as_before():
    for sm, most in ((90, 16), (90, 32), (110, 32), (121, 32)):
        assert "linear_wide" not in kernel_names(sm, most)
        for rows in (1, 16, 17, 32)[: 2 if most == 16 else 4]:
            assert choose_splits(Layout("nvfp4", (5120,), 6144), rows, sm, 132, most_rows=most).row_tiles == 1


def test_left_operands_have_one_definition():
    kernels = kernels_ptx("linear_wide")
    assert {tuple(name.split("_")[2:4]) for name in kernels} == {("nvfp4", "128"), ("fp8", "64"), ("bf16", "32")}
    assert kernels.keys() <= set(kernel_names(90, 16, 128)["linear_wide"])
    for name, ptx in kernels.items():
        found = left_operands(ptx)
        assert len(found) == 4 * 4, name  # registers, steps of a block of 64 k
        assert set(found) == {("mul.rn.bf16x2",)}, name
