"""kernels/linear_hopper.cu besides what test_native_linear.py asks of all: splits, clusters, orders, repetition."""

import pytest
import torch
from native_linear_support import (
    FORMATS,
    check_greedy,
    empty,
    expected,
    fetch,
    fetch_blocks,
    inputs,
    linears_of,
    put_blocks,
    run,
    ulps,
    weight,
)

from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.kernels.splits import hopper
from edge_dflash.backends.cuda.memory import NULL, Matrix, Norm
from edge_dflash.weights.layout import WINDOW, repack

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def of_hopper(device):
    assert hopper(device.gpu.sm, 16), "these kernels are for SM90"
    return linears_of(device, "hopper")


@pytest.fixture
def linears(of_hopper):
    of_hopper.splits, of_hopper.most = None, 120
    return of_hopper


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_every_split_and_any_number_of_clusters(device, linears, kind, splits):
    n, k = 1000, 1600  # 8 quads, the last with no rows of its own unit 3; 25 blocks of 64 k
    w, x = weight(kind, n, k, 5), inputs(16, k)
    stack, exact, seen = LinearWeights.of(device.gpu, repack(w)), expected(x, w), []
    for most in (1, 3, 7, 8, 11, 16):  # quads alone, quads and a half, halves alone
        linears.splits, linears.most = splits, most
        seen.append(run(device, linears, stack, x, 16)[0])
    assert (ulps(seen[0], exact) > 0).double().mean() < 0.02
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("columns", [(48, 48), (16,)])
def test_a_stack_with_a_side_stack(device, linears, splits, kind, columns):
    k = 640
    parts = [weight(kind, n, k, n) for n in (512, 96, 100)]
    gates = [weight("bf16", n, k, s) for s, n in enumerate(columns)]
    x = inputs(16, k)
    stack, side = LinearWeights.of(device.gpu, repack(parts)), LinearWeights.of(device.gpu, repack(gates))
    outs, side_outs = [empty(device, 16, n) for n in (512, 96, 100)], [empty(device, 16, n) for n in columns]
    linears.splits = splits
    for most in (1, 5, 6, 8):  # 12 halves of quads: a cluster with a side unit has all to none
        linears.most = most
        for out in (*outs, *side_outs):
            device.gpu.fill(out.pointer, 0xFF)
        linears.linear(stack, device.rows(x), outs, 16, side=side, side_out=side_outs)
        for w, out in zip((*parts, *gates), (*outs, *side_outs), strict=True):
            assert (ulps(fetch(device, out, 16), expected(x, w)) > 0).double().mean() < 0.02


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize(("n", "low", "high"), [(50_000, 0, 40_000), (70_000, 66_000, 68_000)])  # ids beyond 16 bits
def test_greedy(device, linears, splits, n, low, high):
    w, x = weight("nvfp4", n, 256, 3), inputs(16, 256)
    if low:
        w.block_scale[low:high] = 0x7E  # the largest: one of these wins
    w.packed[high:] = w.packed[low : low + n - high]  # ties
    w.block_scale[high:] = w.block_scale[low : low + n - high]
    linears.splits = splits
    assert check_greedy(device, linears, LinearWeights.of(device.gpu, repack(w)), x, 16).min() >= low


@pytest.mark.parametrize("kind", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_the_same_bits_every_time(device, linears, kind, splits):
    """A race would move them: repeated launches on other copies of the weights, with nothing between.

    Three clusters have 11 quads each: slots of sums are used again five times.
    """
    n, k = 4096, 2560
    w, x = weight(kind, n, k, 3), inputs(16, k)
    repacked = repack(w)
    stacks = [LinearWeights.of(device.gpu, repacked) for _ in range(4)]
    outs = [empty(device, 16, n) for _ in range(40)]
    rows = device.rows(x)
    linears.splits, linears.most = splits, 3
    for i, out in enumerate(outs):
        linears.linear(stacks[i % 4], rows, [out], 16)
    found = [fetch(device, out, 16) for out in outs]
    assert (ulps(found[0], expected(x, w)) > 0).double().mean() < 0.02
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_the_order_of_the_inputs_changes_no_bit(device, linears, kind, splits):
    k = 2624  # 41 blocks: parts of other lengths in all slices
    stack = LinearWeights.of(device.gpu, repack(weight(kind, 1000, k, 4)))
    gates = LinearWeights.of(device.gpu, repack([weight("bf16", 48, k, s) for s in (1, 2)]))
    x, seen = inputs(16, k), []
    linears.splits = splits
    for rows in (device.rows(x), put_blocks(device, x, WINDOW[stack.layout.format])):
        outs = [empty(device, 16, n) for n in (1000, 48, 48)]
        linears.linear(stack, rows, outs[:1], 16, side=gates, side_out=outs[1:])
        seen.append([fetch(device, out, 16) for out in outs])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("window", [64, 32])
def test_outputs_in_blocks_are_those_in_rows(device, linears, window):
    n, k = 448, 256
    x, res = inputs(16, k), inputs(16, n, seed=5)
    gate, up = (weight("nvfp4", n, k, seed) for seed in (3, 4))
    pair, one = (
        LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)),
        LinearWeights.of(device.gpu, repack(gate)),
    )
    gated, normal, again = ([empty(device, 16, n), Matrix(device.poisoned(32 * n), -window)] for _ in range(3))
    weights, found = device.up(torch.rand(n) + 0.5), []
    for i in (0, 1):
        out = empty(device, 16, n)
        linears.linear(pair, device.rows(x), [gated[i]], 16)
        norm = Norm(weights, 1e-6, normal[i])
        linears.split_linear(one, device.rows(x), out, 16, NULL, residual=device.rows(res), norm=norm)
        Small(device.gpu, device.module("small")).rms_norm(out, weights, again[i], 16, n, 1e-6)
    for rows, blocks in (gated, normal, again):
        found.append(fetch(device, rows, 16))
        assert torch.equal(found[-1], fetch_blocks(device, blocks, n))
    assert torch.equal(found[1], found[2])


def test_an_order_that_a_kernel_does_not_know_is_refused(device, linears):
    stack = LinearWeights.of(device.gpu, repack(weight("bf16", 64, 64, 1)))
    x, out = put_blocks(device, inputs(16, 64), 64), Matrix(device.poisoned(2048), -32)
    with pytest.raises(ValueError, match="blocks"):
        linears.linear(stack, x, [empty(device, 16, 64)], 16)
    with pytest.raises(ValueError, match="blocks"):
        linears.linear(stack, device.rows(inputs(16, 64)), [out], 16)
