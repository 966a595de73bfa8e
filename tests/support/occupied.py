"""A GPU of which few multiprocessors are left: sleeping blocks hold the others (kernels/bench.cu)."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import numpy as np
from cuda.bindings import driver as cu
from forecast import clusters_held, joined

from edge_dflash.backends.cuda import driver
from edge_dflash.backends.cuda.driver import Gpu, Kernel

ALL_SHARED = 227 << 10  # bytes: with them no other block fits on a multiprocessor
LIMIT = 8  # seconds after which sleepers end by themselves


class Occupied(Gpu):
    """A Gpu that says it is another device, and answers about clusters as its multiprocessors by GPC allow."""

    def become(self, sm: int, layout: tuple[int, ...]) -> None:
        """From now on SM ``sm`` with these multiprocessors; () for the device itself."""
        self.sm, self.sm_count, self.layout = sm, sum(layout), layout

    def most_clusters(self, kernel: Kernel, blocks: int, threads: int, shared_bytes: int) -> int:
        """See :class:`Gpu`."""
        asked = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel.handle, threads, shared_bytes)
        return clusters_held(self.layout, blocks, driver.check(asked, "asking for blocks of a multiprocessor"))


class Sleepers:
    """Kernels that place and sleep, on a stream beside the one of the Gpu that is measured."""

    def __init__(self, cubin: bytes) -> None:
        self._gpu, self._signal = Gpu(), Gpu()  # streams: one sleeps, the other wakes it
        gpu = self._gpu
        module = gpu.load(cubin)
        self._sleep = module.kernel("bench_sleep", shared_bytes=ALL_SHARED)
        self._place = module.kernel("bench_place", shared_bytes=ALL_SHARED)
        # Polled memory of the host makes all of the device's memory ten times slower.
        self._stop, self._go, self._end = gpu.allocate(4), gpu.pinned((1,), np.uint32), gpu.pinned((1,), np.uint32)
        self._go[0], self._end[0] = 0, 1
        self._where = gpu.allocate(4 * gpu.sm_count)
        self._left = gpu.allocate(4 * (-(-gpu.sm_count // 32)))
        self._said = gpu.allocate(24 * gpu.sm_count)
        self.clock = 0.0  # GHz, as the sleepers of the last session counted

    def gpcs(self) -> list[list[int]]:
        """Multiprocessors by GPC, as clusters of 2 to 8 blocks meet there."""
        return joined([cluster for size in (2, 3, 5, 7, 8, 6, 4) for cluster in self._clusters(size)])

    def _clusters(self, size: int) -> list[list[int]]:
        most = self._gpu.most_clusters(self._place, size, 32, ALL_SHARED)
        config = driver._launch_config((most * size, 1, 1), 32, ALL_SHARED)
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = size, 1, 1
        config.hStream, config.attrs, config.numAttrs = self._gpu.stream, [attribute], 1
        arguments = ((self._where.address,), (ctypes.c_void_p,))
        driver.check(cu.cuLaunchKernelEx(config, self._place.handle, arguments, 0), "placing clusters")
        return self._gpu.read(self._where, (most, size), np.uint32).tolist()

    @contextmanager
    def leaving(self, multiprocessors: list[int]):
        """Only these are free inside. Raises RuntimeError when others turn out to be."""
        gpu, count = self._gpu, self._gpu.sm_count
        words = np.zeros(-(-count // 32), np.uint32)
        for i in multiprocessors:
            words[i // 32] |= np.uint32(1 << i % 32)
        gpu.write(self._left, words)
        gpu.fill(self._said)
        gpu.write_from(self._stop, self._go)
        gpu.synchronize()
        arguments = (self._left, self._stop, ctypes.c_ulonglong(LIMIT * 10**9), self._said)
        gpu.launch(self._sleep, (count, 1, 1), 32, arguments, shared_bytes=ALL_SHARED)
        try:
            yield
        finally:
            self._signal.write_from(self._stop, self._end)
            gpu.synchronize()
        said = gpu.read(self._said, (count, 3), np.uint64)
        held = np.flatnonzero(said[:, 0]).tolist()
        if sorted(held + list(multiprocessors)) != list(range(count)):
            raise RuntimeError(f"sleepers held {held}, {sorted(multiprocessors)} were to be left")
        if (said[held, 2] >= LIMIT * 10**9).any():
            raise RuntimeError(f"the sleepers' {LIMIT} s were over")
        self.clock = float(np.median(said[held, 1] / said[held, 2]))
