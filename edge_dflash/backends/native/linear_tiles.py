"""Launches of kernels/linear_tiles.cu: linears over the many rows of a prefill chunk.

Knows the tiles of that file and their shared memory; what a launch computes (its job) is linear.py's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from edge_dflash.backends.native.driver import DevicePointer, Gpu, Kernel
from edge_dflash.backends.native.memory import Matrix
from edge_dflash.backends.native.weight_layout import UNIT_BYTES, WINDOW, Format, Layout

UNIT = "linear_tiles"  # compilation unit
_THREADS, _ROWS, _UNITS, _STAGES = 256, 128, 4, 3


class Tiles:
    """The loaded kernels."""

    def __init__(self, gpu: Gpu, cubin: Callable[[str], bytes]) -> None:
        self._gpu = gpu
        module = gpu.load(cubin(UNIT))
        self._kernels: dict[Format, Kernel] = {
            f: module.kernel(f"linear_tiles_{f}", shared_bytes=_shared(f)) for f in UNIT_BYTES
        }

    def launch(self, layout: Layout, job: ctypes.Structure, x: Matrix, rows: int, valid: DevicePointer) -> None:
        """Enqueue ``job`` over ``rows`` rows of x; tiles past the device count ``valid`` (unless null) are skipped."""
        grid = (-(-rows // _ROWS), -(-layout.units // _UNITS), 1)
        shared = _shared(layout.format)
        kernel = self._kernels[layout.format]
        self._gpu.launch(kernel, grid, _THREADS, (job, rows, valid), shared_bytes=shared, overlap=True)


def _shared(format: Format) -> int:
    return _STAGES * (_UNITS * UNIT_BYTES[format] + _ROWS * WINDOW[format] * 2)
