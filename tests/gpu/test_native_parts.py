"""Parts of K that a block takes in turn, or the blocks of a cluster at once: the same bits, on any number of blocks."""

import copy

import pytest
import torch
from golden_pairs import same_bits
from native_backend_support import ENGINE, Nearness, native, prompt
from native_linear_support import FORMATS, check_greedy, cubin, empty, fetch, inputs, weight

from edge_dflash.backends.cuda import backend as backends
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels import linear
from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.splits import ClusterSplits, choose_splits
from edge_dflash.checks.lossless import Adversary, oracle_until
from edge_dflash.decode.generation import generate
from edge_dflash.decode.options import Options
from edge_dflash.weights.layout import repack

pytestmark = pytest.mark.gpu
COUNTS = (1, 3, 20)  # of multiprocessors


class Parted(Linears):
    """Linears whose launches have a given number of splits, in turn or not."""

    splits, in_turn, count = 2, False, 20

    def choose(self, layout, rows, *, may_split=False):
        tile = 16 if rows <= 16 else 32
        if self.in_turn:
            return ClusterSplits.in_turn(layout, tile, self.splits, self.count)
        clusters = max(1, self.count // self.splits)
        return ClusterSplits.of(layout, tile, self.splits, self.count, lambda *block: clusters)


@pytest.fixture(scope="module")
def linears(device):
    return Parted(device.gpu, lambda unit: cubin(unit, "sm90a"))


def _all(linears, splits, call):
    """What ``call`` gives in every form."""
    linears.splits, found = splits, []
    for linears.in_turn in (False, True):
        for linears.count in COUNTS:
            found.append(call())
    return found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k", "splits"), [(2600, 1600, 2), (1000, 5120, 4), (5120, 17408, 8), (40, 64, 1)])
def test_in_turn_gives_the_bits_of_a_cluster(device, linears, kind, n, k, splits):
    stack = LinearWeights.of(device.gpu, repack(weight(kind, n, k, 1)))
    res = inputs(32, n, seed=5)
    for rows in (5, 16, 32):
        tile = 16 if rows <= 16 else 32
        x, added = device.rows(inputs(tile, k, seed=rows)), device.rows(res[:tile])

        def call(residual, x=x, tile=tile, rows=rows):
            out = empty(device, tile, n)
            linears.linear(stack, x, [out], rows, residual=residual)
            return fetch(device, out, tile)

        for residual in (None, added):
            first, *others = _all(linears, splits, lambda r=residual: call(r))
            assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("splits", [2, 4])
def test_a_side_stack_and_a_gated_pair_take_parts_in_turn(device, linears, splits):
    k = 1344
    gate, up = (weight("nvfp4", 440, k, seed) for seed in (3, 4))
    pair, x = LinearWeights.of(device.gpu, repack((gate, up), swiglu=True)), device.rows(inputs(16, k))
    side = LinearWeights.of(device.gpu, repack([weight("bf16", 48, k, s) for s in (1, 2)]))

    def call():
        outs = [empty(device, 16, n) for n in (440, 48, 48)]
        linears.linear(pair, x, outs[:1], 16, side=side, side_out=outs[1:])
        return torch.cat([fetch(device, out, 16) for out in outs], 1)

    first, *others = _all(linears, splits, call)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("rows", [16, 32])
def test_greedy_with_parts_in_turn(device, linears, rows):
    stack = LinearWeights.of(device.gpu, repack(weight("nvfp4", 5000, 1280, 8)))
    x = inputs(rows, 1280)
    first, *others = _all(linears, 2, lambda: check_greedy(device, linears, stack, x, rows))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("clusters", "form"), [(0, "_1_"), (10, "_2_")])
def test_a_thor_without_and_with_clusters(device, clusters, form):
    gpu = copy.copy(device.gpu)
    gpu.sm, gpu.sm_count, gpu.most_clusters = 110, 20, lambda *block: clusters
    linears = Linears(gpu, lambda unit: cubin(unit, "sm90a"))
    stack = LinearWeights.of(device.gpu, repack(weight("nvfp4", 3000, 5120, 8)))
    assert form in linears.choose(stack.layout, 16).kernel
    x = inputs(32, 5120)
    check_greedy(device, linears, stack, x, 32)
    check_greedy(device, linears, stack, x[:16], 16)


class Twelve(Gpu):
    """This device as one of twelve multiprocessors that holds no clusters."""

    def __init__(self):
        super().__init__()
        self.sm_count = 12

    def most_clusters(self, kernel, *block):
        return 0


def in_turn(layout, rows):
    """What such a device chooses."""
    return choose_splits(layout, rows, 90, 12, most_rows=16, clusters=lambda *block: 0)


def as_clusters(layout, rows, sm, sm_count, *, clusters, **_):
    """The same splits on all of the device, a block of a cluster each."""
    alone = in_turn(layout, rows)
    return ClusterSplits.of(layout, alone.tile, alone.splits, sm_count, clusters)


def logits_of(backend, ids):
    """Of a prefill in two chunks, of drafts, and of a verify."""
    backend.reset()
    prefilled = backend.prefill(ids)
    found = [prefilled.logits()]
    anchor = prefilled.argmax()[-1]
    return [*found, backend.propose(anchor).logits(), backend.verify(ids[:16]).logits()]


def test_an_engine_for_twelve_multiprocessors_gives_the_bits_of_one_with_clusters(monkeypatch):
    ids = prompt("hybrid", 90)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "choose_splits", as_clusters)
        whole = native.__wrapped__("hybrid")
        try:
            wanted = logits_of(whole, ids)
        finally:
            whole.close()
    monkeypatch.setattr(backends, "Gpu", Twelve)
    asked = []
    monkeypatch.setattr(linear, "choose_splits", lambda *a, **k: asked.append(choose_splits(*a, **k)) or asked[-1])
    backend = native.__wrapped__("hybrid")
    try:
        assert {1, 2} <= {splits.serial_parts for splits in asked}
        assert all(splits.serial_parts == splits.splits and splits.blocks <= 12 for splits in asked)
        for found, want in zip(logits_of(backend, ids), wanted, strict=True):
            assert found.tobytes() == want.tobytes()
        check_lossless(backend, ids[:40])
        near = Nearness("hybrid", "nvfp4", ENGINE, backend)
        for seed in range(3):
            near.reset()
            near("prefill", prompt("hybrid", 70, seed=seed))
            near("verify", prompt("hybrid", 16, seed=seed + 10))
        near.judge()
    finally:
        backend.close()


def check_lossless(backend, ids):
    """Tokens and states of runs with several accept lengths are those of the backend's own drafts."""
    backend.reset()
    options = Options(max_new_tokens=24)
    tokens = generate(backend, ids, options).tokens
    state = backend.snapshot()
    for right in (0, 6, 15):
        backend.reset()
        assert generate(Adversary(backend, [*ids, *tokens], oracle_until(right)), ids, options).tokens == tokens
        assert same_bits(backend.snapshot(), state)
