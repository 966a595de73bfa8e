"""kernels/linear_hopper.cu: what test_native_linear.py asks of the other kernels, for passes of at most 16 rows."""

import pytest
import torch
from native_linear_support import (
    FORMATS,
    SHAPES,
    check_exact,
    check_greedy,
    check_slice,
    cubin,
    empty,
    expected,
    fetch,
    fetch_blocks,
    inputs,
    put_blocks,
    run,
    ulps,
    weight,
)
from native_state_support import Device

from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.kernels.splits import HopperSplits, hopper
from edge_dflash.backends.cuda.memory import NULL, Matrix, Norm
from edge_dflash.weights.layout import WINDOW, repack

pytestmark = pytest.mark.gpu


class Split(Linears):
    """Linears with a number of splits of the test's choice, and fewer clusters."""

    splits, most = None, 1 << 30

    def choose(self, layout, rows, *, may_split=False):
        count = self._gpu.sm_count
        best = self.splits or min(HopperSplits.counts(layout), key=lambda s: HopperSplits.cost(layout, s, count))
        return HopperSplits.of(layout, best, count, lambda _, s, *block: min(self.most, 120 // s))


@pytest.fixture(scope="module")
def device():
    found = Device()
    assert hopper(found.gpu.sm, 16), "these kernels are for SM90"
    return found


@pytest.fixture(scope="module")
def linears(device):
    return Split(device.gpu, lambda unit: cubin(unit, "sm90a"), most_rows=16)


@pytest.fixture(autouse=True)
def as_split(linears):
    linears.splits, linears.most = None, 1 << 30


@pytest.mark.parametrize(("kind", "n", "k"), [*SHAPES, *((f, 72, 352) for f in FORMATS)])  # 352: half a block of 64
def test_equals_the_exact_product(device, linears, kind, n, k):
    w, x = weight(kind, n, k, n + k), inputs(16, k)
    stack = LinearWeights.of(device.gpu, repack(w))
    (found,) = run(device, linears, stack, x, 16)
    check_exact(found, expected(x, w), 2e-6)


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


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_never_depends_on_other_rows_or_its_place(device, linears, kind):
    k = 1600
    stack = LinearWeights.of(device.gpu, repack(weight(kind, 600, k, 1)))
    row = inputs(1, k, seed=7)
    seen = []
    for rows in (1, 7, 16):
        for place in range(rows):
            x = inputs(16, k, seed=100 * rows + place)
            x[place] = row[0]
            seen.append(run(device, linears, stack, x, rows)[0][place])
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("kind", FORMATS)
def test_residual_and_gate(device, linears, kind):
    n, k = 344, 256
    gate, up = (weight(kind, n, k, seed) for seed in (3, 4))
    x = inputs(16, k)
    g, u = (p.float() for p in run(device, linears, LinearWeights.of(device.gpu, repack((gate, up))), x, 16))
    res = inputs(16, n, seed=5)
    out = empty(device, 16, n)
    linears.linear(LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)), device.rows(x), [out], 16)
    assert ulps(fetch(device, out, 16), (torch.nn.functional.silu(g) * u).double()).max() <= 1
    linears.linear(LinearWeights.of(device.gpu, repack(gate)), device.rows(x), [out], 16, residual=device.rows(res))
    assert torch.equal(fetch(device, out, 16), (res + g).bfloat16())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(256, 768), (2560, 4096), (5120, 17408), (6, 64)])
def test_split_over_blocks(device, linears, kind, n, k):
    w, x = weight(kind, n, k, 9), inputs(16, k)
    stack, scratch = LinearWeights.of(device.gpu, repack(w)), device.poisoned(16)
    res, norm = inputs(16, n, seed=5), torch.rand(n) + 0.5
    out, normal, again = (empty(device, 16, n) for _ in range(3))
    norms = Norm(device.up(norm), 1e-6, normal)
    linears.split_linear(stack, device.rows(x), out, 16, scratch, residual=device.rows(res), norm=norms)
    found, normed = fetch(device, out, 16), fetch(device, normal, 16)
    want = res.double() + expected(x, w).bfloat16().double()
    assert (ulps(found, want) > 0).double().mean() < 0.03
    Small(device.gpu, device.module("small")).rms_norm(out, norms.weight, again, 16, n, 1e-6)
    assert torch.equal(fetch(device, again, 16), normed)


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


def test_a_slice_of_columns_is_accepted(device, linears):
    check_slice(device, linears, 320, 64)


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


def test_more_rows_than_the_kernels_take_are_refused(device, linears):
    with pytest.raises(ValueError, match="17 rows"):
        Linears.choose(linears, repack(weight("fp8", 64, 64, 1)).layout, 17)
