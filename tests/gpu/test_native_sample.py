"""Choosing on the device gives the tokens of decode/sampling: every filter, tie, mask and size."""

from functools import cache

import numpy as np
import pytest
from native_state_support import Device

from edge_dflash.backends.cuda.kernels import sample
from edge_dflash.backends.cuda.kernels.sample import Chooser
from edge_dflash.backends.cuda.memory import Allocator, Control, Matrix
from edge_dflash.decode.sampling import Sampling, choose_row, pack
from edge_dflash.weights.formats import bf16_to_f32

pytestmark = pytest.mark.gpu

KINDS = ("normal", "peaked", "flat", "zeros", "few", "wide", "tiny")
TEMPERATURES = (0.0, 1e-4, 0.7, 1.0, 5.0, 1e6)
FILTERS = ((0, 1.0), (1, 1.0), (20, 0.95), (50, 1.0), (0, 0.9), (0, 1e-9), (0, 1 - 2**-53), (7, 0.5), (300, 0.999),
           (10**12, 1.0), (10**12, 0.3))  # fmt: skip
LARGE = (Sampling(1.0, seed=1), Sampling(0.7, 20, 0.95, 2), Sampling(2.0, 0, 0.9, 3), Sampling(0.3, 5000, 1.0, 4),
         Sampling(5.0, 100_000, 0.99, 2**64 - 1))  # fmt: skip


def logits(kind, rows, columns, seed=0):
    """BF16 bits [rows, columns]."""
    rng = np.random.default_rng(seed)
    if kind == "wide":  # every finite value
        bits = rng.integers(0, 1 << 16, (rows, columns)).astype(np.uint16)
        return np.where(bits & 0x7F80 == 0x7F80, bits & 0x3FFF, bits).astype(np.uint16)
    x = rng.standard_normal((rows, columns)) * 3
    if kind == "peaked":
        x[np.arange(rows), rng.integers(0, columns, rows)] += 20
    elif kind == "flat":
        x[:] = 1.5
    elif kind == "zeros":
        x = rng.choice([0.0, -0.0], x.shape)
    elif kind == "few":
        x = rng.choice([-40.0, -1.0, 0.5, 2.0], x.shape)
    elif kind == "tiny":
        x *= 1e-6
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def mask_of(kind, columns, rng):
    """Flags, or None."""
    flags = np.ones(columns, np.bool_)
    if kind == "none":
        return None
    if kind == "one":
        flags[:] = False
        flags[rng.integers(0, columns)] = True
    elif kind == "some":
        flags[:] = False
        flags[rng.integers(0, columns, 30)] = True
    elif kind == "half":
        flags = rng.random(columns) < 0.5
        flags[-1] = True
    return flags


