"""Linears of joint passes: a row of 17 to 128 has the bits that it has in a pass of 16, on every family of kernels."""

import pytest
import torch
from native_linear_support import (
    FAMILIES,
    FORMATS,
    check_greedy,
    empty,
    fetch,
    fetch_blocks,
    inputs,
    linears_of,
    put_blocks,
    run,
    weight,
)

from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.kernels.splits import (
    ClusterSplits,
    HopperSplits,
    StreamSplits,
    WideSplits,
    hopper,
    row_tile,
)
from edge_dflash.backends.cuda.memory import Norm
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight
from edge_dflash.weights.layout import repack

pytestmark = pytest.mark.gpu
ROWS = (1, 16, 17, 32, 48, 64, 100, 128)
SHAPES = {  # (N, K)
    "nvfp4": ((6, 64), (40, 48), (72, 352), (1000, 1600), (6144, 5120), (5120, 17408), (2560, 9216)),
    "fp8": ((6, 64), (72, 352), (1000, 1600), (2560, 4096)),
    "fp8_channel": ((1000, 1600),),
    "bf16": ((6, 64), (72, 352), (48, 5120), (1000, 1600), (4096, 2560)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def linears(device, request):
    """Of every family that this device can run."""
    return linears_of(device, request.param)


@pytest.fixture(scope="module")
def wide(device):
    return linears_of(device, "hopper")


@pytest.fixture(autouse=True)
def as_chosen(request):
    for name in ("linears", "wide"):
        if name in request.fixturenames:
            found = request.getfixturevalue(name)
            found.splits, found.twins, found.most = None, None, 120


def padded(x, rows):
    """So many rows of x, and NaN up to the tile: no row may see another."""
    tile = row_tile(rows)
    return torch.cat([x[:rows], torch.full((tile - rows, x.shape[1]), float("nan"), dtype=x.dtype)])


def extremes(x):
    """Rows of huge, tiny, mixed and single values."""
    x = x.clone()
    x[1::7] *= 2.0**100
    x[2::7] *= 2.0**-110
    x[3::7, ::3] *= 2.0**30
    x[4::7] = 0
    x[4::7, 5] = 1
    x[5::7] = -0.0
    return x


def halved(w):
    """The first half of K twice: with x and -x each sum is what its roundings leave, and shows their order."""
    half = w.shape[1] // 2
    match w:
        case Nvfp4Weight():
            w.packed[:, half // 2 :] = w.packed[:, : half // 2]
            w.block_scale[:, half // 16 :] = w.block_scale[:, : half // 16]
        case Fp8Weight() | WideWeight():
            w.data[:, half:] = w.data[:, :half]
    return w


def alone(call, x):
    """``call`` of 16 rows at a time, joined."""
    parts = [call(x[i : i + 16], i, 16) for i in range(0, x.shape[0], 16)]
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def same(call, x, rows=ROWS):
    """``call`` (x, first row, rows) -> outputs [rows of x, ...]: the bits of each row are those of 16."""
    want = alone(call, x)
    assert all(w.float().isfinite().any() for w in want)
    for n in rows:
        for w, found in zip(want, call(padded(x, n), 0, n), strict=True):
            assert torch.equal(found[:n].view(torch.int16), w[:n].view(torch.int16)), n


@pytest.mark.parametrize(("kind", "n", "k"), [(f, n, k) for f in FORMATS for n, k in SHAPES[f]])
def test_rows_have_the_bits_of_sixteen(device, linears, kind, n, k):
    stack = LinearWeights.of(device.gpu, repack(weight(kind, n, k, n + k)))
    x = inputs(128, k, seed=3)
    for each in (x, extremes(x)):
        same(lambda part, _, rows: run(device, linears, stack, part, rows), each)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1000, 1600), (2560, 4096)])
def test_what_roundings_leave_has_the_bits_of_sixteen(device, linears, kind, n, k):
    stack, x = LinearWeights.of(device.gpu, repack(halved(weight(kind, n, k, 7)))), inputs(128, k, seed=4)
    x[:, k // 2 :] = -x[:, : k // 2]
    same(lambda part, _, rows: run(device, linears, stack, part, rows), x)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("twins", [1, 2])
def test_every_split_and_any_number_of_clusters(device, wide, kind, splits, twins):
    if splits * twins > 8:
        pytest.skip("a cluster has eight blocks at most")
    stack, x = LinearWeights.of(device.gpu, repack(weight(kind, 1000, 1600, 5))), inputs(128, 1600)
    wide.splits, wide.twins = splits, twins
    for most in (1, 3, 5, 15):
        wide.most = most
        same(lambda part, _, rows: run(device, wide, stack, part, rows), x, (32, 64, 128))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "twins"), [(32, 1), (64, 1), (128, 1), (32, 2), (64, 2), (128, 2)])
