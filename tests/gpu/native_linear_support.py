"""Random weights of every format, their float64 values on the device, and cubins for the linear GPU tests."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from native_state_support import CACHE, Device, bf16

from edge_dflash.backends.cuda.compile import cached_cubin
from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.splits import HopperSplits, WideSplits, clustered, hopper, row_tile
from edge_dflash.backends.cuda.memory import Matrix
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight
from edge_dflash.weights.layout import repack

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

FORMATS = ("nvfp4", "fp8", "fp8_channel", "bf16")
SMALL = ((6, 256), (96, 384), (256, 768), (1000, 256), (40, 48))  # (N, K)
LARGE = {  # Qwen3.6-27B and Qwen3.5-4B
    "nvfp4": ((6144, 5120), (5120, 6144), (5120, 17408), (12288, 2560), (2560, 9216)),
    "fp8": ((1024, 5120), (2560, 4096)),
    "fp8_channel": ((5120, 6144),),
    "bf16": ((48, 5120), (4096, 2560)),
}
SHAPES = [(f, n, k) for f in FORMATS for n, k in (*SMALL, *LARGE[f])]


def cubin(unit, arch):
    """The cubin of a unit; compiled once for each state of the sources."""
    return cached_cubin(unit, arch, CACHE)


FAMILIES = ("hopper", "cluster", "few", "stream")


class Split(Linears):
    """Linears; on request of Hopper with splits, twins and clusters of the test's choice."""

    splits, twins, most = None, None, 120

    def choose(self, layout, rows, *, may_split=False):
        if self.splits is None:
            return super().choose(layout, rows, may_split=may_split)
        count, held = self._gpu.sm_count, lambda _, s, *block: min(self.most, 120 // s)
        if rows <= 16:
            return HopperSplits.of(layout, self.splits, count, held)
        return WideSplits.of(layout, row_tile(rows), self.splits, count, held, self.twins)


def linears_of(device, family):
    """The linears of a family of kernels, where this device runs it; "own": its own for 32 rows.

    "few": those of 20 multiprocessors without clusters.
    """
    gpu, arch = copy.copy(device.gpu), f"sm{device.gpu.sm}" + ("a" if device.gpu.sm >= 90 else "")
    if family == "hopper" and not hopper(gpu.sm, 16):
        pytest.skip("this device has no warpgroup products")
    if family in ("cluster", "few") and not clustered(gpu.sm):
        pytest.skip("this device has no kernels with clusters")
    if family == "few":
        gpu.sm, gpu.sm_count, gpu.most_clusters = 110, 20, lambda *block: 0
    if family == "stream" and gpu.sm >= 100:
        pytest.skip("weights lie as this device's own kernels read them")
    if family == "stream":
        gpu.sm = 87
    return Split(gpu, lambda unit: cubin(unit, arch), most_rows=16 if family == "hopper" else 32, joint=128)


def weight(kind, n, k, seed):
    rng = np.random.default_rng(seed)
    if kind == "nvfp4":
        packed = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        scales = rng.integers(0x28, 0x50, (n, k // 16), dtype=np.uint8)
        odd = rng.random((n, k // 16)) < 0.02  # subnormal, zero and largest scales
        scales[odd] = rng.choice(np.array([0, 1, 3, 7, 8, 0x7E], np.uint8), int(odd.sum()))
        return Nvfp4Weight(packed, scales, 0.0123)
    if kind.startswith("fp8"):
        codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x55  # no NaN
        scale = rng.random(n if kind == "fp8_channel" else 1).astype(np.float32) * 0.01 + 0.001
        return Fp8Weight(codes, scale)
    values = rng.standard_normal((n, k), dtype=np.float32) * 0.05
    return WideWeight((values.view(np.uint32) >> 16).astype(np.uint16))


def values(weight):
    """Exact float64 values [N, K] and float32 row scales [N, 1] on the GPU."""
    match weight:
        case Nvfp4Weight():
            packed = torch.from_numpy(weight.packed).cuda().int()
            codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
            blocks = torch.from_numpy(weight.block_scale).cuda().view(torch.float8_e4m3fn).double()
            scale = torch.full((codes.shape[0], 1), weight.global_scale, device="cuda", dtype=torch.float32)
            return E2M1.cuda()[codes] * blocks.repeat_interleave(16, 1), scale
        case Fp8Weight():
            scale = torch.from_numpy(weight.scale).cuda().reshape(-1, 1).expand(weight.shape[0], 1)
            return torch.from_numpy(weight.data).cuda().view(torch.float8_e4m3fn).double(), scale
        case WideWeight():
            wide = torch.from_numpy(weight.data.view(np.int16)).cuda().view(torch.bfloat16).double()
            return wide, torch.ones(wide.shape[0], 1, device="cuda")


def expected(x, weight):
    """float64 product before rounding, [rows, N], on the CPU."""
    matrix, scale = values(weight)
    return ((x.cuda().double() @ matrix.T) * scale.double().T).cpu()


def ulps(found, exact):
    """Distance of BF16 ``found`` from the rounding of ``exact``, in BF16 steps of the larger; of NaN: infinite."""
    want = exact.bfloat16().double()
    step = 2.0 ** (torch.floor(torch.log2(torch.maximum(want.abs(), found.double().abs()).clamp(min=1e-30))) - 7)
    return ((found.double() - want).abs() / step).nan_to_num(nan=float("inf"))  # what was not written is far off


def empty(device: Device, rows, columns) -> Matrix:
    return Matrix(device.poisoned(rows * columns * 2), columns)


def fetch(device: Device, matrix: Matrix, rows, columns=None) -> torch.Tensor:
    return device.read(matrix.pointer, (rows, matrix.stride), torch.bfloat16)[:, : columns or matrix.stride]


def in_blocks(k, window, rows=16):
    """Where element (row, column) of so many rows lies in a tensor in blocks: [rows, k]."""
    row, column = torch.arange(rows)[:, None], torch.arange(k)
    lane, part = (
        (column // 16 % 4, column % 16) if window == 64 else (column // 8 % 4, column // 32 % 2 * 8 + column % 8)
    )
    return column // 64 * (64 * rows) + row * 64 + (part // 2 ^ row % 8) * 8 + lane * 2 + part % 2


def put_blocks(device: Device, x, window) -> Matrix:
    """16 rows, or those of a tile of a joint pass, in blocks on the device; ``window`` as Splits have it."""
    rows, k = x.shape
    flat = torch.empty(rows * k)
    flat[in_blocks(k, window & 255, rows)] = x
    return Matrix(device.rows(flat.reshape(rows, k)).pointer, -window)


def fetch_blocks(device: Device, matrix: Matrix, columns) -> torch.Tensor:
    """A tensor in blocks as rows."""
    window, rows = -matrix.stride & 255, -matrix.stride >> 8 or 16
    flat = device.read(matrix.pointer, (rows * columns,), torch.bfloat16)
    return flat[in_blocks(columns, window, rows)]


def run(device, linears, stack, x, rows, **options):
    tile = x.shape[0]
    out = [empty(device, tile, n) for n in stack.layout.columns]
    linears.linear(stack, device.rows(x), out, rows, **options)
    return [fetch(device, m, tile) for m in out]


def inputs(rows, k, seed=0):
    return bf16(rows, k, generator=torch.Generator().manual_seed(seed), scale=2.0)


def check_exact(found, exact, bound):
    """``found`` is ``exact`` rounded to BF16, but for ``bound`` of a row's largest, and mostly to the last bit."""
    error = (found.double() - exact).abs() - exact.abs() * 2.0**-8  # beyond half a BF16 step
    assert (error / exact.abs().amax(1, keepdim=True)).max() < bound
    assert (ulps(found, exact) > 0).double().mean() < 0.02


def check_greedy(device, linears, stack, x, rows):
    """The ids are the first of each row's largest stored logits, which are those of ``linear``; returns them."""
    (n,) = stack.layout.columns
    ids = device.poisoned(4 * rows)
    scratch = device.poisoned(linears.choose(stack.layout, rows).rank_bytes)
    logits = empty(device, rows, n)
    linears.greedy(stack, device.rows(x), ids, rows, scratch, logits)
    stored = fetch(device, logits, rows)
    assert torch.equal(stored, run(device, linears, stack, x, rows)[0])
    want = torch.tensor([int((row == row.max()).nonzero()[0]) for row in stored.float()])
    assert torch.equal(device.read(ids, (rows,), torch.int32).long(), want)
    device.gpu.fill(ids, 0xFF)
    linears.greedy(stack, device.rows(x), ids, rows, scratch)
    assert torch.equal(device.read(ids, (rows,), torch.int32).long(), want)
    return want


def check_slice(device, linears, k, n):
    """Columns k .. 2 k of wider rows give what the same values in rows of their own give."""
    x = inputs(16, 2 * k)
    stack, whole = LinearWeights.of(device.gpu, repack(weight("fp8", n, k, 2))), device.rows(x)
    part, out = Matrix(whole.pointer.at(2 * k, whole.pointer.nbytes - 2 * k), 2 * k), empty(device, 16, n)
    linears.linear(stack, part, [out], 16)
    assert torch.equal(fetch(device, out, 16), run(device, linears, stack, x[:, k:], 16)[0])
