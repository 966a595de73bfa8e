"""Linears of one sequence on every family of kernels that the device runs, and their tiles: exact, and row by row."""

import pytest
import torch
from native_linear_support import (
    FORMATS,
    SHAPES,
    check_exact,
    check_slice,
    empty,
    expected,
    fetch,
    inputs,
    linears_of,
    run,
    ulps,
    weight,
)

from edge_dflash.backends.cuda.kernels.linear import LinearWeights
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.kernels.splits import StreamSplits
from edge_dflash.backends.cuda.memory import Norm
from edge_dflash.weights.layout import repack

pytestmark = pytest.mark.gpu


def _sum_bytes(linears, layout):
    splits = linears.choose(layout, 32, may_split=True)
    return splits.sum_bytes(layout) if isinstance(splits, StreamSplits) else 16


@pytest.fixture(scope="module", params=["own", "hopper", "few"])
def linears(device, request):
    return linears_of(device, request.param)


@pytest.mark.parametrize(("kind", "n", "k"), [*SHAPES, *((f, 72, 352) for f in FORMATS)])  # 352: half a block of 64
def test_equals_the_exact_product(device, linears, kind, n, k):
    w, x = weight(kind, n, k, n + k), inputs(32, k)
    stack = LinearWeights.of(device.gpu, repack(w))
    exact = expected(x, w)
    (wide,) = run(device, linears, stack, x, 32)
    check_exact(wide, exact, 2e-6)
    (first,) = run(device, linears, stack, x[:16], 16)
    assert torch.equal(first, wide[:16])
    out = empty(device, 32, n)
    linears.tiles(stack, device.rows(x), [out], 32)
    check_exact(fetch(device, out, 32), exact, 2e-5)  # one long chain of sums


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_never_depends_on_other_rows_or_its_place(device, linears, kind):
    k = 1600
    stack = LinearWeights.of(device.gpu, repack(weight(kind, 600, k, 1)))
    row = inputs(1, k, seed=7)
    seen = []
    for rows, tile in ((1, 16), (16, 16), (17, 32), (32, 32)):
        for place in range(0, tile, 5):
            x = inputs(tile, k, seed=100 * rows + place)
            x[place] = row[0]
            seen.append(run(device, linears, stack, x, rows)[0][place])
    assert all(torch.equal(seen[0], other) for other in seen)
    seen = []
    for rows, place in ((1, 0), (40, 39), (300, 0), (300, 131), (512, 511)):
        x = inputs(rows, k, seed=place)
        x[place] = row[0]
        out = empty(device, rows, 600)
        linears.tiles(stack, device.rows(x), [out], rows)
        seen.append(fetch(device, out, rows)[place])
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("kind", FORMATS)
def test_residual_and_gate(device, linears, kind):
    n, k = 344, 256  # at most one window a warp: then every block sums in the same order
    gate, up = (weight(kind, n, k, seed) for seed in (3, 4))
    x = inputs(16, k)
    g, u = (p.float() for p in run(device, linears, LinearWeights.of(device.gpu, repack((gate, up))), x, 16))
    res = inputs(16, n, seed=5)
    pair, single = (
        LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)),
        LinearWeights.of(device.gpu, repack(gate)),
    )
    out = empty(device, 16, n)
    linears.linear(pair, device.rows(x), [out], 16)
    gated = (torch.nn.functional.silu(g) * u).double()
    assert ulps(fetch(device, out, 16), gated).max() <= 1
    linears.linear(single, device.rows(x), [out], 16, residual=device.rows(res))
    assert torch.equal(fetch(device, out, 16), (res + g).bfloat16())
    for stack, options, want in ((pair, {}, gated), (single, {"residual": device.rows(res)}, (res + g).double())):
        linears.tiles(stack, device.rows(x), [out], 16, **options)
        error = (fetch(device, out, 16).double() - want).abs()
        assert (error / (g.abs() * u.abs() + g.abs() + res.abs()).double()).max() < 0.02  # other order of sums


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(256, 768), (2560, 4096), (5120, 17408), (6, 64)])
def test_split_over_blocks(device, linears, kind, n, k):
    w, x = weight(kind, n, k, 9), inputs(32, k)
    stack = LinearWeights.of(device.gpu, repack(w))
    scratch = device.poisoned(_sum_bytes(linears, stack.layout))
    res, norm = inputs(32, n, seed=5), torch.rand(n) + 0.5
    out, normal, again = (empty(device, 32, n) for _ in range(3))
    norms = Norm(device.up(norm), 1e-6, normal)
    linears.split_linear(stack, device.rows(x), out, 32, scratch, residual=device.rows(res), norm=norms)
    found, normed = fetch(device, out, 32), fetch(device, normal, 32)
    want = res.double() + expected(x, w).bfloat16().double()
    assert (ulps(found, want) > 0).double().mean() < 0.03
    Small(device.gpu, device.module("small")).rms_norm(out, norms.weight, again, 32, n, 1e-6)
    assert torch.equal(fetch(device, again, 32), normed)
    linears.split_linear(stack, device.rows(x[16:]), out, 16, scratch, residual=device.rows(res[16:]))
    assert torch.equal(fetch(device, out, 16), found[16:])
    linears.split_linear(stack, device.rows(x), out, 32, scratch)
    assert (ulps(fetch(device, out, 32), expected(x, w)) > 0).double().mean() < 0.02


def test_a_stack_with_a_side_stack(device, linears):
    k = 640
    parts = [weight("nvfp4", n, k, n) for n in (512, 96, 100)]
    gates = [weight("bf16", 48, k, s) for s in (1, 2)]
    x = inputs(16, k)
    stack, side = LinearWeights.of(device.gpu, repack(parts)), LinearWeights.of(device.gpu, repack(gates))
    outs, side_outs = [empty(device, 16, n) for n in (512, 96, 100)], [empty(device, 16, 48) for _ in gates]
    linears.linear(stack, device.rows(x), outs, 16, side=side, side_out=side_outs)
    for w, out in zip((*parts, *gates), (*outs, *side_outs), strict=True):
        (alone,) = run(device, linears, LinearWeights.of(device.gpu, repack(w)), x, 16)
        near = (alone.float() - fetch(device, out, 16).float()).abs() / alone.float().abs().amax()
        assert near.max() < 2.0**-8  # other blocks sum in another order
    whole = empty(device, 16, 1024)
    two = LinearWeights.of(device.gpu, repack(parts[:2]))
    linears.linear(two, device.rows(x), [whole], 16)
    linears.linear(two, device.rows(x), outs[:2], 16)
    assert torch.equal(fetch(device, whole, 16)[:, :608], torch.cat([fetch(device, o, 16) for o in outs[:2]], 1))


def test_a_slice_of_rows_is_accepted(device, linears):
    check_slice(device, linears, 320, 64)
