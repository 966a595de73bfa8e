"""The gated delta kernels on a GPU against the reference, and bit-equality of replay with single rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_linear_support import fetch_blocks
from native_state_support import bf16, commit

from edge_dflash.backends.cuda.kernels import delta as native_delta
from edge_dflash.backends.cuda.kernels import small as native_small
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.memory import Matrix
from edge_dflash.backends.reference.delta import DeltaMemory, DeltaWeights, gated_delta
from edge_dflash.model.ops import GatedDelta
from edge_dflash.model.program import DeltaState

pytestmark = pytest.mark.gpu
SHAPES = {
    "27b slice": DeltaShape(2, 6, 128, 128, 4, 1e-6, 16, 80),
    "short block": DeltaShape(2, 2, 128, 128, 4, 1e-6, 5, 40),
    "small heads": DeltaShape(2, 4, 64, 32, 4, 1e-6, 16, 80),
    "odd": DeltaShape(4, 4, 32, 64, 3, 1e-6, 11, 40),
    "wide block": DeltaShape(1, 2, 128, 64, 4, 1e-6, 32, 40),
}
PATHS = [(name, clusters) for name in SHAPES for clusters in ((True, False) if SHAPES[name].clusters else (False,))]


class Layer:
    """One layer on both sides."""

    def __init__(self, device, shape, clusters=True, seed=0):
        self.device, self.shape = device, shape
        g = self.g = torch.Generator().manual_seed(seed)
        s = shape
        self.op = GatedDelta(
            inputs=("qkv", "z", "a", "b"), output="o", state="s", conv="", a_log="", dt_bias="", norm="", eps=s.eps,
            key_heads=s.key_heads, value_heads=s.value_heads, key_dim=s.key_dim, value_dim=s.value_dim,
            conv_kernel=s.conv_kernel,
        )  # fmt: skip
        conv = bf16(s.conv_channels, s.conv_kernel, generator=g, scale=0.5)
        a_log, dt_bias = bf16(s.value_heads, generator=g), bf16(s.value_heads, generator=g)
        self.weights = DeltaWeights(conv, a_log, dt_bias, bf16(s.value_dim, generator=g, scale=0.2) + 1.0)
        self.memory = DeltaMemory(DeltaState(s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.conv_kernel))
        up = device.up
        packed = torch.from_numpy(s.packed_conv(conv.numpy()))
        zeros = torch.zeros
        self.layer = DeltaLayer(
            up(zeros(s.value_heads, s.key_dim, s.value_dim)),
            up(zeros(s.conv_kernel - 1, s.conv_channels, dtype=torch.bfloat16)),
            *(device.poisoned(s.tape_bytes[0]), device.poisoned(s.tape_bytes[1]), device.poisoned(s.tape_bytes[1])),
            *(up(packed), up(a_log), up(dt_bias), up(self.weights.norm)),
        )
        self.kernels = DeltaKernels(device.gpu, device.module(native_delta.UNIT), s, clusters=clusters)
        counters = up(zeros(s.counter_bytes // 4, dtype=torch.int32))
        self.scratch = DeltaScratch(device.poisoned(s.scratch_bytes), counters)
        device.set(pending=0)

    def inputs(self, rows):
        s = self.shape
        widths = (s.conv_channels, s.value_heads * s.value_dim, *[s.value_heads] * 2)
        return [bf16(rows, n, generator=self.g) for n in widths]

    def run(self, inputs, *, prefill=0, window=0):
        """``window``: outputs in blocks of such windows."""
        s, device = self.shape, self.device
        values = s.value_heads * s.value_dim
        padded = [device.rows(torch.cat((x, x.new_full((64, x.shape[1]), 0.5)))) for x in inputs]  # garbage behind
        most = s.prefill_rows if prefill else s.rows
        out = Matrix(device.poisoned(2 * most * values), -window or values)
        device.set(rows=prefill)
        self.kernels.run(DeltaTensors(*padded, out), self.layer, self.scratch, device.words(prefill=prefill > 0))
        device.set(pending=0)
        if window:
            return fetch_blocks(device, out, values)
        return device.read(out.pointer, (most, values), torch.bfloat16)[: prefill or s.rows]

    def flush(self):
        self.kernels.flush(self.layer, self.scratch, self.device.words())
        self.device.set(pending=0)

    def tape(self):
        s, read = self.shape, self.device.read
        u = read(self.layer.tape_u, (s.rows, s.conv_channels), torch.bfloat16)
        return u, *(read(x, (s.rows, s.value_heads), torch.float32) for x in (self.layer.tape_g, self.layer.tape_beta))

    def base(self):
        s, read = self.shape, self.device.read
        state = read(self.layer.state, (s.value_heads, s.key_dim, s.value_dim), torch.float32)
        return state, read(self.layer.history, (s.conv_kernel - 1, s.conv_channels), torch.bfloat16)

    def restore(self, base):
        self.device.gpu.write(self.layer.state, base[0].numpy())
        self.device.gpu.write(self.layer.history, base[1].view(torch.int16).numpy())
        self.device.set(pending=0)

    def reference(self, inputs, *, commits):
        rows = inputs[0].shape[0]
        padded = tuple(torch.cat((x, x.new_zeros(-rows % 16, x.shape[1]))) for x in inputs)
        return gated_delta(self.op, self.weights, self.memory, padded, rows, commits=commits)[:rows].bfloat16()


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("window", [64, 32])
def test_outputs_in_blocks_are_those_in_rows(device, clusters, window):
    layer = Layer(device, SHAPES["27b slice"], clusters)
    inputs = layer.inputs(16)
    assert torch.equal(layer.run(inputs, window=window), layer.run(inputs))


def relative(x, y):
    assert torch.isfinite(x.float()).all()
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize(("name", "clusters"), PATHS)
def test_passes_agree_with_the_reference(device, name, clusters):
    layer = Layer(device, SHAPES[name], clusters)
    errors = []

    def compare(inputs, prefill):
        got = layer.run(inputs, prefill=inputs[0].shape[0] if prefill else 0)
        errors.append(relative(got, layer.reference(inputs, commits=prefill)))
        state, history = layer.base()
        assert relative(state, layer.memory.state) < 1e-5
        assert torch.equal(history.float(), layer.memory.history)

    rows = layer.shape.rows
    compare(layer.inputs(37), True)
    compare(layer.inputs(rows), False)
    for k in (3, rows, 1, 0, 2):
        layer.memory.commit(k)
        device.set(pending=k)
        compare(layer.inputs(rows), False)
    layer.memory.commit(5)
    device.set(pending=5)
    compare(layer.inputs(2), True)  # replay and commit in one pass
    print(name, "output errors", [f"{e:.1e}" for e in errors])
    assert max(errors) < 2e-3


@pytest.mark.parametrize(("name", "clusters"), PATHS)
def test_replay_gives_the_bits_of_single_rows(device, name, clusters):
    layer = Layer(device, SHAPES[name], clusters)
    layer.run(layer.inputs(30), prefill=30)
    base = layer.base()
    rows = layer.shape.rows
    block = layer.inputs(rows)
    whole = layer.run(block)
    for k in range(rows + 1):
        layer.restore(base)
        layer.run(block)
        device.set(pending=k)
        layer.flush()
        replayed = layer.base()
        layer.restore(base)
        for r in range(k):  # plain decoding: one valid row a pass, replayed by the next
            other = layer.inputs(rows)
            one = [torch.cat((x[r : r + 1], y[1:])) for x, y in zip(block, other, strict=True)]
            device.set(pending=min(r, 1))
            assert torch.equal(layer.run(one)[0], whole[r])
        device.set(pending=min(k, 1))
        layer.flush()
        for x, y in zip(replayed, layer.base(), strict=True):
            assert torch.equal(x, y), k
        layer.restore(base)
        if k:
            out = layer.run([x[:k] for x in block], prefill=k)
            assert torch.equal(out, whole[:k])
            assert torch.equal(layer.base()[0], replayed[0])
            assert torch.equal(layer.base()[1], replayed[1])


def test_strides_and_a_verify_that_is_not_committed(device):
    shape = SHAPES["27b slice"]
    layer = Layer(device, shape)
    layer.run(layer.inputs(20), prefill=20)
    base = layer.base()
    block = layer.inputs(16)
    first = layer.run(block)
    layer.run(layer.inputs(16))  # never committed
    assert torch.equal(layer.run(block), first)
    assert torch.equal(layer.base()[0], base[0])
    joined = torch.cat(block, dim=1)
    matrix = device.rows(joined)
    parts, at = [], 0
    for x in block:
        offset = 2 * at
        parts.append(replace(matrix, pointer=matrix.pointer.at(offset, matrix.pointer.nbytes - offset)))
        at += x.shape[1]
    values = shape.value_heads * shape.value_dim
    out = Matrix(device.poisoned(2 * 16 * (values + 8)), values + 8)
    layer.kernels.run(DeltaTensors(*parts, out), layer.layer, layer.scratch, device.words())
    assert torch.equal(device.read(out.pointer, (16, values + 8), torch.bfloat16)[:, :values], first)


def test_clusters_give_the_bits_of_three_kernels(device):
    layers = [Layer(device, SHAPES["27b slice"], clusters) for clusters in (True, False)]
    for pending in (0, 3, 16, 1, 7):
        inputs = layers[0].inputs(16)
        outs = []
        for layer in layers:
            device.set(pending=pending)
            outs.append(layer.run(inputs))
        assert torch.equal(*outs)
        for x, y in zip(*([*layer.base(), *layer.tape()] for layer in layers), strict=True):
            assert torch.equal(x, y)
        assert not device.gpu.read(layers[0].scratch.counters, (layers[0].shape.counter_bytes,), np.uint8).any()


def test_pending_rows_may_be_committed_by_the_kernel_right_before(device):
    layer, small = Layer(device, SHAPES["27b slice"]), Small(device.gpu, device.module(native_small.UNIT))
    s = layer.shape
    layer.run(layer.inputs(20), prefill=20)
    base, block, other = layer.base(), layer.inputs(16), layer.inputs(16)
    matrices = [device.rows(x) for x in other]
    values = s.value_heads * s.value_dim
    for k in (1, 5, 16):
        layer.restore(base)
        layer.run(block)
        device.set(pending=k)
        want, want_base = layer.run(other), layer.base()
        outs = [Matrix(device.poisoned(2 * 16 * values), values) for _ in range(2)]
        for stale in (0, 16, k):
            layer.restore(base)
            layer.run(block)
            device.set(pending=stale)

            def passes(k=k, outs=outs):
                for committed, out in ((k, outs[0]), (-1, outs[1])):  # the second pass repeats the first's own rows
                    commit(small, device.control, committed)
                    layer.kernels.run(DeltaTensors(*matrices, out), layer.layer, layer.scratch, device.words())

            device.gpu.capture(passes).launch()
            for out in outs:
                assert torch.equal(device.read(out.pointer, (16, values), torch.bfloat16), want), (k, stale)
            for x, y in zip(layer.base(), want_base, strict=True):
                assert torch.equal(x, y)
