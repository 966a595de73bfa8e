"""Left operands of warpgroup products, which are under way while the next ones are decoded, in PTX.

A register has one definition, which is arithmetic: it is no word that is read again later. (What an operand taken
from a register of words did: tests/gpu/test_native_tiles.py found other bits from launch to launch.)
"""

import pytest
from ptx_support import kernels_ptx, left_operands

STEPS = {"nvfp4": 4, "fp8": 4, "bf16": 2}  # of 16 k in a piece


def test_definitions_of_vectors_and_pairs_count_too():
    ptx = """
    ld.shared.v4.u32 {%r1,%r2,%r3,%r4}, [%r9];
    @%p1 mov.u32 %r2, %r9;
    mul.rn.bf16x2 %r3, %r1, %r9;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%f1,%f2}, {%r1,%r2,%r3,%r5}, %rd1, add, 1, 1, 0;
    """
    load = "ld.shared.v4.u32"
    assert left_operands(ptx) == [(load,), (load, "mov.u32"), (load, "mul.rn.bf16x2"), ()]


@pytest.mark.parametrize("kind", sorted(STEPS))
def test_linears_of_few_rows(kind):
    for splits in (1, 2, 4, 8):
        found = left_operands(kernels_ptx("linear_hopper")[f"linear_hopper_{kind}_{splits}"])
        assert len(found) == 4 * (2 + 2) * STEPS[kind]  # registers, tiles of a quad and pieces of a half one, steps
        assert set(found) == {("mul.rn.bf16x2",)}


@pytest.mark.parametrize("kind", sorted(STEPS))
def test_linears_of_many_rows(kind):
    found = left_operands(kernels_ptx("linear_tiles")[f"hopper_tiles_{kind}"])
    assert len(found) == 4 * 5 * 2 * 4  # registers, widths of a tile, windows of the loop, steps of 16 k
    assert set(found) == {("mul.rn.bf16x2",)}


@pytest.mark.parametrize("columns", [32, 64, 96])
@pytest.mark.parametrize("dim", [128, 256])
def test_attention(dim, columns):
    for name, forms in (("splits", 1 + (columns > 32)), ("prefill", 1)):  # splits: blocks of 32 columns besides
        found = left_operands(kernels_ptx("attend")[f"attend_wide_{name}_d{dim}_n{columns}"])
        assert len(found) == 4 * forms * 2 * dim // 16  # registers, steps of scores and of values
        assert set(found) == {("cvt.rn.f16x2.e4m3x2",)}
