"""Attention and convolutions of several slots: rows and memory of each are bit for bit those of its lane alone.

"Alone" is a pass of one slot over memory of one lane. Slots differ in length and lane; rows of idle slots are NaN.
"""

from dataclasses import replace

import pytest
import torch
from native_lanes_support import IDLE, LANES, Slot, bits, input_rows, set_slots
from native_state_support import bf16

from edge_dflash.backends.cuda.kernels import attend as native_attend
from edge_dflash.backends.cuda.kernels import conv as native_conv
from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.memory import Matrix, Norm
from edge_dflash.model.ops import GroupedConv

pytestmark = pytest.mark.gpu


FULL = [Slot(3, 40), Slot(0, 700), Slot(7, 0), Slot(1, 129), Slot(2, 511), Slot(6, 650), Slot(5, 512), Slot(4, 333)]
ATTENTION = [  # changes of a shape, slots
    ({}, [Slot(0, 513), Slot(1, 40)]),
    ({}, [Slot(2, 40), IDLE, Slot(0, 700), Slot(1, 128)]),
    ({}, FULL),
    ({"rows": 4}, FULL),
    ({}, [IDLE, IDLE, Slot(6, 300)]),
    ({"heads": 24, "kv_heads": 4}, FULL),  # more blocks than multiprocessors
    ({"heads": 24, "kv_heads": 4, "context": 5000}, [Slot(1, 4900), Slot(0, 4090), IDLE, Slot(5, 17)]),
    ({"dim": 128, "rope": 128, "heads": 8, "kv_heads": 2, "gated": False, "bidirectional": True}, FULL),
    ({"dim": 128, "rope": 128, "heads": 32, "kv_heads": 16, "context": 2300}, [Slot(4, 2041), Slot(2, 1020), IDLE]),
    ({"dim": 128, "rope": 128, "heads": 4, "kv_heads": 2, "window": 128}, [Slot(0, 700), IDLE, Slot(1, 100)]),
    ({"dim": 64, "rope": 64, "heads": 6, "kv_heads": 2}, FULL),
    ({"dim": 64, "rope": 64, "heads": 5, "kv_heads": 1, "rows": 32}, [IDLE, Slot(1, 600), Slot(3, 90)]),
    ({"dim": 128, "heads": 8, "kv_heads": 2, "kv": "bfloat16"}, FULL),
    ({"kv": "bfloat16"}, [Slot(1, 63), IDLE, Slot(0, 0), Slot(2, 700)]),
]