class Choices:
    """A Chooser over 16 rows of logits; columns behind the last are large, so that a read past the end is seen."""

    def __init__(self, columns):
        self.device, self.columns = device(), columns
        gpu, stride = self.device.gpu, -(-columns // 16) * 16
        self.buffers = sample.SamplingBuffers.take(Allocator(gpu), 16, columns)
        self.buffers.clear(gpu)
        self.matrix = Matrix(gpu.allocate(2 * 16 * stride), stride)
        self.sampler = sample.Sampler(gpu, self.device.module(sample.UNIT))
        self.chooser = Chooser(gpu, self.sampler, self.buffers, self.matrix)

    def put(self, bits):
        padded = np.full((16, self.matrix.stride), 0x7F00, np.uint16)
        padded[: len(bits), : self.columns] = bits
        self.device.gpu.write(self.matrix.pointer, padded)
        self.rows = bf16_to_f32(bits)

    def check(self, sampling, position, masks, first=0):
        packed = [None if mask is None else pack(mask) for mask in masks]
        found = self.chooser.choose(sampling, position, packed, first)
        wanted = [choose_row(self.rows[first + i], sampling, position + i, mask) for i, mask in enumerate(packed)]
        assert found == wanted, f"{sampling} at {position}"
        self.clean()

    def clean(self):
        """Nothing is left that the next launch would see."""
        gpu, b = self.device.gpu, self.buffers
        assert not gpu.read(b.chunks, (b.chunks.nbytes // 4,), np.uint32).any()
        if self.columns < 5000:
            assert not gpu.read(b.bins, (b.bins.nbytes // 4,), np.uint32).any()
        assert (gpu.read(b.tops, (16,), np.uint32) == 2**32 - 1).all()
        assert not gpu.read(b.arrived, (16,), np.uint32).any()


@cache
def device():
    return Device()


@cache
def choices(columns):
    return Choices(columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [1024, 1000, 37])
def test_every_setting_on_small_rows(columns, kind):
    ours, rng = choices(columns), np.random.default_rng(5)
    ours.put(logits(kind, 16, columns))
    masks = [mask_of(("none", "half", "some", "one", "all")[r % 5], columns, rng) for r in range(16)]
    for temperature in TEMPERATURES:
        for seed, (top_k, top_p) in enumerate(FILTERS):
            ours.check(Sampling(temperature, top_k, top_p, seed * 0x1234_5678_9ABC), 77 * seed, masks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [248_320, 151_936])
def test_large_rows(columns, kind):
    ours, rng = choices(columns), np.random.default_rng(6)
    ours.put(logits(kind, 3, columns))
    for i, sampling in enumerate(LARGE if columns == 248_320 else LARGE[1:3]):
        masks = [None, mask_of(("half", "some", "all")[i % 3], columns, rng)]
        ours.check(sampling, 30_000 + i, masks, first=i % 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [37, 1000, 151_936, 248_320])
def test_logprobs_are_those_of_float64(columns, kind):
    ours, rng = choices(columns), np.random.default_rng(7)
    ours.put(logits(kind, 16, columns))
    ids = rng.integers(0, columns, 16).tolist()
    rows = ours.rows.astype(np.float64)
    best = rows.max(axis=1)
    wanted = rows[np.arange(16), ids] - best - np.log(np.exp(rows - best[:, None]).sum(axis=1))
    wanted[wanted < -np.finfo(np.float32).max] = -np.inf
    found = ours.chooser.logprobs(ids, 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-5)
    assert [ours.chooser.logprobs([one], row)[0] for row, one in enumerate(ids)] == found  # alone as together


def test_rows_that_hold_inf_or_nan_have_no_logprobs():
    ours = choices(1000)
    bits = logits("normal", 16, 1000)
    bits[0, 999], bits[1, 3], bits[2, :], bits[3, 7] = 0x7F80, 0x7FC0, 0xFF80, 0xFF80
    ours.put(bits)
    found = ours.chooser.logprobs([1, 1, 1, 7, 1], 0)
    assert np.isnan(found[:3]).all()
    assert found[3] == -np.inf
    assert np.isfinite(found[4])


def test_ties_are_cut_by_id_wherever_the_slices_end():
    ours = choices(20_000)
    bits = logits("flat", 16, 20_000)
    bits[:, ::7] = 0x4040  # 3.0
    ours.put(bits)
    above, slice_ = len(range(0, 20_000, 7)), len(range(0, 8192, 7))
    for top_k in (1, slice_ - 1, slice_, slice_ + 1, 2000, above - 1, above, above + 1, above + 9000, 19_999, 20_000):
        ours.check(Sampling(2.0, top_k, 1.0, top_k), 9, [None] * 16)
        ours.check(Sampling(2.0, top_k, 0.77, top_k), 9, [None] * 16)


def test_choices_follow_position_and_seed_over_many_draws():
    ours = choices(1024)
    ours.put(logits("normal", 16, 1024, seed=9))
    for seed in range(60):
        ours.check(Sampling(3.0, seed=seed), 2**20 + 16 * seed, [None] * 16)
        ours.check(Sampling(1.0, 40, 0.8, seed=2**63 + seed), 16 * seed, [None] * 16)


def test_rows_of_a_block_choose_for_their_positions_and_ignore_masks():
    ours, sampling = choices(1000), Sampling(1.3, 30, 0.9, 11)
    gpu, bits = ours.device.gpu, logits("normal", 16, 1000, seed=3)
    ours.put(bits)
    ours.chooser.choose(Sampling(), 0, [pack(mask_of("one", 1000, np.random.default_rng(0)))] * 16, 0)
    ids = gpu.upload(np.full(16, -1, np.int32))
    for length, offset, first, stop in ((0, 0, 1, 16), (500, 1, 0, 10)):
        ours.device.set(length=length)
        gpu.write(ids, np.full(16, -1, np.int32))
        ours.chooser.prepare(sampling)
        block = sample.Block(ours.device.word(Control.LENGTH), offset, first, stop)
        ours.sampler.choose(ours.buffers, ours.matrix, ids, block)
        wanted = [choose_row(ours.rows[r], sampling, length + offset + r) for r in range(first, stop)]
        found = gpu.read(ids, (16,), np.int32).tolist()
        assert found == [-1] * first + wanted + [-1] * (16 - stop)
        ours.clean()


def test_a_row_does_not_depend_on_the_others():
    ours, sampling = choices(20_000), Sampling(0.9, 100, 0.9, 5)
    bits = logits("normal", 16, 20_000, seed=4)
    ours.put(bits)
    together = ours.chooser.choose(sampling, 40, [None] * 16, 0)
    alone = []
    for row in range(16):
        ours.put(logits(KINDS[row % len(KINDS)], 16, 20_000, seed=row))
        other = ours.rows.copy()
        other[row] = bf16_to_f32(bits)[row]
        ours.put((other.view(np.uint32) >> 16).astype(np.uint16))
        alone += ours.chooser.choose(sampling, 40 + row, [None], row)
    assert alone == together
