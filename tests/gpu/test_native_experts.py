"""Mixtures of experts on the device: every stage against float64, and the bits of a row whatever the other rows are."""

from functools import cache

import numpy as np
import pytest
import torch
from native_linear_support import check_exact, cubin, ulps, values, weight
from native_state_support import Device, bf16

from edge_dflash.backends.cuda.kernels.experts import ExpertKernels, ExpertsBuffers, ExpertsShape, ExpertWeights, Forced
from edge_dflash.backends.cuda.kernels.small import UNIT, Small
from edge_dflash.backends.cuda.memory import NULL, Allocator, Matrix, Norm
from edge_dflash.weights.layout import repack

pytestmark = pytest.mark.gpu

SHAPES = {  # hidden, experts, chosen, intermediate, shared members, renormalised
    "golden": (64, 8, 2, 16, 3, True),
    "odd": (80, 12, 3, 48, 0, False),
    "36": (2048, 24, 8, 512, 1, True),
    "30": (2048, 16, 8, 768, 0, True),
    "122": (3072, 10, 8, 1024, 1, True),
    "many": (96, 512, 16, 32, 1, True),
}
CASES = [(form, name) for name in SHAPES for form in ("nvfp4", "fp8", "bf16")]
ROWS = (1, 2, 8, 16, 17, 64, 512, 1100)
EPS = 1e-6


@cache
def device():
    return Device()


@cache
def kernels():
    gpu = device().gpu
    arch = f"sm{gpu.sm}" + ("a" if gpu.sm >= 90 else "")
    return ExpertKernels(gpu, lambda unit: cubin(unit, arch)), Small(gpu, device().module(UNIT))


class Layer:
    """A layer's weights on the device and as float64; ``router`` [experts, hidden] replaces random values."""

    def __init__(self, form, shape, router=None, seed=0):
        hidden, experts, chosen, inner, shared, renormalised = shape
        self.shape = ExpertsShape(hidden, experts, chosen, inner, shared, renormalised, form, form)
        generator = torch.Generator().manual_seed(seed)
        self.router = bf16(experts, hidden, generator=generator, scale=hidden**-0.5) if router is None else router
        self.judge = bf16(1, hidden, generator=generator, scale=hidden**-0.5)
        members = self.shape.experts + self.shape.shared
        kinds = [(weight(form, inner, hidden, 3 * e + 1), weight(form, inner, hidden, 3 * e + 2),
                  weight(form, hidden, inner, 3 * e + 3)) for e in range(members)]  # fmt: skip
        ups, downs = [repack((g, u), swiglu=True) for g, u, _ in kinds], [repack(d) for _, _, d in kinds]
        assert ups[0].layout == self.shape.up
        assert downs[0].layout == self.shape.down
        up = device().gpu.upload
        self.weights = ExpertWeights(
            device().up(self.router.bfloat16()), device().up(self.judge.bfloat16()) if shared else NULL,
            *(up(np.concatenate([getattr(one, part) for one in stack])) for stack in (ups, downs)
              for part in ("data", "scale")),
        )  # fmt: skip
        self.values = [tuple(v * s.double() for v, s in map(values, kind)) for kind in kinds]
        self.norm = torch.rand(hidden, generator=generator) + 0.5
        self.norm_weight = device().up(self.norm)


@cache
def layer(form, name):
    return Layer(form, SHAPES[name])


def rows_of(shape, rows, seed=7):
    return bf16(rows, shape.hidden, generator=torch.Generator().manual_seed(seed))


