"""Times attention and the gated delta layer at models' sizes inside a CUDA graph; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_state.py. Layers rotate through more memory than the L2 cache holds.
"""

import json
from statistics import median

import numpy as np
import torch
from native_state_support import Device, bf16

from edge_dflash.backends.cuda.kernels import attend, delta
from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.memory import Matrix

BANDWIDTH = 4.555e12  # bytes / s, best read bandwidth measured on an H200
CONTEXT = 32768


def per_layer(device, enqueue, layers):
    graph = device.gpu.capture(enqueue)
    for _ in range(3):
        graph.launch()
    return median(device.gpu.seconds(graph.launch) for _ in range(15)) / layers


def line(name, seconds, nbytes):
    floor = nbytes / BANDWIDTH
    print(f"{name:34s} {seconds * 1e6:8.2f} us  floor {floor * 1e6:7.2f} us  {floor / seconds:6.1%} of bandwidth")
    return {"name": name, "us": seconds * 1e6, "floor_us": floor * 1e6}


ATTENTION = {  # layers of the targets; 9B as 4B
    "27B": AttendShape(24, 4, 256, 64, 1e-6, CONTEXT, 16, 512, gated=True),
    "4B": AttendShape(16, 4, 256, 64, 1e-6, CONTEXT, 16, 512, gated=True),
    "8B": AttendShape(32, 8, 128, 128, 1e-6, CONTEXT, 16, 512),
}


def bench_attention(device, results, model, layers=64):
    g, shape = torch.Generator().manual_seed(0), ATTENTION[model]
    codes = torch.randint(0, 0x70, (shape.kv_bytes,), dtype=torch.uint8, generator=g).numpy()
    table = [device.up(torch.randn(shape.kv_rows, shape.rope_dims // 2, generator=g)) for _ in range(2)]
    norm = device.up(torch.ones(shape.head_dim))
    memories = [KvMemory(device.gpu.upload(codes), device.gpu.upload(codes), 0.01, 0.01, norm, norm, *table)
                for _ in range(layers)]  # fmt: skip
    rows, columns = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q, k, v = (device.rows(bf16(512, n, generator=g)) for n in (rows * (1 + shape.gated), columns, columns))
    out, scratch = Matrix(device.poisoned(512 * rows * 2), rows), device.poisoned(shape.scratch_bytes)
    attention = Attention(device.gpu, device.module(attend.UNIT), shape)
    x, words = AttendTensors(q, k, v, out), device.words()
    for context in (0, 512, 2048, 8192, 32000):
        device.set(length=context, rows=512)
        seconds = per_layer(device, lambda: [attention.attend(x, m, scratch, words) for m in memories], layers)
        results.append(line(f"attend {model}, context {context}", seconds, 2 * columns * (context + 16)))
    for context in (0, 8192):
        device.set(length=context, rows=512)
        seconds = per_layer(
            device, lambda: [attention.attend(x, m, scratch, device.words(prefill=True)) for m in memories[:4]], 4
        )
        flops = 4 * rows * 512 * (context + 256)
        print(
            f"{model}: prefill of 512 rows at {context}: {seconds * 1e6:.1f} us, {flops / seconds / 1e12:.0f} TFLOP/s"
        )
        results.append({"name": f"attend {model} prefill 512 at {context}", "us": seconds * 1e6})
    seconds = per_layer(device, lambda: [attention.append([(k, v, m)], words) for m in memories], layers)
    results.append(line(f"kv_append {model}, 16 rows", seconds, 16 * columns * 2 * 3))
    five = [[(k, v, m) for m in memories[i : i + 5]] for i in range(0, layers - 5, 5)]
    seconds = per_layer(device, lambda: [attention.append(some, words) for some in five], len(five))
    results.append(line(f"kv_append {model}, five layers of 16 rows", seconds, 5 * 16 * columns * 2 * 3))


def bench_delta(device, results, module=None):
    g = torch.Generator().manual_seed(0)
    shape = DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, 512)
    layers = 48
    conv = shape.packed_conv(bf16(shape.channels, 4, generator=g, scale=0.5).numpy())
    made = []
    for _ in range(layers):
        up = device.up
        made.append(
            DeltaLayer(
                up(torch.randn(48, 128, 128, generator=g)), up(bf16(3, shape.channels, generator=g).bfloat16()),
                up(bf16(16, shape.channels, generator=g).bfloat16()),
                up(-torch.rand(16, 48, generator=g)), up(torch.rand(16, 48, generator=g)),
                device.gpu.upload(conv), up(torch.randn(48, generator=g)), up(torch.randn(48, generator=g)),
                up(torch.ones(128)),
            )
        )  # fmt: skip
    qkv, z, a, b = (device.rows(bf16(512, n, generator=g)) for n in (shape.channels, 6144, 48, 48))
    counters = device.gpu.upload(np.zeros(shape.counter_bytes, np.uint8))
    scratch = DeltaScratch(device.poisoned(shape.scratch_bytes), counters)
    out = Matrix(device.poisoned(512 * 6144 * 2), 6144)
    kernels = DeltaKernels(device.gpu, module or device.module(delta.UNIT), shape)
    tensors, words = DeltaTensors(qkv, z, a, b, out), device.words()
    for count in (0, 5, 16):
        device.set(pending=count)
        seconds = per_layer(
            device,
            lambda: [kernels.run(tensors, x, scratch, words) for x in made],
            layers,
        )
        results.append(line(f"gated_delta 27B, {count} pending", seconds, shape.pass_bytes(count, 16)))
    device.set(pending=5)
    seconds = per_layer(device, lambda: [kernels.flush(x, scratch, words) for x in made], layers)
    results.append(line("gated_delta 27B flush of 5", seconds, shape.pass_bytes(5, 0)))
    device.set(pending=0, rows=512)
    seconds = per_layer(
        device, lambda: [kernels.run(tensors, x, scratch, device.words(prefill=True)) for x in made], layers
    )
    results.append(line("gated_delta 27B, prefill 512", seconds, shape.pass_bytes(0, 512, commits=True)))


def main():
    device, results = Device(), []
    bench_delta(device, results)
    for model in ATTENTION:
        bench_attention(device, results, model)
    print(json.dumps({"device": device.gpu.name, "results": results}))


if __name__ == "__main__":
    main()
