"""The state kernels on a GPU against the reference backend: bytes, values, and bit-equality across passes."""

from dataclasses import replace

import pytest
import torch
from native_state_support import bf16

from edge_dflash.backends.cuda.kernels import attend as native_attend
from edge_dflash.backends.cuda.kernels import cycle as native_cycle
from edge_dflash.backends.cuda.kernels import small as native_small
from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention
from edge_dflash.backends.cuda.kernels.attend import KvMemory as DeviceKv
from edge_dflash.backends.cuda.kernels.cycle import CycleKernels
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.memory import Control, Matrix, Norm
from edge_dflash.backends.reference.attention import KvMemory, attend, rope_table, store_context
from edge_dflash.backends.reference.dense import rms_norm
from edge_dflash.decode.backend import Precision
from edge_dflash.model.ops import Attend
from edge_dflash.model.program import KvState
from edge_dflash.model.specs import RopeSpec
from edge_dflash.weights.e4m3 import to_e4m3

pytestmark = pytest.mark.gpu
SCALES = (0.0131, 0.0077)  # K, V


class Layer:
    """One attention layer on both sides, with ``length`` random stored rows."""

    def __init__(self, device, shape, length, seed=0):
        self.device, self.shape, self.length = device, shape, length
        g = self.g = torch.Generator().manual_seed(seed)
        dim, kv = shape.head_dim, shape.kv
        rope = RopeSpec(1e6, shape.rope_dims)
        window, plus_one = shape.window, shape.gated
        self.op = Attend(
            inputs=("q", "k", "v"), output="o", state="s", q_norm="", k_norm="", eps=shape.eps, plus_one=plus_one,
            rope=rope, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=dim, gated=shape.gated,
            bidirectional=shape.bidirectional, window=window,
        )  # fmt: skip
        self.norms = [bf16(dim, generator=g, scale=0.3) + (0.0 if plus_one else 1.0) for _ in range(2)]  # q, k
        self.table = rope_table(rope, shape.kv_rows)
        self.memory = KvMemory(KvState(shape.kv_heads, dim), shape.kv_rows, Precision("bfloat16", kv), SCALES)
        for stored, size in zip(self.memory.stored, (dim**0.5, 1.0), strict=True):
            x = torch.randn(length, shape.kv_heads, dim, generator=g) * (size / dim**0.5 if size > 1 else 1.0)
            stored[:length] = to_e4m3(x, SCALES[0 if size > 1 else 1]) if kv == "fp8" else x.bfloat16()
        self.upload()

    def upload(self):
        device, shape = self.device, self.shape
        pointers = []
        for stored in self.memory.stored:
            pointer = device.poisoned(shape.kv_bytes)
            full = torch.full((shape.kv_heads, shape.kv_rows, shape.head_dim), 0x7F, dtype=stored.dtype)
            full[:, : self.length] = stored[: self.length].transpose(0, 1)
            device.gpu.write(pointer, (full.view(torch.int16) if full.dtype == torch.bfloat16 else full).numpy())
            pointers.append(pointer)
        norms = [device.up(w + 1.0 if self.op.plus_one else w) for w in self.norms]
        scales = SCALES if shape.kv == "fp8" else (1.0, 1.0)
        self.kv = DeviceKv(*pointers, *scales, norms[1], norms[0], *(device.up(t) for t in self.table))

    def inputs(self, rows):
        s = self.shape
        q = s.heads * s.head_dim * (2 if s.gated else 1)
        return [bf16(rows, n, generator=self.g) for n in (q, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim)]

    def run(self, inputs, *, start=None, prefill=0, shape=None):
        """Device result [rows, Hq*D] BF16."""
        device, shape = self.device, shape or self.shape
        device.set(length=self.length if start is None else start, rows=prefill)
        rows = inputs[0].shape[0]
        assert rows == (prefill or shape.rows)
        out = Matrix(device.poisoned(2 * rows * shape.heads * shape.head_dim), shape.heads * shape.head_dim)
        attention = Attention(device.gpu, device.module(native_attend.UNIT), shape)
        matrices = [device.rows(x) for x in inputs]
        scratch = device.poisoned(shape.scratch_bytes)
        attention.attend(AttendTensors(*matrices, out), self.kv, scratch, device.words(prefill=prefill > 0))
        return device.read(out.pointer, (rows, out.stride), torch.bfloat16)

    def reference(self, inputs):
        rows = inputs[0].shape[0]
        padded = -(-rows // 16) * 16
        q, k, v = (torch.cat((x, x.new_zeros(padded - rows, x.shape[1]))) for x in inputs)
        table = tuple(t[self.length : self.length + padded] for t in self.table)
        store_context(self.op, k, v, self.norms[1], table, self.memory, self.length, rows)
        return attend(self.op, q, self.norms[0], table, self.memory, self.length, rows)[:rows].bfloat16()

    def stored(self, first, stop):
        """K and V rows on the device, [rows, Hkv, D]."""
        s = self.shape
        dtype = torch.uint8 if s.kv == "fp8" else torch.bfloat16
        full = [self.device.read(p, (s.kv_heads, s.kv_rows, s.head_dim), dtype) for p in (self.kv.k, self.kv.v)]
        return [x[:, first:stop].transpose(0, 1) for x in full]


def shape_of(heads=6, kv_heads=1, dim=256, rope=64, context=1024, rows=16, **changes):
    return AttendShape(heads, kv_heads, dim, rope, 1e-6, context, rows, **changes)


def relative(x, y):
    assert torch.isfinite(x.float()).all()
    return float((x.double() - y.double()).norm() / y.double().norm())


CASES = [
    ({"gated": True}, 513),
    ({"gated": True}, 1),
    ({"gated": True}, 0),
    ({"heads": 6, "kv_heads": 2, "gated": True, "context": 6000}, 5000),
    ({"heads": 8, "kv_heads": 2, "dim": 128, "rope": 128}, 300),
    ({"heads": 8, "kv_heads": 2, "dim": 128, "rope": 128, "bidirectional": True}, 300),
    ({"heads": 8, "kv_heads": 2, "dim": 128, "rope": 128, "bidirectional": True, "rows": 11}, 77),
    ({"heads": 4, "kv_heads": 2, "dim": 128, "rope": 128, "window": 128, "context": 4000}, 2499),
    ({"heads": 4, "kv_heads": 2, "dim": 128, "rope": 128, "window": 7, "bidirectional": True, "context": 4000}, 2047),
    ({"heads": 4, "kv_heads": 4, "dim": 64, "rope": 64, "rows": 8}, 127),
    ({"heads": 5, "kv_heads": 1, "dim": 64, "rope": 32, "window": 100, "rows": 32}, 1023),
    ({"heads": 16, "kv_heads": 1, "dim": 64, "rope": 64, "rows": 32, "bidirectional": True}, 200),
    ({"heads": 8, "kv_heads": 1, "dim": 128, "rope": 128, "kv": "bfloat16"}, 700),
    ({"heads": 6, "kv_heads": 1, "dim": 256, "rope": 64, "kv": "bfloat16", "gated": True, "rows": 3}, 40),
    # Where the widths of splits change (Hopper), within the block's rows
    ({"heads": 32, "kv_heads": 16, "dim": 128, "rope": 128, "context": 2300}, 1020),
    ({"heads": 32, "kv_heads": 16, "dim": 128, "rope": 128, "context": 2300, "bidirectional": True}, 2041),
    ({"heads": 32, "kv_heads": 32, "dim": 128, "rope": 128, "context": 2300, "window": 700}, 505),
    ({"heads": 32, "kv_heads": 32, "dim": 128, "rope": 64, "context": 2300, "window": 200, "rows": 32}, 1500),
    ({"heads": 12, "kv_heads": 1, "gated": True}, 130),
    ({"heads": 24, "kv_heads": 4, "gated": True, "context": 3200}, 1250),  # fewer, then more splits than blocks
    ({"heads": 24, "kv_heads": 4, "gated": True, "context": 3200}, 3000),
]


# Every mask that a drafter's config can ask for (tests/model/test_drafter_masks.py), with windows below and above a
# block, where the context is shorter than the window and where it is longer.
CASES += [
    ({"heads": 8, "kv_heads": 2, "dim": dim, "rope": dim, "rows": rows, "bidirectional": both, "window": window,
      "context": 4000, "kv": kv}, length)
    for both in (False, True)
    for window in (None, 9, 24, 2048)
    for dim, rows, kv, length in ((128, 16, "fp8", 20), (128, 8, "fp8", 2500), (64, 16, "bfloat16", 2500))
]  # fmt: skip


@pytest.mark.parametrize(("changes", "length"), CASES)
def test_attention_agrees_with_the_reference(device, changes, length):
    layer = Layer(device, shape_of(**changes), length)
    inputs = layer.inputs(layer.shape.rows)
    got, want = layer.run(inputs), layer.reference(inputs)
    error = relative(got, want)
    stop = length + layer.shape.rows
    expected = [m[:stop] for m in layer.memory.stored]
    k, v = layer.stored(0, stop)
    assert torch.equal(v, expected[1])
    off = (k != expected[0]).float().mean()  # a sum of squares in another order may move a value over a boundary
    print(f"{changes} length {length}: error {error:.1e}, K values that differ {off:.1e}")
    assert torch.equal(k[:length], expected[0][:length])
    assert off <= 2e-4
    assert error < (2e-3 if layer.shape.kv == "fp8" else 4e-3)  # over BF16 keys queries and probabilities are BF16


@pytest.mark.parametrize(("changes", "length"), [c for c in CASES if not c[0].get("bidirectional")])
def test_prefill_gives_the_bits_of_verify(device, changes, length):
    changes = {**changes, "context": changes.get("context", 1024) + 100}
    layer = Layer(device, shape_of(**changes, prefill_rows=64), length)
    rows = layer.shape.rows
    inputs = layer.inputs(3 * rows if rows < 20 else rows + 5)
    whole = layer.run(inputs, prefill=inputs[0].shape[0])
    assert relative(whole, layer.reference(inputs)) < 4e-3
    layer.upload()
    for first in range(0, inputs[0].shape[0] - rows + 1, min(rows, 5)):
        part = layer.run([x[first : first + rows] for x in inputs], start=length + first)
        assert torch.equal(part.view(torch.int16), whole[first : first + rows].view(torch.int16)), first


def test_a_row_does_not_depend_on_rows_behind_it_or_on_the_number_of_splits(device):
    layer = Layer(device, shape_of(context=2048, gated=True), 1020)
    inputs = layer.inputs(16)
    base = layer.run(inputs)
    for rows in (1, 7, 15):
        other = [torch.cat((x[:rows], y[rows:] * 3)) for x, y in zip(inputs, layer.inputs(16), strict=True)]
        assert torch.equal(layer.run(other)[:rows], base[:rows])
        alone = shape_of(context=2048, gated=True, rows=rows)
        assert torch.equal(layer.run([x[:rows] for x in inputs], shape=alone), base[:rows])
    longer = Layer(device, shape_of(context=9000, gated=True), 1020)
    longer.kv = replace(longer.kv, cosine=layer.kv.cosine, sine=layer.kv.sine)
    assert torch.equal(longer.run(inputs), base)


def test_every_bf16_value_is_stored_as_the_codec_stores_it(device):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float().view(-1, 256)  # with infinities and NaN
    for scale in (1.0, 0.0131, 3e-5):
        shape = shape_of(heads=1, kv_heads=1, prefill_rows=256)
        layer = Layer(device, shape, 0)
        kv = DeviceKv(layer.kv.k, layer.kv.v, 1.0, scale, *([layer.kv.k_norm] * 2), layer.kv.cosine, layer.kv.sine)
        device.set(length=0, rows=256)
        attention = Attention(device.gpu, device.module(native_attend.UNIT), shape)
        matrix = device.rows(values)
        attention.append([(matrix, matrix, kv)], device.words(prefill=True))
        assert torch.equal(layer.stored(0, 256)[1][:, 0], to_e4m3(values, scale))


@pytest.mark.parametrize("kv", ["fp8", "bfloat16"])
def test_layers_appended_together_store_what_attention_stores(device, kv):
    shape = shape_of(heads=2, kv_heads=2, dim=128, rope=128, kv=kv)
    layers = [Layer(device, shape, 40, seed) for seed in range(9)]  # one more than a launch takes
    inputs, wanted, rows = [layer.inputs(16) for layer in layers], [], []
    for layer, x in zip(layers, inputs, strict=True):
        layer.run(x)
        wanted.append(layer.stored(0, 64))
        layer.upload()
        assert not torch.equal(layer.stored(0, 64)[0], wanted[-1][0])
        rows.append((device.rows(x[1]), device.rows(x[2]), layer.kv))
    device.set(length=40)
    Attention(device.gpu, device.module(native_attend.UNIT), shape).append(rows, device.words())
    for layer, want in zip(layers, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer.stored(0, 64), want, strict=True))


