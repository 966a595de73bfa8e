"""Times the linear kernels at the sizes of Qwen3.6-27B and Qwen3.5-4B in CUDA graphs; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_linear.py [--variants | --rows]. Launches rotate over more weights than the
L2 cache holds; rates are weight bytes over time, against the read bandwidth measured in the same run.
"""

import ctypes
import json
import sys
from functools import partial
from statistics import median

import numpy as np
from native_linear_support import cubin
from native_state_support import Device

from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.splits import (
    ClusterSplits,
    HopperSplits,
    StreamSplits,
    WideSplits,
    hopper,
    row_tile,
)
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Norm
from edge_dflash.weights.layout import Layout

ARENA = 3 << 30
PERIOD = 2304  # bytes: every stack starts where the arena's NVFP4 pattern starts, 256-byte aligned
ROWS = 16

# name: (columns of each matrix, K, gated, split over blocks)
MODEL_27B = {
    "qkv": ((10240,), 5120, False, False),
    "z": ((6144,), 5120, False, False),
    "qkv z": ((10240, 6144), 5120, False, False),
    "out": ((5120,), 6144, False, True),
    "out unsplit": ((5120,), 6144, False, False),
    "q k v": ((12288, 1024, 1024), 5120, False, False),
    "gate up": ((17408, 17408), 5120, True, False),
    "down": ((5120,), 17408, False, True),
    "down unsplit": ((5120,), 17408, False, False),
    "lm_head": ((248320,), 5120, False, False),
}
MODEL_4B = {
    "qkv z": ((8192, 4096), 2560, False, False),
    "q k v": ((8192, 1024, 1024), 2560, False, False),
    "out": ((2560,), 4096, False, True),
    "gate up": ((9216, 9216), 2560, True, False),
    "down": ((2560,), 9216, False, True),
}


class Tuned(Linears):
    """Linears whose launches can be bent: another number of blocks in a cluster, of joint passes another of twins."""

    splits = twins = None

    def choose(self, layout, rows, *, may_split=False):
        chosen, gpu = super().choose(layout, rows, may_split=may_split), self._gpu
        if self.twins and isinstance(chosen, WideSplits) and chosen.splits * self.twins <= 8:
            return WideSplits.of(layout, chosen.tile, chosen.splits, gpu.sm_count, self._clusters, self.twins)
        if self.splits and not isinstance(chosen, StreamSplits):
            if hopper(gpu.sm, self._most_rows):
                if self.splits in HopperSplits.counts(layout):
                    return HopperSplits.of(layout, self.splits, gpu.sm_count, self._clusters)
            elif self.splits in ClusterSplits.counts(layout):
                return ClusterSplits.of(layout, row_tile(rows), self.splits, gpu.sm_count, self._clusters)
        return chosen

    def _clusters(self, name, *block):
        return self._gpu.most_clusters(self._kernels[name], *block)


