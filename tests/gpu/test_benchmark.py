"""The benchmark on a device: its random weights are what the mirror says, and its promises about a loaded pair hold."""

import ctypes
from functools import partial

import numpy as np
import pytest
from native_linear_support import CACHE
from random_words import random_words

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.bench.device import cubins, read_bandwidth
from edge_dflash.bench.subjects import bench_synthetic
from edge_dflash.bench.workload import Workload

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu():
    device = Gpu()
    yield device
    device.close()


@pytest.mark.parametrize(("form", "bits", "exponent"), [("nvfp4", 4, 0), ("fp8", 8, 6), ("bf16", 16, 117)])
def test_random_weights_are_those_of_the_mirror(gpu, form, bits, exponent):
    words = 3 * 288 * 1000 + 17
    kernel = gpu.load(cubins(CACHE, gpu.sm)("bench")).kernel("bench_weights")
    memory = gpu.allocate(4 * words)
    gpu.fill(memory, 0xFF)
    arguments = (memory, ctypes.c_longlong(words), ctypes.c_uint32(0xDEADBEEF), bits, exponent)
    gpu.launch(kernel, (gpu.sm_count, 1, 1), 256, arguments)
    found = gpu.read(memory, (words,), np.uint32)
    assert (found == random_words(0, words, 0xDEADBEEF, form, exponent)).all()


@pytest.mark.alone
def test_the_read_bandwidth_is_steady(gpu):
    first, again = (read_bandwidth(gpu, cubins(CACHE, gpu.sm)) for _ in range(2))
    assert abs(first / again - 1) < 0.05


@pytest.mark.alone
def test_a_loaded_pair_allocates_nothing_and_starts_as_fast_as_it_goes_on():
    work = Workload(context=512, tokens=100, prefill=(128,), accept_length=4.5)
    result = bench_synthetic("qwen3.5-4b", "nvfp4", work, CACHE, partial(print, flush=True))
    assert result.memory.allocations_after_load == 0
    assert result.speculative.accept_length == pytest.approx(4.5)
    assert result.raw.accept_length == pytest.approx(4.5)
    assert abs(result.host_ms) < 0.1 * result.raw.ms
    assert result.schema.cycles > 10
    assert result.cold.over_steady < 2
    assert 1 < result.cycle.whole.over_floor < 10
    assert result.speculative.tokens_per_second > 1.5 * result.plain.tokens_per_second
    assert abs(sum(result.memory.budget.values()) / result.memory.allocated - 1) < 0.02
