"""What PTX must say: of left operands of warpgroup products, and of control words that are read before a wait.

Left operands are under way while the next ones are decoded: a register has one definition, which is arithmetic, and is
no word that is read again later. (What an operand taken from a register of words did: tests/gpu/test_native_tiles.py
found other bits from launch to launch.) A control word comes from L2: what a wait makes visible, it has not yet.
"""

import pytest
from ptx_support import kernels_ptx, left_operands, word_loads

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


def test_a_word_is_known_by_the_parameter_that_points_to_it():
    ptx = """
    ld.param.u64 %rd1, [kernel_param_0];
    ld.param.u64 %rd2, [kernel_param_1];
    cvta.to.global.u64 %rd3, %rd2;
    add.s64 %rd4, %rd3, %rd9;
    ld.global.u32 %r1, [%rd3];
    ld.global.cg.s32 %r2, [%rd1];
    ld.global.u32 %r3, [%rd4];
    ld.global.f32 %f1, [%rd1];
    """
    assert word_loads(ptx) == ["ld.global.u32", "ld.global.cg.s32"]
    slot = """
    mov.u32 %r4, %ctaid.z;
    shl.b32 %r5, %r4, 3;
    mul.wide.s32 %rd5, %r5, 4;
    mul.wide.s32 %rd6, %r9, 4;
    add.s64 %rd7, %rd3, %rd5;
    add.s64 %rd8, %rd7, 16;
    add.s64 %rd9, %rd3, %rd6;
    ld.global.cg.u32 %r6, [%rd7];
    ld.global.s32 %r7, [%rd8];
    ld.global.nc.u32 %r8, [%rd9];
    """
    assert word_loads(ptx + slot) == ["ld.global.u32", "ld.global.cg.s32", "ld.global.cg.u32", "ld.global.s32"]


@pytest.mark.parametrize("unit", ["attend", "delta"])
def test_control_words_before_a_wait_come_from_l2(unit):
    late = {"delta_prepare", "delta_norm"}  # they wait first
    found = {name: word_loads(ptx) for name, ptx in kernels_ptx(unit).items() if name not in late}
    assert all(len(loads) > 1 and set(loads) == {"ld.global.cg.s32"} for loads in found.values()), found
