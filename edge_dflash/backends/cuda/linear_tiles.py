"""Launches of kernels/linear_tiles.cu: linears over the many rows of a prefill chunk.

Knows its two kernels, for any device and for Hopper, and their shared memory; what a launch computes (its job) is
linear.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from edge_dflash.backends.cuda.driver import DevicePointer, Gpu, Kernel
from edge_dflash.backends.cuda.memory import Matrix
from edge_dflash.backends.cuda.tensor_map import bf16_map
from edge_dflash.weights.layout import UNIT_BYTES, WINDOW, Format, Layout

UNIT = "linear_tiles"  # compilation unit
_THREADS, _ROWS, _UNITS, _STAGES = 256, 128, 4, 3
_HOPPER_THREADS, _HOPPER_SHARED, _CLUSTER, _BOX = 384, 232448, 2, (32, 64)  # as kernels/tiles_hopper.cuh


class Tiles:
    """The loaded kernels. ``hopper``: those with warpgroup products; by default where the device has them."""

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes], *, hopper: bool | None = None) -> None:
        self._gpu = gpu
        self._hopper = gpu.sm == 90 if hopper is None else hopper
        module, name = gpu.load(cubin(UNIT)), "hopper_tiles" if self._hopper else "linear_tiles"
        self._kernels: dict[Format, Kernel] = {
            f: module.kernel(f"{name}_{f}", shared_bytes=self._shared(f)) for f in UNIT_BYTES
        }

    def launch(self, layout: Layout, job: ctypes.Structure, x: Matrix, rows: int, valid: DevicePointer) -> None:
        """Enqueue ``job`` over ``rows`` rows of x; tiles past the device count ``valid`` (unless null) are skipped."""
        kernel, shared = self._kernels[layout.format], self._shared(layout.format)
        if self._hopper:
            grid = (self._gpu.sm_count // _CLUSTER * _CLUSTER, 1, 1)
            arguments = (job, bf16_map(x, rows, layout.k, _BOX), rows, valid)
            self._gpu.launch(kernel, grid, _HOPPER_THREADS, arguments, shared_bytes=shared, overlap=True)
        else:
            grid = (-(-rows // _ROWS), -(-layout.units // _UNITS), 1)
            self._gpu.launch(kernel, grid, _THREADS, (job, rows, valid), shared_bytes=shared, overlap=True)

    def _shared(self, format: Format) -> int:
        if self._hopper:
            return _HOPPER_SHARED
        return _STAGES * (_UNITS * UNIT_BYTES[format] + _ROWS * WINDOW[format] * 2)