class Bench:
    def __init__(self):
        self.device = Device()
        self.gpu = self.device.gpu
        self.arch = f"sm{self.gpu.sm}" + ("a" if self.gpu.sm >= 90 else "")
        module = self.gpu.load(cubin("bench", self.arch))
        self.read, self.fill = module.kernel("bench_read"), module.kernel("bench_fill")
        self.arena = self.gpu.allocate(ARENA)
        self.gpu.launch(self.fill, (1024, 1, 1), 512, (self.arena, ctypes.c_longlong(ARENA // 4), 7))
        rng = np.random.default_rng(0)
        x = (rng.standard_normal((512, 17408), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        self.x = self.gpu.upload(x)
        self.y = self.gpu.allocate(512 * 250_000 * 2)
        self.scale = self.gpu.upload(np.full(250_000, 1e-3, np.float32))
        self.scratch = self.gpu.allocate(64 << 20)
        layout = Layout("bf16", (48, 48), 5120)
        self.gates = {5120: LinearWeights(layout, self.arena.at(0, layout.nbytes), self.scale)}

    def seconds(self, enqueue, repeats=9):
        graph = self.gpu.capture(enqueue)
        for _ in range(2):
            graph.launch()
        return median(self.gpu.seconds(graph.launch) for _ in range(repeats))

    def bandwidth(self):
        best = 0.0
        for blocks in (2, 4):
            args = (self.arena, ctypes.c_longlong(ARENA // 16), self.scratch)
            seconds = self.seconds(lambda a=args, b=blocks: self.gpu.launch(
                self.read, (b * self.gpu.sm_count, 1, 1), 512, a))  # fmt: skip
            best = max(best, ARENA / seconds)
        return best

    def copies(self, layout, most=24):
        step = -(-layout.nbytes // PERIOD) * PERIOD
        count = max(1, min(most, ARENA // step))
        return [
            LinearWeights(layout, DevicePointer(self.arena.address + i * step, layout.nbytes), self.scale)
            for i in range(count)
        ]

    def call(self, linears, weights, rows=ROWS, split=False):
        layout = weights.layout
        window = linears.choose(layout, rows, may_split=split).window  # inputs in blocks where they can be
        x, given = Matrix(self.x, -window or layout.k), {}
        if split:
            norm = Norm(self.scale, 1e-6, Matrix(self.y.at(1 << 22, 1 << 22), -window or layout.columns[0]))
            out = Matrix(self.y, layout.columns[0])
            linears.split_linear(weights, x, out, rows, self.scratch, residual=out, norm=norm)
            return
        columns = layout.columns[:1] if layout.swiglu else layout.columns
        outs, offset = [], 0
        for n in columns:
            outs.append(Matrix(self.y.at(offset, rows * n * 2), -window or n if layout.swiglu else n))
            offset += rows * n * 2
        side = self.gates.get(layout.k)
        if side is not None and layout.columns == MODEL_27B["qkv z"][0]:
            given |= {
                "side": side,
                "side_out": [Matrix(self.y.at(offset + i * rows * 96, rows * 96), 48) for i in (0, 1)],
            }
        linears.linear(weights, x, outs, rows, **given)

    def shape(self, linears, layout, split, rows=ROWS):
        stacks = self.copies(layout)
        sequence = (stacks * (24 // len(stacks) + 1))[: max(12, len(stacks))]
        seconds = self.seconds(lambda: [self.call(linears, w, rows, split) for w in sequence])
        return seconds / len(sequence)

    def layers(self, linears, format, model, count=6, rows=ROWS):
        """A chain of whole layers, each with its own weights: seconds and bytes a layer."""
        names = ("qkv z", "out", "gate up", "down")
        offset, calls = 0, []
        for _ in range(count):
            for name in names:
                columns, k, gated, split = model[name]
                layout = Layout(format, columns, k, gated)
                pointer = DevicePointer(self.arena.address + offset, layout.nbytes)
                stack = LinearWeights(layout, pointer, self.scale)
                calls.append(partial(self.call, linears, stack, rows=rows, split=split))
                offset += -(-layout.nbytes // PERIOD) * PERIOD
        return self.seconds(lambda: [call() for call in calls]) / count, offset / count

    def tiles(self, linears, layout, rows):
        weights = self.copies(layout, 4)
        x, n = Matrix(self.x, layout.k), layout.columns[0]
        out = [Matrix(self.y, n)]
        seconds = self.seconds(lambda: [linears.tiles(w, x, out, rows) for w in weights], 5) / len(weights)
        return seconds, 2 * rows * layout.k * sum(layout.columns)


VARIANTS = ((32, None), (16, None), (16, 2), (16, 4), (16, 8))  # most rows, splits (None: as chosen)


def variants(bench, load):
    """Both kernels of Hopper, and other numbers of blocks in a cluster."""
    for rows, splits in VARIANTS:
        linears = Tuned(bench.gpu, load, most_rows=rows)
        linears.splits = splits
        yield f"{rows}" + (f" splits={splits}" if splits else ""), linears


def joint(bench, load, line):
    """Joint passes of 16 to 128 rows, weights of the 27B and of the 4B, once and twice the blocks of a cluster."""
    base = {}
    for twins in (1, 2):
        linears = Tuned(bench.gpu, load, most_rows=16, joint=128)
        linears.twins = twins
        for rows in (16, 32, 64, 128) if twins == 1 else (32, 64, 128):
            for model, title in ((MODEL_27B, "27B"), (MODEL_4B, "4B")):
                variant = f"{rows} rows, {twins} twins"
                for name, (columns, k, gated, split) in model.items():
                    if name in ("z", "qkv", "q k v") or "unsplit" in name:
                        continue
                    layout = Layout("nvfp4", columns, k, gated)
                    splits = linears.choose(layout, rows, may_split=split)
                    title_here = f"{title} {name} {splits.splits}x{splits.groups}"
                    line(variant, title_here, bench.shape(linears, layout, split, rows), layout.nbytes)
                for format in ("nvfp4", "fp8", "bf16") if title == "27B" else ("nvfp4",):
                    count = 6 if format == "nvfp4" else 3
                    seconds, nbytes = bench.layers(linears, format, model, count, rows)
                    line(variant, f"{title} layer {format}", seconds, nbytes)
                    first = base.setdefault((title, format), seconds)
                    print(f"{variant:32s} {title} layer {format}: {seconds / first:.2f} x that of 16 rows", flush=True)


def main():
    bench = Bench()
    bandwidth = bench.bandwidth()
    print(f"{bench.gpu.name}, {bench.gpu.sm_count} SMs, read bandwidth {bandwidth / 1e12:.3f} TB/s")
    results = {"device": bench.gpu.name, "read_bandwidth": bandwidth, "rows": ROWS, "lines": []}

    def line(variant, name, seconds, nbytes):
        rate = nbytes / seconds
        print(f"{variant:32s} {name:28s} {nbytes / 1e6:8.2f} MB {seconds * 1e6:8.2f} us {rate / 1e12:6.3f} TB/s"
              f" {rate / bandwidth:6.1%}", flush=True)  # fmt: skip
        results["lines"].append([variant, name, nbytes, seconds])

    load = partial(cubin, arch=bench.arch)
    if "--rows" in sys.argv:
        joint(bench, load, line)
        print(json.dumps(results))
        return
    chosen = [("base", Tuned(bench.gpu, load, most_rows=ROWS)), ("32 rows", Tuned(bench.gpu, load))]
    if "--variants" in sys.argv:
        chosen = variants(bench, load)
    for variant, linears in chosen:
        for model, title in ((MODEL_27B, "27B"), (MODEL_4B, "4B")):
            for name, (columns, k, gated, split) in model.items():
                if variant != "base" and (name in ("z", "qkv", "q k v") or "unsplit" in name):
                    continue
                layout = Layout("nvfp4", columns, k, gated)
                splits = linears.choose(layout, ROWS, may_split=split)
                title_here = f"{title} {name} {splits.splits}x{splits.groups} t{splits.threads}"
                line(variant, title_here, bench.shape(linears, layout, split), layout.nbytes)
            line(variant, f"{title} layer", *bench.layers(linears, "nvfp4", model))
        if variant in ("base", "32 rows"):
            for format in ("fp8", "bf16"):
                layout = Layout(format, (17408, 17408), 5120, True)
                line(variant, f"27B gate up {format}", bench.shape(linears, layout, False), layout.nbytes)
                line(variant, f"27B layer {format}", *bench.layers(linears, format, MODEL_27B, 3))
            for format in ("nvfp4", "fp8", "bf16") if variant == "base" else ():
                seconds, flops = bench.tiles(linears, Layout(format, (17408, 17408), 5120, True), 512)
                print(f"tiles {format} 512 rows gate up: {seconds * 1e6:.0f} us, {flops / seconds / 1e12:.0f} TFLOP/s")
                results["lines"].append([variant, f"tiles {format}", flops, seconds])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
