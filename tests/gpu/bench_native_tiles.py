"""Times the prefill linears at the sizes of Qwen3.6-27B in CUDA graphs; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_tiles.py [CUBIN ...] (variants of linear_tiles). Rates are against
torch.matmul of BF16 matrices of the same shape in the same run. Weights rotate through more than the L2 cache holds.
"""

import ctypes
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from native_linear_support import cubin
from native_state_support import Device

from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights, Tiles
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix
from edge_dflash.weights.layout import Layout

ARENA = 1 << 30
SHAPES = {  # columns of each matrix, K, gated
    "qkv z": ((10240, 6144), 5120, False),
    "out": ((5120,), 6144, False),
    "gate up": ((17408, 17408), 5120, True),
    "down": ((5120,), 17408, False),
}
FILL = {"nvfp4": (4, 0), "fp8": (8, 6), "bf16": (16, 118)}
LAYERS, MOST_ROWS = 64, 2048


class Bench:
    def __init__(self):
        self.device = Device()
        self.gpu = self.device.gpu
        self.arch = f"sm{self.gpu.sm}" + ("a" if self.gpu.sm >= 90 else "")
        self.fill = self.gpu.load(cubin("bench", self.arch)).kernel("bench_weights")
        self.arena = self.gpu.allocate(ARENA)
        rng = np.random.default_rng(0)
        x = (rng.standard_normal((MOST_ROWS, 17408), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.x, self.y = self.gpu.upload(x), self.gpu.allocate(MOST_ROWS * 34816 * 2)
        self.scale = self.gpu.upload(np.full(34816, 1e-3, np.float32))
        self.valid = self.gpu.allocate(4)

    def weights(self, format):
        arguments = (self.arena, ctypes.c_longlong(ARENA // 4), 7, *FILL[format])
        self.gpu.launch(self.fill, (1024, 1, 1), 512, arguments)

    def seconds(self, linears, name, format, rows, valid=None):
        columns, k, gated = SHAPES[name]
        layout = Layout(format, columns, k, gated)
        x, total = Matrix(self.x, k), columns[0] if gated else sum(columns)
        out, count = [Matrix(self.y, total)], min(4, ARENA // layout.nbytes)
        self.gpu.write(self.valid, np.array([valid or rows], np.int32))
        stacks = [
            LinearWeights(layout, DevicePointer(self.arena.address + i * layout.nbytes, layout.nbytes), self.scale)
            for i in range(count)
        ]
        graph = self.gpu.capture(lambda: [linears.tiles(w, x, out, rows, valid=self.valid) for w in stacks])
        graph.launch()
        return median(self.gpu.seconds(graph.launch) for _ in range(5)) / count


def matmul_seconds(rows):
    """torch.matmul of the same shapes, BF16."""
    out = {}
    for name, (columns, k, _) in SHAPES.items():
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(sum(columns), k, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        times = []
        for _ in range(6):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for w in weights:
                x @ w.T
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 2e3)
        out[name] = median(times)
    return out


def main():
    bench = Bench()
    load = partial(cubin, arch=bench.arch)
    variants = {"as shipped": Linears(bench.gpu, load)}
    for path in map(Path, sys.argv[1:]):
        variants[path.stem] = Linears(bench.gpu, load)
        variants[path.stem]._tiles = Tiles(bench.gpu, lambda _, path=path: path.read_bytes())
    print(f"{bench.gpu.name}; times in us, share of the rate of torch.matmul; a layer's linears, and {LAYERS} layers")
    results = {"device": bench.gpu.name, "lines": []}
    matmul = {rows: matmul_seconds(rows) for rows in (512, 1024, 2048)}
    for rows, times in matmul.items():
        rates = {n: 2 * rows * sum(SHAPES[n][0]) * SHAPES[n][1] / s / 1e12 for n, s in times.items()}
        print(f"torch.matmul {rows:5d}: " + " ".join(f"{n} {rates[n]:.0f} TFLOP/s" for n in rates), flush=True)
        results["lines"].append(["torch.matmul", "bf16", rows, rows, *times.values()])
    for variant, linears in variants.items():
        for format in FILL:
            bench.weights(format)
            cases = [(2048, 2048), (1024, 1024), (512, 512), (2048, 300), (512, 128), (2048, 128), (512, 20)]
            for rows, valid in cases if format == "nvfp4" else cases[::3]:
                times = {n: bench.seconds(linears, n, format, rows, valid) for n in SHAPES}
                layer = sum(times.values())
                rate = sum(2 * valid * sum(c) * k for c, k, _ in SHAPES.values()) / layer / 1e12
                share = f" {sum(matmul[rows].values()) / layer:5.0%}" if valid == rows else ""
                print(
                    f"{variant:10s} {format:5s} {valid:5d} of {rows:4d}: "
                    + " ".join(f"{n} {s * 1e6:6.1f}" for n, s in times.items())
                    + f" | {layer * 1e6:7.1f} us {rate:4.0f} TFLOP/s{share} | {layer * LAYERS * 1e3:6.1f} ms",
                    flush=True,
                )
                results["lines"].append([variant, format, rows, valid, *times.values()])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
