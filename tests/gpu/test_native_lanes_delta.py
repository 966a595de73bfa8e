"""Gated delta of several slots: rows and memory of each are bit for bit those of its lane alone; no others change.

"Alone" is a pass of one slot over memory of one lane. Slots differ in pending rows and lane; idle ones have NaN.
"""

from dataclasses import replace

import pytest
import torch
from native_lanes_support import IDLE, LANES, Slot, bits, input_rows, set_slots
from native_linear_support import fetch_blocks
from native_state_support import bf16, commit

from edge_dflash.backends.cuda.kernels import delta as native_delta
from edge_dflash.backends.cuda.kernels import small as native_small
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.memory import Matrix

pytestmark = pytest.mark.gpu


DELTA = {
    "27b slice": DeltaShape(2, 6, 128, 128, 4, 1e-6, 16, 40, LANES),
    "27b": DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, 0, LANES),
    "short block": DeltaShape(2, 2, 128, 128, 4, 1e-6, 5, 40, LANES),
    "small heads": DeltaShape(2, 4, 64, 32, 4, 1e-6, 16, 40, LANES),
    "odd": DeltaShape(4, 4, 32, 64, 3, 1e-6, 11, 40, LANES),
}
PATHS = [(name, clusters) for name in DELTA for clusters in ((True, False) if DELTA[name].clusters else (False,))]
SLOTS = [
    [Slot(0, 0, 3), Slot(1, 0, 0)],
    [Slot(5, 0, 5), IDLE, Slot(0, 0, 0), Slot(2, 0, 1)],
    [IDLE, Slot(7, 0, 4)],
    [Slot(lane, 0, pending) for lane, pending in zip((3, 0, 7, 1, 2, 6, 5, 4), (5, 0, 1, 4, 2, 5, 3, 0), strict=True)],
]


