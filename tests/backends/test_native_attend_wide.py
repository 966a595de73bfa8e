"""Launches of attention's warpgroup kernels: each gets as many arguments, and of the sizes, as it takes."""

import re
from dataclasses import replace

import pytest
from native_support import Recorder
from ptx_support import kernels_ptx

from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Words

SIZES = {"u64": (DevicePointer,), "u32": (int,), "f32": (float,)}
SHAPE = AttendShape(24, 4, 256, 64, 1e-6, 32768, 16, 512, gated=True)


def launches(shape, prefill):
    gpu, some = Recorder(), DevicePointer(1 << 40, 1 << 40)
    memory = KvMemory(some, some, 1.0, 1.0, *[some] * 4)
    matrix = Matrix(some, 1 << 14)
    Attention(gpu, gpu, shape).attend(AttendTensors(*[matrix] * 4), memory, some, Words(some, prefill))
    return gpu.launches


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, heads=32, kv_heads=8, head_dim=128, rope_dims=128, gated=False)]
)
def test_arguments_are_those_of_the_kernels(shape, prefill):
    found = launches(shape, prefill)
    names = [name for name, *_ in found]
    assert names[1] == shape.wide.kernel(prefill)
    assert names[2:] == ([] if prefill else ["attend_wide_combine"])
    for name, grid, block, arguments, shared in found:
        header = kernels_ptx("attend")[name].partition(")")[0]
        kinds = re.findall(r"\.param \.(\w+)", header)
        assert len(arguments) == len(kinds), name
        for given, kind in zip(arguments, kinds, strict=True):
            assert isinstance(given, SIZES[kind]), (name, kind, given)
        assert min(grid) > 0
        limit = re.search(r"\.maxntid (\d+)", kernels_ptx("attend")[name])
        assert block <= int(limit[1])
        assert shared <= 227 << 10
