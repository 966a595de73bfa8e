"""The order of sums in kernels/linear_hopper.cu and kernels/linear_wide.cu, and who does what, in Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_support import kernels_ptx, left_operands

from edge_dflash.backends.cuda.kernels.splits import (
    WIDE_TILES,
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

BLOCK_K, SLICES, GROUPS, TILE_UNITS, WARPS = 64, 4, 4, 2, 16
LAYOUTS = st.builds(
    lambda kind, n, blocks: Layout(kind, (n,), 16 * blocks),
    st.sampled_from(sorted(WINDOW)),
    st.integers(1, 3000) | st.sampled_from((5120, 16384, 34816)),
    st.integers(1, 400) | st.sampled_from((160, 320, 384, 576, 1088)),
)


class Sum:
    """A chain of products, each rounded: what one accumulator does."""

    def __init__(self, products):
        self.products, self.value = products, np.float32(0)

    def multiply(self, window, step):
        """A step of 16 k, if there is such a window; what is past the last one is zero."""
        self.value = np.float32(self.value + self.products.get((window, step), np.float32(0)))


def products_of(layout, seed):
    steps = WINDOW[layout.format] // 16
    values = np.random.default_rng(seed).standard_normal((layout.windows, steps)).astype(np.float32)
    return {(w, j): values[w, j] for w in range(layout.windows) for j in range(steps)}


def part_of(layout, rank, splits):
    """First block of 64 k of a part of K, and their number."""
    blocks = -(-layout.k // BLOCK_K)
    first = rank * blocks // splits
    return first, (rank + 1) * blocks // splits - first


def hopper_sum(layout, splits, products):
    """One output as linear_hopper.cu adds it: every slice a warpgroup, the finishers add slices, then parts."""
    pieces, total = BLOCK_K // WINDOW[layout.format], None
    for rank in range(splits):
        first, count = part_of(layout, rank, splits)
        slices = []
        for s in range(SLICES):
            begin, stop = first + count * s // SLICES, first + count * (s + 1) // SLICES
            chain = Sum(products)
            for window in range(begin * pieces, max(min(stop * pieces, layout.windows), begin * pieces)):
                for step in range(WINDOW[layout.format] // 16):
                    chain.multiply(window, step)
            slices.append(chain.value)
        part = slices[0]
        for value in slices[1:]:
            part = np.float32(part + value)
        total = part if total is None else np.float32(total + part)
    return total


def wide_sum(layout, splits, products):
    """The same as linear_wide.cu adds it: one warpgroup, block after block, a running sum of slices."""
    pieces, total = BLOCK_K // WINDOW[layout.format], None
    for rank in range(splits):
        first, count = part_of(layout, rank, splits)
        b, so_far = 0, None
        for s in range(SLICES):
            chain = Sum(products)
            while b < count * (s + 1) // SLICES:
                for step in range(4):  # of a block, in the order of x
                    per_piece = 4 // pieces
                    chain.multiply((first + b) * pieces + step // per_piece, step % per_piece)
                b += 1
            so_far = chain.value if so_far is None else np.float32(so_far + chain.value)
        total = so_far if total is None else np.float32(total + so_far)
    return total


@settings(max_examples=200)
@given(LAYOUTS, st.sampled_from((1, 2, 4, 8)), st.integers(0, 1 << 16))
def test_both_kernels_add_in_one_order(layout, splits, seed):
    products = products_of(layout, seed)
    assert hopper_sum(layout, splits, products).tobytes() == wide_sum(layout, splits, products).tobytes()


def test_another_number_of_splits_is_another_sum():
    layout = Layout("nvfp4", (32,), 5120)
    products = products_of(layout, 0)
    assert len({wide_sum(layout, splits, products).tobytes() for splits in (1, 2, 4, 8)}) > 1


def shares_of(units, side_units, groups, twins):
    """For each cluster's twin: first tile, tiles, passes (Block of the kernel)."""
    tiles = -(-units // TILE_UNITS)
    everything = tiles + -(-side_units // TILE_UNITS)
    base, rest, found = everything // groups, everything % groups, []
    for cluster in range(groups):
        lead = cluster // twins * twins
        first, count = cluster * base + min(cluster, rest), base + (cluster < rest)
        found.append((first, count, -(-(base + (lead < rest)) // GROUPS)))
    return tiles, everything, found


@settings(max_examples=300)
@given(st.integers(1, 2000), st.integers(0, 9), st.integers(1, 132), st.sampled_from((1, 2)))
def test_every_tile_has_one_group_and_every_group_every_pass(units, side_units, groups, twins):
    groups = max(twins, groups // twins * twins)
    tiles, everything, shares = shares_of(units, side_units, groups, twins)
    done = []
    for first, count, passes in shares:
        for group in range(GROUPS):
            mine = max(min(count, tiles - first) - group + GROUPS - 1, 0) // GROUPS
            both = max(count - group + GROUPS - 1, 0) // GROUPS
            assert mine <= both <= passes <= both + 1  # the rest is skipped in one pass
            done += [first + group + GROUPS * i for i in range(mine)]
            beside = [first + group + GROUPS * i for i in range(mine, both)]
            assert all(tile >= tiles for tile in beside)
            done += beside
    assert sorted(done) == list(range(everything))
    assert all(a[2] == b[2] for a, b in zip(shares[::twins], shares[twins - 1 :: twins], strict=True))


@pytest.mark.parametrize("rows", WIDE_TILES)
@pytest.mark.parametrize("splits", [2, 4, 8])
def test_every_sum_is_sent_to_one_place_and_finished_once(rows, splits):
    part, places, finished = 4 * (rows // 8) // splits, {}, set()
    for rank in range(splits):
        for n in range(rows // 8):
            for quarter in range(4):
                column = n * 4 + quarter
                place = (column // part, rank * part + column % part)
                assert places.setdefault(place, (rank, n, quarter)) == (rank, n, quarter)
    assert len(places) == splits * rows // 2
    for rank in range(splits):
        for warp in range(4):
            for c in range(warp, part, 4):
                seen = (rank * part + c) // 4, (rank * part + warp) % 4  # rows of eight, quarter
                for source in range(splits):
                    assert places[rank, source * part + c] == (source, *seen)
                finished.add(seen)
    assert len(finished) == rows // 2
    assert max(place for _, place in places) * 512 + 512 == rows * 256  # Room::SUMS


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