class Ran:
    """What a pass left on the device."""

    def __init__(self, layer, x, *, residual=None, valid=None, forced=None, room=0):
        gpu, shape, rows = device().gpu, layer.shape, len(x)
        self.shape, self.rows, self.tile = shape, rows, shape.tile(rows, gpu.sm)
        memory = Allocator(gpu)
        buffers = self.buffers = ExpertsBuffers.take(memory, shape, rows + room)
        for pointer in (buffers.logits, buffers.list, buffers.ids, buffers.weights, buffers.gated, buffers.sums):
            gpu.fill(pointer, 0xFF)
        gpu.fill(buffers.distinct)
        out, normal = (Matrix(device().poisoned(2 * rows * shape.hidden), shape.hidden) for _ in range(2))
        run, small = kernels()
        valid = NULL if valid is None else gpu.upload(np.array([valid], np.int32))
        norm = Norm(layer.norm_weight, EPS, normal)
        before = None if residual is None else device().rows(residual)
        for _ in range(2):  # lists and counters are left ready for the next pass
            run.run(shape, layer.weights, buffers, device().rows(x), out, rows, residual=before, norm=norm,
                    valid=valid, forced=forced)  # fmt: skip
        self.out, self.norm = (self.read(m.pointer, shape.hidden, torch.bfloat16) for m in (out, normal))
        small.rms_norm(out, layer.norm_weight, normal, rows, shape.hidden, EPS)
        self.norm_again = self.read(normal.pointer, shape.hidden, torch.bfloat16)
        self.logits = self.read(buffers.logits, shape.stride, torch.bfloat16)
        self.ids = self.read(buffers.ids, shape.chosen, torch.int32)
        self.weights = self.read(buffers.weights, shape.slots, torch.float32)
        self.sums = device().read(buffers.sums, (rows, shape.slots, shape.hidden), torch.float32)
        self.distinct = int(gpu.read(buffers.distinct, (1,), np.uint64)[0]) // 2

    def read(self, pointer, columns, dtype):
        return device().read(pointer, (self.rows, columns), dtype)

    def entries(self):
        """[(member, rows, slots)] of the list."""
        tile = self.tile
        words = device().read(self.buffers.list, (self.buffers.list.nbytes // 4,), torch.int32)
        count, found = int(words[0]), []
        for at in range(4, 4 + count * (4 + tile), 4 + tile):
            lines = words[at + 4 : at + 4 + int(words[at] >> 16)]
            found.append((int(words[at] & 0xFFFF), (lines >> 8).tolist(), (lines & 255).tolist()))
        return found

    def gated(self, count):
        shape = (count, self.tile, self.shape.intermediate)
        return device().read(self.buffers.gated, shape, torch.bfloat16)


def probabilities(logits, shape):
    z = logits[:, : shape.experts].double().numpy()
    e = np.exp(z - z.max(1, keepdims=True))
    return (e / e.sum(1, keepdims=True)).astype(np.float32)


def best(p, chosen):
    """The chosen, ascending: higher p first, then the lower index."""
    return torch.from_numpy(np.sort(np.argsort(-p, 1, kind="stable")[:, :chosen], 1).astype(np.int32))


def check_choice(ran, layer):
    shape = ran.shape
    p = probabilities(ran.logits, shape)
    assert torch.equal(ran.ids, best(p, shape.chosen))
    want = torch.from_numpy(p).gather(1, ran.ids.long()).double()
    if shape.renormalised:
        want /= want.sum(1, keepdim=True)
    assert torch.allclose(ran.weights[:, : shape.chosen].double(), want, rtol=2e-6, atol=0)
    judged = torch.sigmoid(ran.logits[:, shape.experts].double())[:, None].expand(-1, shape.shared)
    assert torch.allclose(ran.weights[:, shape.chosen :].double(), judged, rtol=2e-6, atol=0)


def listed(ids, shape, tile):
    """The list that the ids want."""
    found = []
    for member in range(shape.experts + shape.shared):
        if member < shape.experts:
            lines, slots = (part.tolist() for part in (ids == member).nonzero(as_tuple=True))
        else:
            lines, slots = list(range(len(ids))), [shape.chosen + member - shape.experts] * len(ids)
        found += [(member, lines[i : i + tile], slots[i : i + tile]) for i in range(0, len(lines), tile)]
    return found


def check_products(ran, layer, x):
    shape, entries = ran.shape, ran.entries()
    assert entries == listed(ran.ids, shape, ran.tile)
    assert ran.distinct == len(set(ran.ids.flatten().tolist()))
    gated = ran.gated(len(entries))
    got, want, sums, exact = [], [], [], []
    for (member, rows, slots), a in zip(entries, gated, strict=True):
        gate, up, down = layer.values[member]
        own = a[: len(rows)]
        g, u = ((x[rows].cuda().double() @ m.T).bfloat16().double() for m in (gate, up))
        got.append(own.cuda())
        want.append(torch.nn.functional.silu(g) * u)
        sums.append(ran.sums[rows, slots].cuda().double())
        exact.append(own.cuda().double() @ down.T)
    got, want, sums, exact = (torch.cat(part) for part in (got, want, sums, exact))
    # g and u of another order of sums round apart where they lie between two BF16 values
    assert ((got.double() - want).abs() / want.abs().amax(1, keepdim=True)).max() < 0.016
    assert (ulps(got, want) > 1).double().mean() < 0.02
    assert ((sums - exact).abs() / exact.abs().amax(1, keepdim=True)).max() < 1e-5


@pytest.mark.parametrize(("form", "name"), CASES)
@pytest.mark.parametrize("rows", [1, 7, 16, 130, 300, 1030])
def test_every_stage(form, name, rows):
    one = layer(form, name)
    x = rows_of(one.shape, rows)
    residual = rows_of(one.shape, rows, 8)
    ran = Ran(one, x, residual=residual)
    exact = x.double() @ torch.cat((one.router, one.judge)).double().T
    used = one.shape.experts + (one.shape.shared > 0)
    check_exact(ran.logits[:, :used], exact[:, :used], 2e-6)
    check_choice(ran, one)
    check_products(ran, one, x)
    total = (ran.weights[:, :, None].double() * ran.sums.double()).sum(1)
    assert torch.equal(ran.norm, ran.norm_again)
    plain = Ran(one, x)
    check_exact(plain.out, total, 2e-6)
    assert torch.equal(ran.out, (residual + plain.out.float()).bfloat16())


@pytest.mark.parametrize(("form", "name"), CASES)
def test_bits_do_not_depend_on_other_rows(form, name):
    one = layer(form, name)
    x = rows_of(one.shape, ROWS[-1])
    whole = Ran(one, x)
    parts = [(0, rows) for rows in ROWS[:-1]] + [(5, 1), (15, 2), (100, 16), (511, 1), (300, 32)]
    for first, rows in parts:
        ran = Ran(one, x[first : first + rows], room=first)
        for what in ("logits", "ids", "weights", "sums", "out", "norm"):
            assert torch.equal(getattr(ran, what), getattr(whole, what)[first : first + rows]), (what, first, rows)


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_ties_go_to_the_lower_index(rows):
    shape = SHAPES["36"]
    router = bf16(24, 2048, generator=torch.Generator().manual_seed(3), scale=2048**-0.5)
    router[5:20] = router[4]
    one = Layer("nvfp4", shape, router)
    x = rows_of(one.shape, rows)
    ran = Ran(one, x)
    assert all(len(set(row[4:20].tolist())) == 1 for row in ran.logits)
    check_choice(ran, one)
    router[:] = 0
    ran = Ran(Layer("nvfp4", shape, router), x)
    assert ran.ids.tolist() == [list(range(8))] * rows
    assert torch.allclose(ran.weights[:, :8], torch.tensor(0.125), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_probabilities_that_vanish(rows):
    router = torch.zeros(24, 2048)
    router[::3, 0], router[1::3, 0] = 80, -80
    one = Layer("nvfp4", SHAPES["36"], router)
    x = rows_of(one.shape, rows)
    x[:, 0] = 1.0
    x[::2, 0] = -1.0
    ran = Ran(one, x)
    assert set(ran.logits[:, 0].tolist()) <= {80.0, -80.0}
    check_choice(ran, one)
    one.router[:, 0] = torch.where(torch.arange(24) == 20, 80.0, -80.0)  # one expert has all of it
    ran = Ran(Layer("nvfp4", SHAPES["36"], one.router), x.abs())
    assert ran.ids.tolist() == [[*range(7), 20]] * rows
    assert ran.weights[:, :8].tolist() == [[0.0] * 7 + [1.0]] * rows
    assert torch.isfinite(ran.out.float()).all()


@pytest.mark.parametrize("form", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("rows", [9, 16, 200])
def test_all_rows_to_the_same_experts(form, rows):
    one = layer(form, "36")
    x = rows_of(one.shape, 1).expand(rows, -1)
    ran = Ran(one, x)
    assert ran.distinct == 8
    check_products(ran, one, x)
    assert (ran.out == ran.out[0]).all()
    assert torch.equal(ran.out[:1], Ran(one, x[:1]).out)


@pytest.mark.parametrize("rows", [3, 16, 70])
def test_experts_that_are_forced(rows):
    one, gpu = layer("nvfp4", "36"), device().gpu
    rng = np.random.default_rng(5)
    table = np.array([rng.permutation(24)[:8] for _ in range(50)], np.int32)
    forced = Forced(gpu.upload(table), 50, gpu.upload(np.array([31], np.int32)))
    x = rows_of(one.shape, rows)
    ran = Ran(one, x, forced=forced)
    assert ran.ids.tolist() == np.sort(table[(31 + np.arange(rows)) % 50], 1).tolist()
    assert (ran.weights[:, :8] == 0.125).all()
    check_products(ran, one, x)
    assert torch.equal(ran.logits, Ran(one, x).logits)


@pytest.mark.parametrize(("rows", "valid"), [(16, 5), (64, 17), (512, 0), (512, 100)])
def test_rows_behind_those_that_count(rows, valid):
    one = layer("nvfp4", "36")
    x = rows_of(one.shape, rows)
    x[valid:] = torch.nan
    ran = Ran(one, x, residual=x, valid=valid)
    want = Ran(one, x[:valid], residual=x[:valid]) if valid else None
    assert ran.distinct == (want.distinct if want else 0)
    for what in ("logits", "ids", "weights", "out", "norm") if want else ():
        assert torch.equal(getattr(ran, what)[:valid], getattr(want, what)), what
    assert (ran.out[valid:].view(torch.int16) == -1).all()
