"""What the device itself can do, measured in the run that is compared with it: read bandwidth and matrix products."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from edge_dflash.backends.cuda.driver import Gpu

READ_BYTES = 4 << 30
_LEAST_BYTES = 256 << 20  # far more than any L2 cache
_REPEATS = 12
_SIDE = 8192  # of the matrices of the matmul probe


@dataclass(frozen=True)
class Matmul:
    """Rate of a large BF16 matrix product and who did it."""

    operations_per_second: float
    by: str


def read_bandwidth(gpu: Gpu, cubin: Callable[[str], bytes]) -> float:
    """Bytes a second of a kernel that only reads, over 4 GiB or an eighth of free memory: the best of several runs.

    Allocates; the memory is the device's until ``gpu`` is closed.
    """
    free, _ = gpu.free_bytes()
    nbytes = max(min(READ_BYTES, free // 8), _LEAST_BYTES) // 16 * 16
    module = gpu.load(cubin("bench"))
    read, fill = module.kernel("bench_read"), module.kernel("bench_weights")
    memory, sink = gpu.allocate(nbytes), gpu.allocate(4)
    words = ctypes.c_longlong(nbytes // 4)
    gpu.launch(fill, (8 * gpu.sm_count, 1, 1), 256, (memory, words, ctypes.c_uint32(1), 4, 0))
    best = 0.0
    for blocks in (2, 3, 4, 6):
        arguments = (memory, ctypes.c_longlong(nbytes // 16), sink)

        def enqueue(grid: int = blocks * gpu.sm_count, arguments: Any = arguments) -> None:
            gpu.launch(read, (grid, 1, 1), 512, arguments)

        graph = gpu.capture(enqueue)
        for _ in range(3):  # clocks rise
            graph.launch()
        best = max(best, *(nbytes / gpu.seconds(graph.launch) for _ in range(_REPEATS)))
    return best


def matmul_rate() -> Matmul | None:
    """Rate of a BF16 product of random matrices by cuBLAS through torch; None where torch or its CUDA is missing."""
    if find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.matmul(a, b)
        torch.cuda.synchronize()
        best = max(best, 2 * _SIDE**3 / (time.perf_counter() - began))
    del a, b
    torch.cuda.empty_cache()
    return Matmul(best, f"cuBLAS through torch {torch.__version__}, {_SIDE} x {_SIDE} x {_SIDE}")
