"""Times mixtures of experts in CUDA graphs, against the bytes that the routing needs; prints one JSON line last.

Run on a GPU: python tests/gpu/bench_native_experts.py. Layers in turn have weights of their own, more than the L2 cache
holds; the read bandwidth is measured in the same run.
"""

import ctypes
import json
from statistics import median

import numpy as np
from native_linear_support import cubin
from native_state_support import Device

from edge_dflash.backends.cuda.kernels.experts import ExpertKernels, ExpertsBuffers, ExpertsShape, ExpertWeights, Forced
from edge_dflash.backends.cuda.memory import NULL, Allocator, Matrix, Norm

MODELS = {  # hidden, experts, chosen, intermediate, shared members, renormalised; layers in turn
    "35B-A3B": ((2048, 256, 8, 512, 1, True), 8),
    "122B-A10B": ((3072, 256, 8, 1024, 1, True), 3),
    "30B-A3B": ((2048, 128, 8, 768, 0, True), 8),
}
MOST_ROWS, POSITIONS = 2048, 4096


class Bench:
    def __init__(self, load=None):
        self.gpu = Device().gpu
        arch = f"sm{self.gpu.sm}" + ("a" if self.gpu.sm >= 90 else "")
        self.load = load or (lambda unit: cubin(unit, arch))
        module = self.gpu.load(cubin("bench", arch))
        self.read, self.fill = module.kernel("bench_read"), module.kernel("bench_fill")
        self.kernels = ExpertKernels(self.gpu, self.load)
        self.scale = self.gpu.upload(np.full(1 << 21, 1e-3, np.float32))
        self.sink = self.gpu.allocate(64)

    def model(self, name, form):
        shape, layers = MODELS[name]
        self.shape = shape = ExpertsShape(*shape, form, form)
        gpu, size = self.gpu, [shape.members * layout.nbytes for layout in (shape.up, shape.down)]
        arena = gpu.allocate(layers * sum(size))
        gpu.launch(self.fill, (1024, 1, 1), 512, (arena, ctypes.c_longlong(arena.nbytes // 4), 7))
        self.arena = arena
        rng = np.random.default_rng(0)
        values = rng.standard_normal((MOST_ROWS + layers * shape.experts, shape.hidden), dtype=np.float32)
        data = gpu.upload((values.view(np.uint32) >> 16).astype(np.uint16))
        self.x = Matrix(data, shape.hidden)
        at, self.layers = 2 * MOST_ROWS * shape.hidden, []
        for i in range(layers):
            first = i * sum(size)
            router = data.at(at + 2 * i * shape.experts * shape.hidden, 2 * shape.experts * shape.hidden)
            self.layers.append(ExpertWeights(router, router if shape.shared else NULL, arena.at(first, size[0]),
                                             self.scale, arena.at(first + size[0], size[1]), self.scale))  # fmt: skip
        self.buffers = ExpertsBuffers.take(Allocator(gpu), shape, MOST_ROWS)
        self.out, self.normal = (Matrix(gpu.allocate(2 * MOST_ROWS * shape.hidden), shape.hidden) for _ in range(2))
        self.force(np.array([rng.permutation(shape.experts)[: shape.chosen] for _ in range(POSITIONS)], np.int32))

    def force(self, table):
        self.forced = Forced(self.gpu.upload(table), len(table), self.gpu.upload(np.array([0], np.int32)))

    def seconds(self, enqueue, repeats=9):
        graph = self.gpu.capture(enqueue)
        for _ in range(2):
            graph.launch()
        return median(self.gpu.seconds(graph.launch) for _ in range(repeats))

    def bandwidth(self):
        times = [
            self.seconds(lambda b=blocks: self.gpu.launch(
                self.read, (b * self.gpu.sm_count, 1, 1), 512,
                (self.arena, ctypes.c_longlong(self.arena.nbytes // 16), self.sink)))
            for blocks in (2, 4)
        ]  # fmt: skip
        return self.arena.nbytes / min(times)

    def layer(self, weights, rows):
        norm = Norm(self.scale, 1e-6, self.normal)
        self.kernels.run(self.shape, weights, self.buffers, self.x, self.out, rows, residual=self.out, norm=norm,
                         forced=self.forced)  # fmt: skip

    def needed(self, rows):
        """Bytes of a layer: experts that some row chose, the shared one, the router."""
        shape, gpu = self.shape, self.gpu
        gpu.fill(self.buffers.distinct)
        self.layer(self.layers[0], rows)
        gpu.synchronize()
        distinct = int(gpu.read(self.buffers.distinct, (1,), np.uint64)[0])
        member = shape.up.nbytes + shape.down.nbytes
        return distinct, (distinct + shape.shared) * member + 2 * (shape.experts + 1) * shape.hidden

    def time(self, rows):
        turns = 2 if rows <= 64 else 1
        chain = self.layers * turns
        return self.seconds(lambda: [self.layer(w, rows) for w in chain]) / len(chain)

    def step(self, name, rows):
        """One of the two products alone, by the list of the pass before."""
        self.layer(self.layers[0], rows)
        shape, buffers, chain = self.shape, self.buffers, self.layers * (2 if rows <= 64 else 1)
        gated, tile = Matrix(buffers.gated, shape.intermediate), shape.tile(rows, self.gpu.sm)
        what = {
            "up": (lambda w: (w.up, w.up_scale), self.x, buffers.gated),
            "down": (lambda w: (w.down, w.down_scale), gated, buffers.sums),
        }
        stack, x, out = what[name]
        return self.seconds(lambda: [
            self.kernels._multiply(name, shape, stack(w), x, out, buffers.list, rows, tile) for w in chain
        ]) / len(chain)  # fmt: skip


def main():
    bench, lines = Bench(), []
    for name, form in (*((name, "nvfp4") for name in MODELS), ("35B-A3B", "fp8")):
        bench.model(name, form)
        bandwidth = bench.bandwidth()
        print(f"{bench.gpu.name}, {name} {form}, read bandwidth {bandwidth / 1e12:.3f} TB/s")
        for rows in (1, 2, 4, 8, 16, 17, 512, 2048):
            distinct, nbytes = bench.needed(rows)
            seconds, up, down = bench.time(rows), bench.step("up", rows), bench.step("down", rows)
            share = nbytes / bandwidth / seconds
            print(f"{rows:5d} rows {distinct:4d} experts {nbytes / 1e6:7.1f} MB {seconds * 1e6:7.1f} us {share:6.1%}"
                  f"   up {up * 1e6:7.1f} down {down * 1e6:7.1f}", flush=True)  # fmt: skip
            lines.append([name, form, rows, distinct, nbytes, seconds, up, down])
    print(json.dumps({"device": bench.gpu.name, "read_bandwidth": bandwidth, "lines": lines}))


if __name__ == "__main__":
    main()
