from itertools import pairwise

import pytest
import torch
from native_linear_support import cubin, empty, expected, fetch, ulps, weight
from native_state_support import bf16

from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights, Tiles
from edge_dflash.backends.cuda.memory import NULL, Matrix
from edge_dflash.weights.layout import repack

pytestmark = pytest.mark.gpu

FORMATS = ("nvfp4", "fp8", "fp8_channel", "bf16")
SHAPES = (
    (6, 64, 20),
    (40, 48, 33),
    (96, 384, 150),
    (1000, 272, 300),
    (5120, 1600, 520),
    (304, 17408, 260),
)  # N, K, rows
ROWS = (1, 32, 40, 64, 100, 190, 256, 300, 512, 700)  # every width of a tile


@pytest.fixture(scope="module", params=["hopper", "generic"])
def linears(request, device):
    def load(unit):
        return cubin(unit, f"sm{device.gpu.sm}" + ("a" if device.gpu.sm >= 90 else ""))

    out = Linears(device.gpu, load)
    out._tiles = Tiles(device.gpu, load, hopper=request.param == "hopper")
    return out


def inputs(rows, k, seed=0):
    return bf16(rows, k, generator=torch.Generator().manual_seed(seed), scale=2.0)


def run(device, linears, stack, x, **options):
    columns = stack.layout.columns[:1] if stack.layout.swiglu else stack.layout.columns
    out = [empty(device, x.shape[0], n) for n in columns]
    linears.tiles(stack, device.rows(x), out, x.shape[0], **options)
    return [fetch(device, m, x.shape[0]) for m in out]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k", "rows"), SHAPES)
def test_equals_the_exact_product(device, linears, kind, n, k, rows):
    w, x = weight(kind, n, k, n + k), inputs(rows, k)
    (found,) = run(device, linears, LinearWeights.of(device.gpu, repack(w)), x)
    exact = expected(x, w)
    error = (found.double() - exact).abs() - exact.abs() * 2.0**-8  # beyond half a BF16 step
    assert (error / exact.abs().amax(1, keepdim=True)).max() < 2e-5  # one long chain of sums
    assert (ulps(found, exact) > 0).double().mean() < 0.02


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_never_depends_on_other_rows_or_on_their_number(device, linears, kind):
    k = 1600
    stack = LinearWeights.of(device.gpu, repack(weight(kind, 600, k, 1)))
    row, seen = inputs(1, k, seed=7), []
    for rows in ROWS:
        for place in {0, rows // 2, rows - 1}:
            x = inputs(rows, k, seed=rows + place)
            x[place] = row[0]
            seen.append(run(device, linears, stack, x)[0][place])
    x[5] = row[0]
    for count in (6, 70, 200):
        valid = device.up(torch.tensor([count], dtype=torch.int32))
        seen.append(run(device, linears, stack, x, valid=valid)[0][5])
    assert all(torch.equal(seen[0], other) for other in seen)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_row_of_weights_never_depends_on_the_other_weights(device, linears, kind):
    k = 320
    large = weight(kind, 33_000, k, 1)
    cut = {name: getattr(large, name)[:200] for name in ("packed", "block_scale", "data") if hasattr(large, name)}
    if kind == "fp8_channel":
        cut["scale"] = large.scale[:200]
    small = type(large)(**{**vars(large), **cut})
    for rows in (20, 128, 700):
        x = inputs(rows, k)
        (few,), (many,) = (run(device, linears, LinearWeights.of(device.gpu, repack(w)), x) for w in (small, large))
        assert torch.equal(few, many[:, :200])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [520, 2048])
def test_few_weights_of_many_rows_give_the_bits_of_few_rows(device, linears, kind, rows):
    k = 320
    stack = LinearWeights.of(device.gpu, repack(weight(kind, 96, k, 6)))
    x = inputs(rows, k)
    (found,) = run(device, linears, stack, x)
    for first in range(0, rows, 500):
        assert torch.equal(found[first : first + 20], run(device, linears, stack, x[first : first + 20])[0])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [20, 190, 300])
def test_residual_gate_and_several_outputs(device, linears, kind, rows):
    n, k = 344, 256
    gate, up = (weight(kind, n, k, seed) for seed in (3, 4))
    x, res = inputs(rows, k), inputs(rows, n, seed=5)
    single = LinearWeights.of(device.gpu, repack(gate))
    g, u = (run(device, linears, LinearWeights.of(device.gpu, repack(w)), x)[0] for w in (gate, up))
    (gated,) = run(device, linears, LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)), x)
    assert ulps(gated, (torch.nn.functional.silu(g.float()) * u.float()).double()).max() <= 1
    into = device.rows(res)
    linears.tiles(single, device.rows(x), [into], rows, residual=into)
    assert torch.equal(fetch(device, into, rows), (res + g.float()).bfloat16())
    odd, shifted = empty(device, rows, n + 3), device.poisoned(rows * (n + 3) * 2 + 2)
    odd = Matrix(shifted.at(2, rows * (n + 3) * 2), n + 3)  # neither start nor rows at 16 bytes
    wide_res = device.rows(torch.cat((res, res[:, :3]), 1))
    linears.tiles(single, device.rows(x), [odd], rows, residual=wide_res)
    found = fetch(device, odd, rows)
    assert torch.equal(found[:, :n], (res + g.float()).bfloat16())
    assert found[:, n:].isnan().all()
    parts = [weight(kind, m, k, m) for m in (512, 96, 100)]
    together = run(device, linears, LinearWeights.of(device.gpu, repack(parts)), x)
    for part, out in zip(parts, together, strict=True):
        assert torch.equal(out, run(device, linears, LinearWeights.of(device.gpu, repack(part)), x)[0])


@pytest.mark.parametrize("count", [0, 1, 128, 200, 384, 1000])
def test_reads_the_count_from_the_device(device, linears, count):
    k, n, rows = 512, 300, 384
    w, x = weight("nvfp4", n, k, 3), inputs(rows, k)
    x[count:] = float("nan")
    stack = LinearWeights.of(device.gpu, repack(w))
    (found,) = run(device, linears, stack, x, valid=device.up(torch.tensor([count], dtype=torch.int32)))
    there = min(count, rows)
    if there:
        assert (ulps(found[:there], expected(x[:there], w)) > 0).double().mean() < 0.02
    assert found[there:].isnan().all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [20, 128, 600])
def test_launches_in_a_row_give_the_same_bits_again(device, linears, kind, rows):
    k = 1024
    w = weight(kind, k, k, 2)
    stack = LinearWeights.of(device.gpu, repack(w))
    buffers = [device.rows(inputs(rows, k)), *(empty(device, rows, k) for _ in range(4))]

    def chain():
        for x, y in pairwise(buffers):
            linears.tiles(stack, x, [y], rows, valid=NULL)

    def results():
        return [fetch(device, buffer, rows) for buffer in buffers[1:]]

    want = []
    for x in buffers[:-1]:
        want.append(expected(fetch(device, x, rows).float() if want else inputs(rows, k), w))
        linears.tiles(stack, x, [buffers[len(want)]], rows)
        assert (ulps(results()[len(want) - 1], want[-1]) > 0).double().mean() < 0.02
    alone = results()
    graph = device.gpu.capture(chain)
    for _ in range(20):
        for buffer in buffers[1:]:
            device.gpu.fill(buffer.pointer, 0xFF)
        graph.launch()
        assert all(torch.equal(one, again) for one, again in zip(alone, results(), strict=True))