def test_tensors_in_blocks_change_no_bit(device, wide, kind, rows, twins):
    k, n = 640, 384
    gate, up = (weight(kind, n, k, seed) for seed in (3, 4))
    pair, x = LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)), inputs(rows, k)
    wide.splits, wide.twins = 2, twins
    window, plain, out = wide.choose(pair.layout, rows).window, empty(device, rows, n), empty(device, rows, n)
    wide.linear(pair, device.rows(x), [plain], rows)
    blocks = type(out)(out.pointer, -window)
    wide.linear(pair, put_blocks(device, x, window), [blocks], rows)
    assert torch.equal(fetch_blocks(device, blocks, n), fetch(device, plain, rows))


@pytest.mark.parametrize("kind", FORMATS)
def test_residual_and_gate(device, linears, kind):
    n, k = 344, 1600
    gate, up = (weight(kind, n, k, seed) for seed in (3, 4))
    pair, single = (
        LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)),
        LinearWeights.of(device.gpu, repack(gate)),
    )
    x, res = inputs(128, k), inputs(128, n, seed=5)

    def call(part, first, rows):
        tile = part.shape[0]
        out, added = empty(device, tile, n), empty(device, tile, n)
        linears.linear(pair, device.rows(part), [out], rows)
        linears.linear(single, device.rows(part), [added], rows, residual=device.rows(res[first : first + tile]))
        return fetch(device, out, tile), fetch(device, added, tile)

    same(call, x)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(256, 768), (2560, 4096), (5120, 6144)])
def test_split_sums_and_norm(device, linears, kind, n, k):
    stack = LinearWeights.of(device.gpu, repack(weight(kind, n, k, 9)))
    splits = linears.choose(stack.layout, 128, may_split=True)
    scratch = device.poisoned(splits.sum_bytes(stack.layout) if isinstance(splits, StreamSplits) else 16)
    weights, res = device.up(torch.rand(n) + 0.5), inputs(128, n, seed=5)

    def call(part, first, rows):
        tile = part.shape[0]
        out, normal = empty(device, tile, n), empty(device, tile, n)
        linears.split_linear(
            *(stack, device.rows(part), out, rows, scratch),
            residual=device.rows(res[first : first + tile]),
            norm=Norm(weights, 1e-6, normal),
        )
        return fetch(device, out, tile), fetch(device, normal, tile)

    same(call, inputs(128, k))


@pytest.mark.parametrize("splits", [None, 1, 2, 8])
def test_a_stack_with_a_side_stack(device, linears, splits):
    k = 1600
    if splits is not None:
        if not hopper(linears._gpu.sm, linears._most_rows):
            pytest.skip("other kernels choose their splits themselves")
        linears.splits, linears.most = splits, 3
    for kind in ("nvfp4", "bf16"):
        stack = LinearWeights.of(device.gpu, repack([weight(kind, n, k, n) for n in (512, 96, 100)]))
        side = LinearWeights.of(device.gpu, repack([weight("bf16", 48, k, s) for s in (1, 2)]))

        def call(part, _, rows, stack=stack, side=side):
            tile = part.shape[0]
            outs = [empty(device, tile, n) for n in (512, 96, 100)]
            beside = [empty(device, tile, 48) for _ in range(2)]
            linears.linear(stack, device.rows(part), outs, rows, side=side, side_out=beside)
            return [fetch(device, each, tile) for each in (*outs, *beside)]

        same(call, inputs(128, k))


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_greedy(device, linears, rows):
    w, x = weight("nvfp4", 50_000, 256, 3), inputs(rows, 256)
    w.packed[40_000:] = w.packed[:10_000]  # ties
    w.block_scale[40_000:] = w.block_scale[:10_000]
    stack = LinearWeights.of(device.gpu, repack(w))
    found = check_greedy(device, linears, stack, x, rows)
    few = [check_greedy(device, linears, stack, x[i : i + 16], 16) for i in range(0, rows, 16)]
    assert torch.equal(found, torch.cat(few))


def test_kernels_of_each_family(linears):
    layout = repack(weight("nvfp4", 64, 640, 0)).layout
    kinds = {rows: type(linears.choose(layout, rows)) for rows in (16, 17, 64, 128)}
    few, many = kinds[16], {kinds[rows] for rows in (17, 64, 128)}
    assert many == {WideSplits if few is HopperSplits else few}
    assert few in (HopperSplits, ClusterSplits, StreamSplits)
