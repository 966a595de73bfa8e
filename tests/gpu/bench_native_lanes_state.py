"""Times the state kernels at 27B's sizes over 1 to 8 slots of 8 lanes inside a CUDA graph; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_lanes_state.py. "One lane" is the same pass over memory of one lane.
"""

import json
from dataclasses import replace

import torch
from bench_native_state import ATTENTION, BANDWIDTH, per_layer
from native_lanes_support import LANES, Slot, set_slots
from native_state_support import Device, bf16

from edge_dflash.backends.cuda.kernels import attend, delta
from edge_dflash.backends.cuda.kernels.attend import AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.memory import Matrix

SLOTS, LAYERS = (1, 2, 4, 8), 8


def timed(device, results, name, enqueue, nbytes):
    seconds = per_layer(device, enqueue, LAYERS)
    floor = nbytes / BANDWIDTH
    print(f"{name:44s} {seconds * 1e6:8.2f} us  floor {floor * 1e6:7.2f} us")
    results.append({"name": name, "us": seconds * 1e6, "floor_us": floor * 1e6})


def bench_attention(device, results):
    g, whole = torch.Generator().manual_seed(0), replace(ATTENTION["27B"], max_context=8192 + 64, lanes=LANES)
    table = [device.up(torch.randn(whole.kv_rows, whole.rope_dims // 2, generator=g)) for _ in range(2)]
    norm = device.up(torch.ones(whole.head_dim))
    memories = []
    for _ in range(LAYERS):
        kv = [device.gpu.allocate(LANES * whole.kv_bytes) for _ in range(2)]
        for part in kv:
            device.gpu.fill(part, 0x35)
        memories.append(KvMemory(*kv, 0.01, 0.01, norm, norm, *table))
    columns = whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim
    q, k, v = (device.rows(bf16(16 * LANES, n, generator=g)) for n in (columns[0] * 2, columns[1], columns[1]))
    out = Matrix(device.poisoned(2 * 16 * LANES * columns[0]), columns[0])
    x, scratch = AttendTensors(q, k, v, out), device.poisoned(whole.scratch_bytes)
    for shape, name in ((replace(whole, lanes=1), "one lane"), (whole, f"{LANES} lanes")):
        face = Attention(device.gpu, device.module(attend.UNIT), shape)
        for context in (512, 2048, 8192):
            set_slots(device, [Slot(i, context) for i in range(LANES)])
            for slots in SLOTS if shape.lanes > 1 else (1,):
                words, read = device.words(slots=slots), 2 * columns[1] * (context + 16) * slots
                timed(
                    device, results, f"attend, {name}, {slots} slots at {context}",
                    lambda f=face, w=words: [f.attend(x, m, scratch, w) for m in memories], read,
                )  # fmt: skip
        for slots in SLOTS if shape.lanes > 1 else (1,):
            words = device.words(slots=slots)
            timed(
                device, results, f"kv_append, {name}, {slots} slots, {LAYERS} layers at once",
                lambda f=face, w=words: f.append([(k, v, m) for m in memories], w), 0,
            )  # fmt: skip


def bench_delta(device, results):
    g, whole = torch.Generator().manual_seed(0), DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, lanes=LANES)
    conv = device.gpu.upload(whole.packed_conv(bf16(whole.channels, 4, generator=g, scale=0.5).numpy()))
    vectors = conv, *(device.up(torch.randn(48, generator=g)) for _ in range(2)), device.up(torch.ones(128))
    rows = LANES * whole.rows
    gates = [-torch.rand(rows, 48, generator=g), torch.rand(rows, 48, generator=g)]
    layers = [
        DeltaLayer(
            device.up(torch.randn(LANES, 48, 128, 128, generator=g)),
            device.up(bf16(LANES * 3, whole.channels, generator=g).bfloat16()),
            device.up(bf16(rows, whole.channels, generator=g).bfloat16()),
            *(device.up(gate) for gate in gates),
            *vectors,
        )
        for _ in range(LAYERS)
    ]
    qkv, z, a, b = (device.rows(bf16(rows, n, generator=g)) for n in (whole.channels, 6144, 48, 48))
    x = DeltaTensors(qkv, z, a, b, Matrix(device.poisoned(2 * rows * 6144), 6144))
    counters = device.gpu.allocate(whole.counter_bytes)
    device.gpu.fill(counters)
    scratch = DeltaScratch(device.poisoned(whole.scratch_bytes), counters)
    for shape, clusters in ((replace(whole, lanes=1), True), (whole, True), (whole, False)):
        face = DeltaKernels(device.gpu, device.module(delta.UNIT), shape, clusters=clusters)
        name = f"{shape.lanes} lanes, {'one kernel' if clusters else 'three kernels'}"
        for pending, block in ((0, 16), (5, 16), (5, 4)):
            set_slots(device, [Slot(i, 0, pending) for i in range(LANES)])
            for slots in SLOTS if shape.lanes > 1 else (1,):
                words = device.words(block=block, slots=slots)
                timed(
                    device, results, f"gated_delta, {name}, {slots} slots, {pending} pending, {block} rows",
                    lambda f=face, w=words: [f.run(x, layer, scratch, w) for layer in layers],
                    slots * shape.pass_bytes(pending, block),
                )  # fmt: skip


def main():
    device, results = Device(), []
    bench_delta(device, results)
    bench_attention(device, results)
    print(json.dumps({"device": device.gpu.name, "results": results}))


if __name__ == "__main__":
    main()