class Kv:
    """K and V of all lanes, all of it random, and the layer's inputs."""

    def __init__(self, device, shape, seed=0):
        self.device, self.shape, g = device, shape, torch.Generator().manual_seed(seed)
        self.g, size = g, shape.lanes * shape.kv_bytes
        if shape.kv == "fp8":
            self.stored = [torch.randint(0, 0x7F, (size,), dtype=torch.uint8, generator=g) for _ in range(2)]
        else:
            self.stored = [torch.randn(size // 2, generator=g).bfloat16() for _ in range(2)]
        half = shape.rope_dims // 2
        self.vectors = [device.up(torch.rand(shape.head_dim, generator=g) + 0.5) for _ in range(2)]
        self.vectors += [device.up(torch.randn(shape.kv_rows, half, generator=g)) for _ in range(2)]

    def memory(self):
        """A fresh copy of all lanes."""
        scales = (0.0131, 0.0077) if self.shape.kv == "fp8" else (1.0, 1.0)
        return KvMemory(*(self.device.up(x) for x in self.stored), *scales, *self.vectors)

    def of(self, memory, lane):
        """The memory of one lane."""
        size = self.shape.kv_bytes
        return replace(memory, k=memory.k.at(lane * size, size), v=memory.v.at(lane * size, size))

    def widths(self):
        s = self.shape
        return s.heads * s.head_dim * (2 if s.gated else 1), s.kv_heads * s.head_dim, s.kv_heads * s.head_dim


def attend(device, shape, inputs, memory, *, prefill=0, slots=1):
    rows = inputs[0].shape[0]
    out = Matrix(device.poisoned(2 * rows * shape.heads * shape.head_dim), shape.heads * shape.head_dim)
    attention = Attention(device.gpu, device.module(native_attend.UNIT), shape)
    device.set(rows=prefill)
    words = device.words(prefill=prefill > 0, block=None if prefill else rows // slots, slots=slots)
    x = AttendTensors(*(device.rows(x) for x in inputs), out)
    attention.attend(x, memory, device.poisoned(shape.scratch_bytes), words)
    return bits(device, out.pointer).view(rows, -1)


def shape_of(heads=6, kv_heads=1, dim=256, rope=64, context=768, rows=16, gated=True, **changes):
    return AttendShape(heads, kv_heads, dim, rope, 1e-6, context, rows, 64, gated=gated, lanes=LANES, **changes)


def touched(shape, slots, rows):
    """[lanes, Hkv, kv_rows]: rows of K and V that a pass may write."""
    mask = torch.zeros(shape.lanes, shape.kv_heads, shape.kv_rows, dtype=torch.bool)
    for slot in slots:
        if slot.lane >= 0:
            mask[slot.lane, :, slot.length : slot.length + rows] = True
    return mask


@pytest.mark.parametrize(("changes", "slots"), ATTENTION)
@pytest.mark.parametrize("rows", [None, 1])
def test_attention_of_a_slot_is_that_of_its_lane_alone(device, changes, slots, rows):
    shape = shape_of(**changes)
    kv, block = Kv(device, shape), rows or shape.rows
    inputs = [input_rows(slots, block, n, kv.g) for n in kv.widths()]
    joint, alone, before = (kv.memory() for _ in range(3))
    set_slots(device, slots)
    found = attend(device, shape, inputs, joint, slots=len(slots))
    for i, slot in enumerate(slots):
        part = slice(i * block, (i + 1) * block)
        if slot.lane < 0:
            assert not found[part].any()
            continue
        device.set(length=slot.length, lane=0)
        one = attend(device, replace(shape, lanes=1), [x[part] for x in inputs], kv.of(alone, slot.lane))
        assert torch.equal(found[part], one), (i, slot)
    for now, want, was in zip(*((m.k, m.v) for m in (joint, alone, before)), strict=True):
        assert torch.equal(bits(device, now), bits(device, want))
        changed = (bits(device, now) != bits(device, was)).view(shape.lanes, shape.kv_heads, shape.kv_rows, -1).any(-1)
        assert not (changed & ~touched(shape, slots, block)).any()
        assert changed.any() == any(slot.lane >= 0 for slot in slots)


@pytest.mark.parametrize("changes", [{}, {"dim": 64, "rope": 64}, {"kv": "bfloat16"}])
def test_a_prompt_goes_to_any_lane(device, changes):
    shape = shape_of(**changes)
    kv = Kv(device, shape)
    inputs = [bf16(50, n, generator=kv.g) for n in kv.widths()]
    joint, alone = kv.memory(), kv.memory()
    device.set(length=130, lane=5)
    found = attend(device, shape, inputs, joint, prefill=50)
    device.set(lane=0)
    assert torch.equal(found, attend(device, replace(shape, lanes=1), inputs, kv.of(alone, 5), prefill=50))
    assert torch.equal(bits(device, joint.k), bits(device, alone.k))
    assert torch.equal(bits(device, joint.v), bits(device, alone.v))


@pytest.mark.parametrize("kv", ["fp8", "bfloat16"])
def test_layers_appended_together_in_slots(device, kv):
    shape = shape_of(heads=2, kv_heads=2, dim=128, rope=128, gated=False, kv=kv)
    slots = [Slot(2, 40), IDLE, Slot(0, 700)]
    layers = [Kv(device, shape, seed) for seed in range(9)]  # one more than a launch takes
    inputs = [[input_rows(slots, 8, n, layer.g) for n in layer.widths()[1:]] for layer in layers]
    joint, alone = ([layer.memory() for layer in layers] for _ in range(2))
    append = Attention(device.gpu, device.module(native_attend.UNIT), shape).append
    set_slots(device, slots)
    matrices = [[device.rows(x) for x in pair] for pair in inputs]
    append([(*x, m) for x, m in zip(matrices, joint, strict=True)], device.words(block=8, slots=3))
    one = Attention(device.gpu, device.module(native_attend.UNIT), replace(shape, lanes=1)).append
    for i, slot in enumerate(slots):
        if slot.lane < 0:
            continue
        device.set(length=slot.length, lane=0)
        for layer, memory, pair in zip(layers, alone, inputs, strict=True):
            x = [device.rows(t[i * 8 : i * 8 + 8]) for t in pair]
            one([(*x, layer.of(memory, slot.lane))], device.words(block=8))
    for layer, now, want in zip(layers, joint, alone, strict=True):
        for each, other, stored in zip((now.k, now.v), (want.k, want.v), layer.stored, strict=True):
            assert torch.equal(bits(device, each), bits(device, other))
            assert not torch.equal(bits(device, each), stored.view(torch.uint8))


@pytest.mark.parametrize("normed", [False, True])
def test_convolutions_do_not_look_into_the_slot_before(device, normed):
    g, rows, columns, slots = torch.Generator().manual_seed(2), 5, 256, 3
    kernels = native_conv.Convolutions(device.gpu, device.module(native_conv.UNIT))
    op = GroupedConv(inputs=("u", "c"), output="y", base="b", side=1, taps=3, group_size=16)
    u, c = bf16(slots * rows, columns, generator=g), bf16(slots * rows, 6 * columns // 16, generator=g)
    x, base = bf16(slots * rows, columns, generator=g), device.up(bf16(2, 3, columns, generator=g))
    weight = device.up(torch.rand(columns, generator=g) + 0.5)

    def run(count, part):
        out, normal = (Matrix(device.poisoned(2 * count * rows * columns), columns) for _ in range(2))
        given = [device.rows(t[part]) for t in (u, c)]
        norm = Norm(weight, 1e-6, normal) if normed else None
        kernels.convolve(op, *given, base, out, rows, columns, device.rows(x[part]), norm, count)
        return torch.cat([bits(device, m.pointer).view(count * rows, -1) for m in (out, *([normal] * normed))], 1)

    whole = run(slots, slice(None))
    for slot in range(slots):
        part = slice(slot * rows, (slot + 1) * rows)
        assert torch.equal(whole[part], run(1, part))
