"""The device that a benchmark runs on: what it reads of it, and what it forces on a native backend.

The read bandwidth and the rate of a matrix product are measured in the same run as everything that is compared with
them. Choices and experts are forced, experts counted and steps timed from outside a loaded backend.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.compile import ARCHS, cached_cubin
from edge_dflash.backends.cuda.memory import NULL
from edge_dflash.backends.cuda.steps import Head, Mix, Multiply, PassStep, Project, State
from edge_dflash.backends.cuda.support import device_sm
from edge_dflash.bench.result import DeviceMemory
from edge_dflash.board.archs import arch_of_sm
from edge_dflash.decode.backend import Backend
from edge_dflash.errors import BackendError

if TYPE_CHECKING:  # importing them needs CUDA's bindings
    from edge_dflash.backends.cuda.backend import NativeBackend
    from edge_dflash.backends.cuda.driver import Gpu

CUBINS = Path.home() / ".cache" / "edge-dflash" / "cubins"
REPEATS = 5  # cycles whose steps are timed
_READ_BYTES, _LEAST_BYTES = 4 << 30, 256 << 20  # of the bandwidth probe; the least is far more than any L2 cache
_PROBES = 12  # runs of a probe
_SIDE = 8192  # of the matrices of the matmul probe


def on_device(backend: Backend) -> NativeBackend | None:
    """The backend, if it is one on a GPU."""
    return cast("NativeBackend", backend) if hasattr(backend, "gpu") else None


@dataclass(frozen=True)
class Device:
    """What was measured of the device before anything was loaded."""

    description: Mapping[str, Any] = field(default_factory=dict)
    free_bytes: int = 0
    bandwidth: float | None = None  # bytes a second
    matmul_rate: float | None = None  # operations a second of a BF16 product
    matmul_by: str | None = None


def probe_device(cubin_folder: Path, say: Callable[[str], None]) -> tuple[Device, Callable[[str], bytes]]:
    """Read bandwidth and matrix rate of the GPU, and where its cubins come from. Raises BackendError without a GPU."""
    cubin = cubins(cubin_folder, device_sm())
    from edge_dflash.backends.cuda.driver import Gpu  # needs CUDA's bindings

    say("measuring the device")
    rate, by = matmul_rate()
    with closing(Gpu()) as gpu:
        bandwidth = read_bandwidth(gpu, cubin)
        description = {"device": gpu.name, "sm": gpu.sm, "multiprocessors": gpu.sm_count}
    with closing(Gpu()) as gpu:  # without the memory of the probe
        free, _ = gpu.free_bytes()
    return Device(description, free, bandwidth, rate, by), cubin


def cubins(folder: Path, sm: int) -> Callable[[str], bytes]:
    """Cubins of compilation units for a device of SM ``sm`` (90 for 9.0): compiled once and kept in ``folder``.

    Raises BackendError for a device without kernels; the result raises BuildError when it has to compile and cannot.
    """
    if (arch := arch_of_sm(sm)) is None or arch.kernels is None:
        raise BackendError(f"this GPU is SM{sm}; the kernels are built for {', '.join(ARCHS)}")
    return partial(cached_cubin, arch=arch.kernels, cache=folder)


def read_bandwidth(gpu: Gpu, cubin: Callable[[str], bytes]) -> float:
    """Bytes a second of a kernel that only reads, over 4 GiB or an eighth of free memory: the best of several runs.

    Allocates; the memory is the device's until ``gpu`` is closed.
    """
    free, _ = gpu.free_bytes()
    nbytes = max(min(_READ_BYTES, free // 8), _LEAST_BYTES) // 16 * 16
    module = gpu.load(cubin("bench"))
    read, fill = module.kernel("bench_read"), module.kernel("bench_weights")
    memory, sink = gpu.allocate(nbytes), gpu.allocate(4)
    gpu.launch(fill, (8 * gpu.sm_count, 1, 1), 256, (memory, ctypes.c_longlong(nbytes // 4), ctypes.c_uint32(1), 4, 0))
    arguments = (memory, ctypes.c_longlong(nbytes // 16), sink)
    best = 0.0
    for blocks in (2, 3, 4, 6):
        graph = gpu.capture(partial(gpu.launch, read, (blocks * gpu.sm_count, 1, 1), 512, arguments))
        for _ in range(3):  # clocks rise
            graph.launch()
        best = max(best, *(nbytes / gpu.seconds(graph.launch) for _ in range(_PROBES)))
    return best


def matmul_rate() -> tuple[float, str] | tuple[None, None]:
    """Operations a second of a large BF16 product, and who did it: cuBLAS through torch. None without torch's CUDA."""
    if find_spec("torch") is None:
        return None, None
    import torch

    if not torch.cuda.is_available():
        return None, None
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(_PROBES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch.matmul(a, b)
        torch.cuda.synchronize()
        best = max(best, 2 * _SIDE**3 / (time.perf_counter() - began))
    del a, b
    torch.cuda.empty_cache()
    return best, f"cuBLAS through torch {torch.__version__}, {_SIDE} x {_SIDE} x {_SIDE}"


def memory(device: NativeBackend, free_before: int, allocations: int) -> DeviceMemory:
    """Memory of a loaded backend; ``allocations`` is their count when loading had ended."""
    device.gpu.enter()
    free, total = device.gpu.free_bytes()
    return DeviceMemory(
        dict(device.budget), device.gpu.allocated_bytes, free_before - free, total, device.gpu.allocations - allocations
    )


def force(backend: NativeBackend, accept: Sequence[int] | None) -> None:
    """Accept so many drafts a cycle, whatever the target says; None ends it. Captures graphs.

    Raises BackendError for a number of drafts that no cycle has.
    """
    most = backend.shape.drafts
    if accept is not None and not (accept and all(0 <= n <= most for n in accept)):
        raise BackendError(f"accept pattern {list(accept)} is not made of 0 to {most} drafts")
    backend.gpu.enter()
    pattern = NULL if accept is None else backend.gpu.upload(np.array(accept, np.int32))
    for each in backend.graphs.values():
        each.capture(pattern)


def force_experts(backend: NativeBackend, table: npt.NDArray[np.int32] | None) -> None:
    """Give the token at position p the experts table[p % len(table)] in every layer; None ends it.

    Captures graphs, and ends what :func:`force` began. Raises BackendError for a target without experts.
    """
    if (mixtures := backend.loaded.mixtures) is None:
        raise BackendError("the pair has no experts on this backend; none can be forced")
    backend.gpu.enter()
    mixtures.force(table)
    for each in backend.graphs.values():
        each.capture()


def experts_read(backend: NativeBackend) -> int:
    """Experts that rows of verify passes have chosen since load, all layers together."""
    backend.gpu.enter()
    backend.gpu.synchronize()
    return backend.loaded.mixtures.read if backend.loaded.mixtures else 0


@dataclass(frozen=True)
class StepTime:
    """One step of a cycle."""

    name: str  # what it is: the weights of a linear, or the op
    seconds: float  # median, a launch's latency included
    weight_bytes: int  # that it reads


def profile(backend: NativeBackend, anchor: int = 0) -> list[StepTime]:
    """Time of each step of one cycle, on the device's clock, in order; the steps do not overlap here.

    Captures a graph and runs REPEATS cycles from ``anchor``, of which it leaves an empty sequence.
    """
    gpu, loaded, graphs, rows = backend.gpu, backend.loaded, backend.graphs[1], backend.shape.verify_rows
    backend.begin_at(anchor, 0, REPEATS * rows)
    backend.host.count((rows, 0.0))
    steps: list[PassStep] = []
    count = sum(len(loaded.passes[name].schedule.steps) for name in ("propose", "verify")) + 1
    stamps = gpu.allocate(8 * count)

    def around(step: PassStep | None) -> None:
        loaded.common.kernels.cycle.stamp(stamps.at(8 * len(steps), 8))
        if step is not None:
            steps.append(step)

    graph = gpu.capture(lambda: graphs.enqueue_cycle(rows, around=around))
    readings, mixtures = [], loaded.mixtures
    before = mixtures.read if mixtures else 0
    for _ in range(REPEATS):
        graph.launch()
        readings.append(np.diff(gpu.read(stamps, (count,), np.uint64).astype(np.int64)))
    times = [median(values) * 1e-9 for values in zip(*(r.tolist() for r in readings), strict=True)]
    experts = (mixtures.read - before) / REPEATS / mixtures.layers if mixtures else 0.0
    backend.reset()
    return [_timed(step, seconds, experts) for step, seconds in zip(steps, times, strict=True)]


def _timed(step: PassStep, seconds: float, experts: float) -> StepTime:
    """``experts``: read by a layer, on average."""
    match step:
        case Mix():
            each, router = step.up.layout.nbytes + step.down.layout.nbytes, 2 * step.up.layout.k * step.up.experts
            return StepTime(step.label, seconds, round((experts + step.up.parts) * each) + router)
        case Multiply() | Project() | Head():
            side = step.side.layout.nbytes if isinstance(step, Multiply) and step.side else 0
            stack = step.stack
            return StepTime(f"{stack.names[0]} {stack.layout.format}", seconds, stack.layout.nbytes + side)
        case State():
            return StepTime(f"{type(step.op).__name__} {step.op.state}", seconds, 0)
        case _:
            return StepTime(step.label, seconds, 0)
