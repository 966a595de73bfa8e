"""Launches of the state kernels over one slot or several: arguments as the kernels take them, grids, scratch."""

import re
from dataclasses import replace

import pytest
from native_support import Recorder
from ptx_support import kernels_ptx

from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.kernels.conv import Convolutions
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Words
from edge_dflash.model.ops import GroupedConv

SOME = DevicePointer(1 << 40, 1 << 40)
MATRIX = Matrix(SOME, 1 << 14)
KV = KvMemory(SOME, SOME, 1.0, 1.0, *[SOME] * 4)
ATTENTION = AttendShape(24, 4, 256, 64, 1e-6, 32768, 16, 512, gated=True, lanes=8)
DELTA = DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, 512, lanes=8)
KINDS = {"u64": (DevicePointer,), "u32": (int,), "f32": (float,)}


def check_arguments(unit, launches):
    for name, _, _, arguments, _ in launches:
        kinds = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", kernels_ptx(unit)[name].partition(")")[0])
        assert len(arguments) == len(kinds), name
        for given, kind in zip(arguments, kinds, strict=True):
            assert kind == "b8" or isinstance(given, KINDS[kind]), (name, kind, given)


def grids(launches):
    return [(name, grid) for name, grid, *_ in launches]


def attend(words, sm):
    gpu, scratch = Recorder(sm), DevicePointer(1 << 41, ATTENTION.scratch_bytes)
    Attention(gpu, gpu, ATTENTION).attend(AttendTensors(*[MATRIX] * 4), KV, scratch, words)
    return gpu.launches


@pytest.mark.parametrize("sm", [87, 90])
def test_attention_has_a_grid_for_each_slot(sm):
    one = attend(Words(SOME, block=5), sm)
    assert len(one) == 3
    for slots in (1, 2, 4, 8):
        found = attend(Words(SOME, block=5, slots=slots), sm)
        check_arguments("attend", found)
        if sm == 87:
            assert grids(found) == [(name, (x, y, slots)) for name, (x, y, _) in grids(one)]
        else:  # all slots share the blocks of one
            prepare, splits, combine = (grid for _, grid in grids(found))
            (_, first), (_, second), (_, third) = grids(one)
            assert (prepare[2], splits[1], combine[2]) == (slots,) * 3
            assert (prepare[:2], splits[0], combine[:2]) == (first[:2], second[0], third[:2])
            assert splits[2] == max(1, second[2] // slots)
        assert len({name for name, _ in grids(found)} & {name for name, _ in grids(one)}) == (
            3 if sm == 87 or slots == 1 else 1
        )
    prompt = attend(Words(SOME, prefill=True), sm)
    check_arguments("attend", prompt)
    assert prompt[1][1][2] == 32  # tiles


def test_appended_layers_have_eight_places_in_a_slot():
    gpu, layer = Recorder(), (MATRIX, MATRIX, KV)
    append = Attention(gpu, gpu, ATTENTION).append
    for slots, layers, wanted in ((1, 5, [5]), (3, 5, [21]), (2, 10, [16, 10]), (8, 8, [64])):
        gpu.launches.clear()
        append([layer] * layers, Words(SOME, slots=slots))
        check_arguments("attend", gpu.launches)
        assert [grid[2] for _, grid in grids(gpu.launches)] == wanted


@pytest.mark.parametrize("kv", ["fp8", "bfloat16"])
def test_scratch_of_attention_has_all_slots(kv):
    one = replace(ATTENTION, lanes=1, prefill_rows=0, kv=kv)
    for lanes in (2, 8):
        parts = zip(replace(one, lanes=lanes).scratch, one.scratch, strict=True)
        assert all(all_slots > lanes * alone - 256 * lanes for all_slots, alone in parts)
    assert replace(ATTENTION, lanes=2).scratch_bytes < 2 * replace(ATTENTION, lanes=1).scratch_bytes


def delta(words, sm, *, clusters=True, flush=False):
    gpu, scratch = Recorder(sm), DeltaScratch(SOME, SOME)
    kernels, layer = DeltaKernels(gpu, gpu, DELTA, clusters=clusters), DeltaLayer(*[SOME] * 9)
    if flush:
        kernels.flush(layer, scratch, words)
    else:
        kernels.run(DeltaTensors(*[MATRIX] * 5), layer, scratch, words)
    check_arguments("delta", gpu.launches)
    return gpu.launches


@pytest.mark.parametrize("clusters", [True, False])
def test_gated_delta_has_a_grid_for_each_slot(clusters):
    one = delta(Words(SOME, block=5), 90, clusters=clusters)
    assert len(one) == (1 if clusters else 3)
    for slots in (1, 2, 4, 8):
        found = delta(Words(SOME, block=5, slots=slots), 90, clusters=clusters)
        assert [grid for _, grid in grids(found)] == [(x, y, slots) for _, (x, y, _) in grids(one)]
        crowded = clusters and slots >= 4
        assert ("delta_verify_crowded" in dict(grids(found))) == crowded
    assert len(delta(Words(SOME, prefill=True), 90, clusters=clusters)) == 3
    assert len(delta(Words(SOME), 90, clusters=clusters, flush=True)) == (1 if clusters else 2)


def test_blocks_of_several_slots_share_multiprocessors():
    assert [(228 << 10) // (DELTA.verify_shared(90, 132, slots) + 1024) for slots in (1, 2, 4, 8)] == [1, 2, 3, 3]
    assert DELTA.verify_shared(90, 132) == max(DELTA.verify_shared(90, 132, slots) for slots in range(1, 9))


def test_scratch_of_gated_delta_is_that_of_a_prompt_or_of_all_slots():
    decode = replace(DELTA, prefill_rows=0)
    assert decode.scratch_bytes == 8 * replace(decode, lanes=1).scratch_bytes
    assert DELTA.scratch_bytes == replace(DELTA, lanes=1).scratch_bytes  # 528 rows, 8 x 32
    assert DELTA.counter_bytes == 8 * 4 * 16


def test_convolutions_have_a_grid_for_each_slot():
    gpu, op = Recorder(), GroupedConv(inputs=("u", "c"), output="y", base="b", side=0, taps=2, group_size=16)
    Convolutions(gpu, gpu).convolve(op, MATRIX, MATRIX, SOME, MATRIX, 8, 4096, slots=4)
    assert grids(gpu.launches) == [("conv_rows", (8, 4, 4))]


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    "shape", [ATTENTION, replace(ATTENTION, heads=32, kv_heads=8, head_dim=128, rope_dims=128, gated=False)]
)
def test_one_slot_goes_through_the_warpgroup_kernels(shape, prefill):
    shape = replace(shape, lanes=1)
    gpu = Recorder()
    Attention(gpu, gpu, shape).attend(AttendTensors(*[MATRIX] * 4), KV, SOME, Words(SOME, prefill))
    names = [name for name, *_ in gpu.launches]
    assert names[1:] == [shape.wide.kernel(prefill), *([] if prefill else ["attend_wide_combine"])]
    check_arguments("attend", gpu.launches)
    for name, grid, block, _, shared in gpu.launches:
        assert min(grid) > 0
        assert block <= int(re.search(r"\.maxntid (\d+)", kernels_ptx("attend")[name])[1])
        assert shared <= 227 << 10