class Delta:
    """A layer with random state, history and tape in every lane."""

    def __init__(self, device, shape, clusters):
        self.device, self.shape, self.clusters = device, shape, clusters
        s, g = shape, torch.Generator().manual_seed(1)
        self.g, n = g, s.lanes
        self.arrays = [
            torch.randn(n, s.value_heads, s.key_dim, s.value_dim, generator=g),
            bf16(n, s.conv_kernel - 1, s.conv_channels, generator=g).bfloat16(),
            bf16(n, s.rows, s.conv_channels, generator=g).bfloat16(),
            -torch.rand(n, s.rows, s.value_heads, generator=g),
            torch.rand(n, s.rows, s.value_heads, generator=g),
        ]
        conv = bf16(s.conv_channels, s.conv_kernel, generator=g, scale=0.5).numpy()
        self.vectors = [device.up(torch.from_numpy(s.packed_conv(conv)))]
        self.vectors += [device.up(bf16(n, generator=g)) for n in (s.value_heads, s.value_heads, s.value_dim)]

    def layer(self):
        """A fresh copy of all lanes."""
        return DeltaLayer(*(self.device.up(x) for x in self.arrays), *self.vectors)

    def parts(self, layer):
        return layer.state, layer.history, layer.tape_u, layer.tape_g, layer.tape_beta

    def of(self, layer, lane):
        """The memory of one lane."""
        sizes = [p.nbytes // self.shape.lanes for p in self.parts(layer)]
        arrays = [p.at(lane * size, size) for p, size in zip(self.parts(layer), sizes, strict=True)]
        return DeltaLayer(*arrays, *self.vectors)

    def run(self, shape, layer, inputs, *, slots=1, prefill=0, window=0):
        device, values = self.device, shape.value_heads * shape.value_dim
        kernels = DeltaKernels(device.gpu, device.module(native_delta.UNIT), shape, clusters=self.clusters)
        counters = device.up(torch.zeros(shape.counter_bytes // 4, dtype=torch.int32))
        scratch = DeltaScratch(device.poisoned(shape.scratch_bytes), counters)
        device.set(rows=prefill)
        if not inputs:
            kernels.flush(layer, scratch, device.words())
            return None
        rows = inputs[0].shape[0]
        out = Matrix(device.poisoned(2 * (16 if window else rows) * values), -window or values)
        words = device.words(prefill=prefill > 0, block=None if prefill else rows // slots, slots=slots)
        kernels.run(DeltaTensors(*(device.rows(x) for x in inputs), out), layer, scratch, words)
        assert not bits(device, counters).any()
        if window:
            return fetch_blocks(device, out, values)[:rows].contiguous().view(torch.uint8).view(rows, -1)
        return bits(device, out.pointer).view(rows, -1)

    def inputs(self, slots, rows):
        s = self.shape
        widths = (s.conv_channels, s.value_heads * s.value_dim, s.value_heads, s.value_heads)
        return [input_rows(slots, rows, n, self.g) for n in widths]

    def same(self, now, want, lanes):
        """Both have the same bits; those of other lanes than ``lanes`` are what they were."""
        for one, other, was in zip(self.parts(now), self.parts(want), self.arrays, strict=True):
            found, first = bits(self.device, one), was.contiguous().view(-1).view(torch.uint8)
            assert torch.equal(found, bits(self.device, other))
            changed = (found != first).view(self.shape.lanes, -1).any(-1)
            assert not [lane for lane in range(self.shape.lanes) if changed[lane] and lane not in lanes]


@pytest.mark.parametrize(("name", "clusters"), PATHS)
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("rows", [None, 3])
def test_gated_delta_of_a_slot_is_that_of_its_lane_alone(device, name, clusters, slots, rows):
    shape = DELTA[name]
    delta, block = Delta(device, shape, clusters), rows or shape.rows
    inputs = delta.inputs(slots, block)
    joint, alone = delta.layer(), delta.layer()
    set_slots(device, slots)
    found = delta.run(shape, joint, inputs, slots=len(slots))
    for i, slot in enumerate(slots):
        part = slice(i * block, (i + 1) * block)
        if slot.lane < 0:
            assert not found[part].any()
            continue
        device.set(pending=slot.pending, lane=0)
        one = delta.run(replace(shape, lanes=1), delta.of(alone, slot.lane), [x[part] for x in inputs])
        assert torch.equal(found[part], one), (i, slot)
    delta.same(joint, alone, [slot.lane for slot in slots])


@pytest.mark.parametrize("clusters", [True, False])
def test_outputs_of_slots_in_blocks_are_those_in_rows(device, clusters):
    delta, slots = Delta(device, DELTA["27b slice"], clusters), SLOTS[1]
    inputs = delta.inputs(slots, 4)
    set_slots(device, slots)
    found = [delta.run(delta.shape, delta.layer(), inputs, slots=4, window=window) for window in (0, 32, 64)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("name", "clusters"), [path for path in PATHS if DELTA[path[0]].prefill_rows])
def test_a_prompt_and_a_flush_go_to_any_lane(device, name, clusters):
    shape = DELTA[name]
    delta = Delta(device, shape, clusters)
    for inputs in (delta.inputs([Slot(0)], 33), []):
        joint, alone = delta.layer(), delta.layer()
        device.set(pending=4, lane=6)
        found = delta.run(shape, joint, inputs, prefill=33 if inputs else 0)
        device.set(lane=0)
        want = delta.run(replace(shape, lanes=1), delta.of(alone, 6), inputs, prefill=33 if inputs else 0)
        assert found is want is None or torch.equal(found, want)
        delta.same(joint, alone, [6])
        assert not torch.equal(bits(device, joint.state), delta.arrays[0].view(-1).view(torch.uint8))


def test_pending_rows_of_slots_may_be_committed_by_the_kernel_right_before(device):
    delta, slots = Delta(device, DELTA["27b slice"], clusters=True), [Slot(4, 0, 2), Slot(1, 0, 5)]
    small, inputs = Small(device.gpu, device.module(native_small.UNIT)), delta.inputs(slots, 16)
    want_layer = delta.layer()
    set_slots(device, slots)
    want = delta.run(delta.shape, want_layer, inputs, slots=2)
    kernels = DeltaKernels(device.gpu, device.module(native_delta.UNIT), delta.shape)
    counters = device.up(torch.zeros(delta.shape.counter_bytes // 4, dtype=torch.int32))
    scratch, tensors = DeltaScratch(counters, counters), [device.rows(x) for x in inputs]
    for stale in (0, 5, 16):
        layer, out = delta.layer(), Matrix(device.poisoned(want.numel()), want.shape[1] // 2)
        device.set(1, pending=stale)

        def run(layer=layer, out=out):
            commit(small, device.control.at(32, 32), 5)
            kernels.run(DeltaTensors(*tensors, out), layer, scratch, device.words(slots=2))

        device.gpu.capture(run).launch()
        assert torch.equal(bits(device, out.pointer).view(32, -1), want), stale
        delta.same(layer, want_layer, [4, 1])
