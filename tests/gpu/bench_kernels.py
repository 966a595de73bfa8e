"""Times families of kernels at models' sizes in CUDA graphs; prints one JSON line last.

    python tests/gpu/bench_kernels.py [linear tiles experts attend delta sample walk]

Calls of a case have weights or states of their own, more than the L2 cache holds. The share is that of the bytes that a
call has to move over the read bandwidth of the same run. A pass with all its steps: ``edge-dflash bench --profile``.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[1] / "support"))

import numpy as np
import test_native_sample
import test_native_walk
import torch
from delta_bytes import pass_bytes
from native_lanes_support import LANES, Slot, set_slots
from native_state_support import CACHE, Device, bf16

from edge_dflash.backends.cuda.kernels import attend, delta
from edge_dflash.backends.cuda.kernels.attend import AttendShape, AttendTensors, Attention, KvMemory
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaLayer, DeltaScratch, DeltaShape, DeltaTensors
from edge_dflash.backends.cuda.kernels.experts import ExpertKernels, ExpertsBuffers, ExpertsShape, ExpertWeights, Forced
from edge_dflash.backends.cuda.kernels.linear import Linears, LinearWeights
from edge_dflash.backends.cuda.kernels.sample import Block
from edge_dflash.backends.cuda.memory import NULL, Allocator, Control, Matrix, Norm
from edge_dflash.bench.device import cubins, read_bandwidth
from edge_dflash.decode.sampling import GREEDY, Sampling
from edge_dflash.weights.layout import Layout

ARENA, PERIOD = 3 << 30, 2304  # bytes; stacks start where the arena's pattern of NVFP4 starts
LINEARS = {  # columns of each matrix, K, gated, split over blocks
    "27B qkv z": ((10240, 6144), 5120, False, False),
    "27B q k v": ((12288, 1024, 1024), 5120, False, False),
    "27B out": ((5120,), 6144, False, True),
    "27B gate up": ((17408, 17408), 5120, True, False),
    "27B down": ((5120,), 17408, False, True),
    "27B lm_head": ((248320,), 5120, False, False),
    "4B qkv z": ((8192, 4096), 2560, False, False),
    "4B out": ((2560,), 4096, False, True),
    "4B gate up": ((9216, 9216), 2560, True, False),
    "4B down": ((2560,), 9216, False, True),
}
EXPERTS = {  # hidden, experts, chosen, intermediate, shared members, renormalised; layers in turn
    "35B-A3B": ((2048, 256, 8, 512, 1, True), 8),
    "122B-A10B": ((3072, 256, 8, 1024, 1, True), 3),
    "30B-A3B": ((2048, 128, 8, 768, 0, True), 8),
}
ATTENTION = {
    "27B": AttendShape(24, 4, 256, 64, 1e-6, 32768, 16, 512, gated=True),
    "4B": AttendShape(16, 4, 256, 64, 1e-6, 32768, 16, 512, gated=True),
    "8B": AttendShape(32, 8, 128, 128, 1e-6, 32768, 16, 512),
}
SETTINGS = (GREEDY, Sampling(1.0, seed=1), Sampling(0.6, 20, 0.95, 1), Sampling(1.0, 0, 0.95, 1))
SLOTS = (1, 2, 4, 8)


class Bench:
    """A device with an arena of weights, activations, and room for outputs."""

    def __init__(self):
        self.device = Device()
        self.gpu = gpu = self.device.gpu
        self.load = cubins(CACHE, gpu.sm)
        self.bandwidth = read_bandwidth(gpu, self.load)
        self.arena, self.y, self.scratch = (gpu.allocate(size) for size in (ARENA, 1 << 28, 64 << 20))
        gpu.fill(self.arena, 0x2B)
        x = np.random.default_rng(0).standard_normal((2048, 17408), dtype=np.float32)
        self.x = gpu.upload((x.view(np.uint32) >> 16).astype(np.uint16))
        self.scale = gpu.upload(np.full(1 << 21, 1e-3, np.float32))

    def seconds(self, calls, repeats=9):
        """Of each call, in a graph of all."""
        graph = self.gpu.capture(lambda: [call() for call in calls])
        for _ in range(2):
            graph.launch()
        return median(self.gpu.seconds(graph.launch) for _ in range(repeats)) / len(calls)

    def parts(self, nbytes, most=24):
        """Parts of the arena, again from its start where they do not fit."""
        step = -(-nbytes // PERIOD) * PERIOD
        return [self.arena.at(i % (ARENA // step) * step, nbytes) for i in range(most)]

    def stacks(self, layout, most=24):
        return [LinearWeights(layout, part, self.scale) for part in self.parts(layout.nbytes, most)]


def linear(bench):
    """Rows of one sequence and of joint passes; activations in blocks where the kernels take them so."""
    linears = Linears(bench.gpu, bench.load, most_rows=16, joint=128)

    def call(weights, rows, split):
        layout, order = weights.layout, -linears.choose(weights.layout, rows, may_split=split).window
        x, at = Matrix(bench.x, order or layout.k), 0
        if split:
            norm = Norm(bench.scale, 1e-6, Matrix(bench.y.behind(1 << 22), order or layout.columns[0]))
            out = Matrix(bench.y, layout.columns[0])
            linears.split_linear(weights, x, out, rows, bench.scratch, residual=out, norm=norm)
            return
        outs = []
        for n in layout.columns[:1] if layout.swiglu else layout.columns:
            outs.append(Matrix(bench.y.behind(at), (layout.swiglu and order) or n))
            at += 2 * rows * n
        linears.linear(weights, x, outs, rows)

    for rows, (name, (columns, k, gated, split)) in product((16, 32, 64, 128), LINEARS.items()):
        for form in ("nvfp4", "fp8", "bf16") if "gate" in name else ("nvfp4",):
            layout = Layout(form, columns, k, gated)
            calls = [partial(call, weights, rows, split) for weights in bench.stacks(layout)]
            yield f"{name} {form}, {rows} rows", calls, layout.nbytes


def tiles(bench):
    """The linears of a prefill chunk, all rows or the first ones valid, and torch.matmul of the same shapes in BF16."""
    linears, valid = Linears(bench.gpu, bench.load), bench.gpu.allocate(4)
    shapes = {name: LINEARS[f"27B {name}"][:3] for name in ("qkv z", "out", "gate up", "down")}
    for (name, (columns, k, gated)), (rows, there) in product(shapes.items(), ((2048, 2048), (512, 512), (512, 20))):
        bench.gpu.write(valid, np.array([there], np.int32))
        out = [Matrix(bench.y, columns[0] if gated else sum(columns))]
        for form in ("nvfp4", "fp8", "bf16"):
            layout = Layout(form, columns, k, gated)
            stacks, x = bench.stacks(layout, 4), Matrix(bench.x, k)
            calls = [partial(linears.tiles, weights, x, out, rows, valid=valid) for weights in stacks]
            yield f"{name} {form}, {there} of {rows} rows", calls, layout.nbytes
        if there == rows:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            weights, times = torch.randn(sum(columns), k, device="cuda", dtype=torch.bfloat16), []
            for _ in range(6):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(), x @ weights.T, stop.record()
                stop.synchronize()
                times.append(start.elapsed_time(stop) / 1e3)
            print(f"{name} torch.matmul, {rows} rows: {median(times) * 1e6:.1f} us")


def experts(bench):
    """Whole layers by forced routing, tokens independent."""
    gpu, kernels, rng = bench.gpu, ExpertKernels(bench.gpu, bench.load), np.random.default_rng(0)
    for (name, (sizes, layers)), form in product(EXPERTS.items(), ("nvfp4", "fp8")):
        shape = ExpertsShape(*sizes, form, form)
        up, down = (shape.members * layout.nbytes for layout in (shape.up, shape.down))
        weights = [
            ExpertWeights(bench.x, bench.x if shape.shared else NULL, part.at(0, up), bench.scale, part.behind(up),
                          bench.scale) for part in bench.parts(up + down, layers)
        ]  # fmt: skip
        table = np.array([rng.permutation(shape.experts)[: shape.chosen] for _ in range(4096)], np.int32)
        forced = Forced(gpu.upload(table), len(table), gpu.upload(np.zeros(1, np.int32)))
        buffers, x, out = (
            ExpertsBuffers.take(Allocator(gpu), shape, 2048),
            *(Matrix(p, sizes[0]) for p in (bench.x, bench.y)),
        )
        for rows in (1, 4, 16, 17, 512, 2048):
            read = len(np.unique(table[:rows])) + shape.shared
            calls = [partial(kernels.run, shape, each, buffers, x, out, rows, forced=forced) for each in weights]
            yield (
                f"{name} {form}, {rows} rows, {read} members",
                calls,
                read * (up + down) // (shape.experts + shape.shared),
            )


def attention(bench):
    """A verify at several contexts and numbers of slots, a prefill chunk, and appends of five layers."""
    device, g = bench.device, torch.Generator().manual_seed(0)
    for (model, whole), lanes in product(ATTENTION.items(), (1, LANES)):
        shape = replace(whole, lanes=lanes, max_context=whole.max_context if lanes == 1 else 8192 + 64)
        table = [device.up(torch.randn(shape.kv_rows, shape.rope_dims // 2, generator=g)) for _ in range(2)]
        norm, size = device.up(torch.ones(shape.head_dim)), lanes * shape.kv_bytes
        pairs = zip(*[iter(bench.parts(size, 2 * LANES))] * 2, strict=True)
        memories = [KvMemory(k, v, 0.01, 0.01, norm, norm, *table) for k, v in pairs]
        heads, columns = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        x = AttendTensors(
            *(Matrix(bench.x, n) for n in (heads * (1 + shape.gated), columns, columns)), Matrix(bench.y, heads)
        )
        face, scratch = (
            Attention(device.gpu, device.module(attend.UNIT), shape),
            device.gpu.allocate(shape.scratch_bytes),
        )
        for slots, context in product(SLOTS if lanes > 1 else (1,), (0, 512, 2048, 8192)):
            set_slots(device, [Slot(i, context) for i in range(lanes)])
            calls = [partial(face.attend, x, m, scratch, device.words(slots=slots)) for m in memories]
            yield f"{model}, {slots} slots of {lanes} at {context}", calls, 2 * columns * (context + 16) * slots
        layers = [(x.k, x.v, memory) for memory in memories[:5]]
        yield f"{model}, five layers appended", [partial(face.append, layers, device.words())], 5 * 16 * columns * 6
        device.set(length=0, rows=512)
        calls = [partial(face.attend, x, m, scratch, device.words(prefill=True)) for m in memories]
        yield f"{model}, prefill of 512 rows", calls, 2 * columns * 512


def gated_delta(bench):
    """A verify over 1 to 8 slots in one kernel and in three, a flush, and a prefill chunk, at the 27B's sizes."""
    device, g = bench.device, torch.Generator().manual_seed(0)
    for lanes, clusters in ((1, True), (LANES, True), (LANES, False)):
        shape = DeltaShape(16, 48, 128, 128, 4, 1e-6, 16, 512, lanes=lanes)
        conv = device.gpu.upload(shape.packed_conv(bf16(shape.conv_channels, 4, generator=g, scale=0.5).numpy()))
        vectors = conv, *(device.up(torch.randn(48, generator=g)) for _ in range(2)), device.up(torch.ones(128))
        tape = shape.tape_bytes
        sizes = [lanes * size for size in (shape.state_bytes, shape.conv_bytes, tape[0], tape[1], tape[1])]
        layers = [DeltaLayer(*(device.gpu.allocate(size) for size in sizes), *vectors) for _ in range(48 // lanes)]
        for pointer in (p for layer in layers for p in vars(layer).values() if p not in vectors):
            device.gpu.fill(pointer)
        x = DeltaTensors(*(Matrix(bench.x, n) for n in (shape.conv_channels, 6144, 48, 48)), Matrix(bench.y, 6144))
        counters = device.gpu.upload(np.zeros(shape.counter_bytes, np.uint8))
        scratch = DeltaScratch(device.gpu.allocate(shape.scratch_bytes), counters)
        face = DeltaKernels(device.gpu, device.module(delta.UNIT), shape, clusters=clusters)
        title = f"{lanes} lanes, {'one kernel' if clusters else 'three kernels'}"
        for slots, (pending, block) in product(SLOTS if lanes > 1 else (1,), ((0, 16), (5, 16), (5, 4))):
            set_slots(device, [Slot(i, 0, pending) for i in range(lanes)])
            calls = [partial(face.run, x, layer, scratch, device.words(block=block, slots=slots)) for layer in layers]
            yield (
                f"{title}, {slots} slots, {pending} pending, {block} rows",
                calls,
                slots * pass_bytes(shape, pending, block),
            )
        yield (
            f"{title}, flush of 5",
            [partial(face.flush, layer, scratch, device.words()) for layer in layers],
            pass_bytes(shape, 5, 0),
        )
        device.set(pending=0, rows=512)
        calls = [partial(face.run, x, layer, scratch, device.words(prefill=True)) for layer in layers]
        yield f"{title}, prefill of 512", calls, pass_bytes(shape, 0, 512, commits=True)


def sampling(bench, columns=248_320):
    """Choices of 16 rows, whose logits lie in the L2 cache as after the head."""
    test_native_sample.device = lambda: bench.device
    ours = test_native_sample.choices(columns)
    block = Block(ours.device.word(Control.LENGTH), 1, 0, 16)
    for kind, settings in product(test_native_sample.KINDS, SETTINGS):
        ours.put(test_native_sample.logits(kind, 16, columns))
        ours.chooser.prepare(settings)
        call = partial(ours.sampler.choose, ours.buffers, ours.matrix, ours.buffers.chosen, block)
        yield f"{kind}, {settings}", [call] * 20, 2 * 16 * columns


def walk(bench):
    """Candidates and walks of a drafter with a vocabulary of 248,320."""
    test_native_walk.device.made = bench.device
    for head, settings in product(test_native_walk.HEADS, (GREEDY, Sampling(0.7, 20, 0.95, 1))):
        case = test_native_walk.random_case(
            head, (248_320, 5120, 256, 16 if head == "selector" else 64, 7 if head == "selector" else 8)
        )
        case.prepare()
        case.walk(settings)
        call = partial(case.walker.walk, case.logits, case.device.control, case.counted, case.tokens, case.sampling)
        yield f"{head} {settings}", [call] * 20, 0
        yield f"{head} candidates", [case.prepare] * 20, 2 * case.shape.rows * case.shape.vocabulary


FAMILIES = {"linear": linear, "tiles": tiles, "experts": experts, "attend": attention, "delta": gated_delta,
            "sample": sampling, "walk": walk}  # fmt: skip


def main():
    bench, lines = Bench(), []
    print(f"{bench.gpu.name}, {bench.gpu.sm_count} SMs, read bandwidth {bench.bandwidth / 1e12:.3f} TB/s")
    for family in sys.argv[1:] or FAMILIES:
        for name, calls, nbytes in FAMILIES[family](bench):
            seconds = bench.seconds(calls)
            share = nbytes / bench.bandwidth / seconds
            print(f"{family:8s} {name:60s} {nbytes / 1e6:9.2f} MB {seconds * 1e6:9.2f} us {share:6.1%}", flush=True)
            lines.append([family, name, nbytes, seconds])
    print(json.dumps({"device": bench.gpu.name, "read_bandwidth": bench.bandwidth, "lines": lines}))


if __name__ == "__main__":
    main()
