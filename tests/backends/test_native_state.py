"""The state kernels without a GPU: they compile for every arch without large spills, and their sizes add up."""

import re

import numpy as np
import pytest
from cubin_support import cubin, kernel_use

from edge_dflash.backends.cuda.compile import KERNELS
from edge_dflash.backends.cuda.kernels import attend
from edge_dflash.backends.cuda.kernels.attend import AttendShape
from edge_dflash.backends.cuda.kernels.delta import DeltaShape

SHARED_LIMIT = {"sm87": 163, "sm89": 99, "sm90a": 227, "sm110a": 227, "sm120a": 99, "sm121a": 99}  # KiB a block
ATTEND_27B = AttendShape(24, 4, 256, 64, 1e-6, 32768, 16, 512, gated=True)
DELTA_27B = DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, 512)


def test_split_boundaries_are_those_of_the_kernel():
    source = (KERNELS / "attend.cu").read_text()
    body = source[source.index("first_key(int split)") : source.index("split_of(int key)")]
    python = re.sub(r"if \((split < \d+)\) return ([^;]+);", r"\2 if \1 else ", body[body.index("{") + 1 :])
    python = re.sub(r"return ([^;]+);.*", r"\1", python, flags=re.S)
    first_keys = [eval("(" + python + ")", {"split": split}) for split in range(60)]  # the kernel's own table
    assert first_keys == sorted(set(first_keys))
    assert all(key % attend.CHUNK == 0 for key in first_keys)
    for keys in (1, 64, 65, 512, 513, 2048, 4097, 8192, 8193, 9216, 9217, 20000):
        count = attend.splits(keys)
        assert first_keys[count - 1] < keys <= first_keys[count]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kv", ["fp8", "bfloat16"])
def test_blocks_cover_the_query_rows_and_fit_shared_memory(group, dim, kv):
    for rows in (1, 16, 17, 32):
        shape = AttendShape(group, 1, dim, dim, 1e-6, 4096, rows, 64, kv=kv)
        for prefill in (False, True):
            m = shape.warp_tiles(prefill)
            assert shape.row_blocks(prefill) * 16 * m >= group * shape.tile(prefill)
            assert shape.shared_bytes(m) <= min(SHARED_LIMIT.values()) * 1024
            assert shape.tile(prefill) >= (16 if prefill else rows)


def test_keys_of_27b_are_read_by_two_neighbouring_blocks():
    assert ATTEND_27B.row_blocks(prefill=False) == 2
    assert ATTEND_27B.kv_bytes == 4 * 32800 * 256


WIDE = [
    ATTEND_27B,
    AttendShape(32, 16, 128, 128, 1e-6, 2300, 16, bidirectional=True),
    AttendShape(32, 32, 128, 128, 1e-6, 2300, 32, window=700),
    AttendShape(8, 1, 256, 64, 1e-6, 40000, 16, 64, window=128, bidirectional=True),
    AttendShape(6, 2, 256, 64, 1e-6, 70000, 7),
]


def _widths(shape, start):
    """Splits that the rows of one width see, by width: span_of and width_of of the kernel."""
    wide, keys, found = shape.wide, min(start + shape.rows, shape.kv_rows), {}
    for p in range(start, start + shape.rows):
        seen = min(p, shape.window) if shape.window else p
        found.setdefault(128 * (seen // (128 * wide.most) + 1), []).append(p)
    for width, rows in found.items():
        first = max(0, rows[0] - shape.window + 1) if shape.window else 0
        ahead = rows[-1] + (shape.window or keys) if shape.bidirectional else rows[-1] + 1
        yield (min(keys, ahead) - 1) // width + 1 - first // 128 * 128 // width


@pytest.mark.parametrize("shape", WIDE)
def test_wide_splits_have_a_slot_whatever_the_length(shape):
    most = 0
    for start in range(shape.max_context - shape.rows + 1):
        counts = list(_widths(shape, start))
        assert 1 <= len(counts) <= 2
        most = max(most, sum(counts))
    assert most <= shape.wide.slots <= most + 16
    floats = shape.kv_heads * shape.wide.blocks(False) * shape.wide.columns(False) * shape.wide.slots
    assert shape.scratch[1] >= 4 * floats * shape.head_dim
    assert shape.scratch[2] >= 8 * floats


@pytest.mark.parametrize("shape", WIDE)
def test_wide_kernels_are_built_for_hopper_and_fit_it(shape):
    kernels = kernel_use(cubin(attend.UNIT, "sm90a"))
    for prefill in (False, True):
        assert shape.wide.kernel(prefill) in kernels
        assert shape.wide.shared(prefill) <= SHARED_LIMIT["sm90a"] * 1024
        assert shape.wide.columns(prefill) * shape.wide.blocks(prefill) >= shape.group * shape.tile(prefill)
    assert not any("wide_splits" in name for name in kernel_use(cubin(attend.UNIT, "sm87")))


def test_only_fp8_keys_of_wide_heads_have_wide_kernels():
    assert AttendShape(4, 4, 64, 64, 1e-6, 64, 16).wide is None
    assert AttendShape(4, 4, 128, 64, 1e-6, 64, 16, kv="bfloat16").wide is None


def test_scratch_holds_every_part():
    queries, partial, sums = ATTEND_27B.scratch
    assert queries == 2 * 512 * 24 * 256
    assert partial == max(4 * ATTEND_27B.splits * 24 * 16 * 256, 4 * 512 * 24 * 256)
    assert sums >= 8 * ATTEND_27B.splits * 24 * 16
    assert ATTEND_27B.scratch_bytes == queries + partial + sums
    rows, values = 16 + 512, 48 * 128
    floats = rows * (2 * values + 2 * 16 * 128 + 4 * 48)  # v, o; q, k; gates
    assert 4 * floats <= DELTA_27B.scratch_bytes <= 4 * floats + 512


def test_a_short_convolution_gets_leading_zeros():
    shape = DeltaShape(1, 1, 32, 32, 3, 1e-6, 4)
    conv = np.arange(96 * 3, dtype=np.float32).reshape(96, 1, 3)
    packed = shape.packed_conv(conv)
    assert packed.shape == (4, 96)
    assert not packed[0].any()
    assert np.array_equal(packed[1:], conv[:, 0].T)


def test_a_multiprocessor_takes_no_more_blocks_than_its_share():
    """At most two of a verify, four of a prefill: more have no room."""
    for sm_count, verify, prefill in (
        (132, 1, 3),
        (200, 1, 2),
        (60, 2, 4),
        (20, 2, 4),
        (12, 2, 4),
    ):  # the last: no room
        shared = DELTA_27B.verify_shared(90, sm_count), DELTA_27B.recurrence_shared(90, sm_count)
        assert [(228 << 10) // (one + 1024) for one in shared] == [verify, prefill]
    for sm in (90, 110, 120, 121):
        assert DELTA_27B.verify_shared(sm, 132) <= SHARED_LIMIT[f"sm{sm}a"] << 10
    assert (100 << 10) // (DELTA_27B.recurrence_shared(121, 48) + 1024) == 2