def test_columns_are_copied_wherever_they_lie(device):
    frame, g = CycleKernels(device.gpu, device.module(native_cycle.UNIT)), torch.Generator().manual_seed(4)
    values = bf16(16, 13_000, generator=g)
    source, out = device.rows(values), device.rows(torch.zeros(16, 13_000))
    places = [(0, 2560), (2560, 6), (2568, 10_002), (12_576, 8), *((12_600 + 10 * i, 4) for i in range(6))]  # columns

    def at(matrix, column):
        return Matrix(matrix.pointer.at(2 * column, matrix.pointer.nbytes - 2 * column), matrix.stride)

    parts = [[at(matrix, column) for column, _ in places] for matrix in (source, out)]
    frame.copy(*parts, [width for _, width in places], 16)
    want = torch.zeros(16, 13_000)
    for column, width in places:
        want[:, column : column + width] = values[:, column : column + width]
    assert torch.equal(device.read(out.pointer, (16, 13_000), torch.bfloat16), want.bfloat16())


def test_dense_kernels(device):
    small, g = Small(device.gpu, device.module(native_small.UNIT)), torch.Generator().manual_seed(3)
    x, w = bf16(16, 5120, generator=g), torch.randn(5120, generator=g)
    out = device.rows(torch.zeros(16, 5120))
    small.rms_norm(device.rows(x), device.up(w), out, 16, 5120, 1e-6)
    want = rms_norm(x, w, 1e-6, plus_one=False).bfloat16()
    assert relative(device.read(out.pointer, (16, 5120), torch.bfloat16), want) < 2e-4
    ids = torch.tensor([3, 0, 15, 3], dtype=torch.int32)
    small.embed(device.up(ids), device.rows(x).pointer, out, 4, 5120, 16)
    assert torch.equal(device.read(out.pointer, (4, 5120), torch.bfloat16), x[ids.long()].bfloat16())
    normed, apart = (device.rows(torch.zeros(4, 5120)) for _ in range(2))
    small.embed(device.up(ids), device.rows(x).pointer, out, 4, 5120, 16, Norm(device.up(w), 1e-6, normed))
    small.rms_norm(out, device.up(w), apart, 4, 5120, 1e-6)
    found, want = (device.read(each.pointer, (4, 5120), torch.int16) for each in (normed, apart))
    assert torch.equal(device.read(out.pointer, (4, 5120), torch.bfloat16), x[ids.long()].bfloat16())
    assert torch.equal(found, want)
    device.set(rows=6)
    small.last_row(device.rows(x), out.pointer, 5120, 16, device.word(Control.ROWS))
    assert torch.equal(device.read(out.pointer, (5120,), torch.bfloat16), x[5].bfloat16())
