"""The CUDA driver: device, memory, modules, launches, graphs, events.

Everything goes through ``cuda.bindings`` (no torch, no run-time compiler). One :class:`Gpu` owns one stream; memory is
allocated at load and freed together by :meth:`Gpu.close`. Every driver error becomes a BackendError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.memory import Argument, DevicePointer
from edge_dflash.board.archs import supports
from edge_dflash.board.linux import read_memory
from edge_dflash.errors import BackendError, DeviceLostError

try:
    from cuda.bindings import driver as cu
except ModuleNotFoundError as missing:  # pragma: no cover - depends on the installation
    raise BackendError(
        f"the native backend needs {missing.name}; install it with: pip install 'edge-dflash[cuda]'"
    ) from None

__all__ = ["Gpu", "Graph", "Kernel", "Module", "as_argument", "check", "cu", "describe", "open_device"]


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel function."""

    handle: Any
    name: str


class Graph:
    """A captured sequence of launches, on the device."""

    def __init__(self, handle: Any, stream: Any) -> None:
        self._handle, self._stream = handle, stream

    def launch(self) -> None:
        """Enqueue the whole sequence."""
        check(cu.cuGraphLaunch(self._handle, self._stream), "launching a graph")


class Gpu:
    """The first device with its primary context, one stream and all memory that was allocated through it."""

    def __init__(self) -> None:
        self._device = open_device()
        self._context = check(cu.cuDevicePrimaryCtxRetain(self._device), "creating a context")
        check(cu.cuCtxSetCurrent(self._context), "entering the context")
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = check(cu.cuStreamCreate(flags), "creating a stream")
        self._memory, self._host, self._closed = list[Any](), list[Any](), False
        self.allocated_bytes = self.allocations = 0  # of all calls: a test sees that none happens after load
        self.name, self.sm, _, self._integrated = describe(self._device)
        self.sm_count = _attribute(self._device, "MULTIPROCESSOR_COUNT")

    def enter(self) -> None:
        """Make the device current in this thread, which may not have opened it. Raises BackendError after a close."""
        if self._closed:
            raise BackendError(f"{self.name} was closed; load the pair again")
        check(cu.cuCtxSetCurrent(self._context), "entering the context")

    def allocate(self, nbytes: int) -> DevicePointer:
        """Device memory, 256-byte aligned, not initialised."""
        handle = check(cu.cuMemAlloc(max(nbytes, 1)), f"allocating {nbytes} bytes of device memory")
        self._memory.append(handle)
        self.allocated_bytes += nbytes
        self.allocations += 1
        return DevicePointer(int(handle), nbytes)

    def pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A page-locked host array for read-backs."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = check(cu.cuMemAllocHost(nbytes), f"allocating {nbytes} bytes of page-locked memory")
        self._host.append(address)
        self.allocations += 1
        raw = memoryview((ctypes.c_uint8 * nbytes).from_address(int(address)))
        return np.frombuffer(raw, np.uint8).view(dtype).reshape(shape)

    def upload(self, array: npt.NDArray[Any]) -> DevicePointer:
        """Allocate and fill from a host array."""
        pointer = self.allocate(array.nbytes)
        self.write(pointer, array)
        return pointer

    def write(self, pointer: DevicePointer, array: npt.NDArray[Any]) -> None:
        """Copy a host array to the start of ``pointer`` and wait."""
        contiguous = np.ascontiguousarray(array)  # kept until the copy has run
        self.write_from(pointer, contiguous)
        self.synchronize()

    def read(self, pointer: DevicePointer, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Copy from device memory to a new host array and wait."""
        out = np.empty(shape, dtype)
        self.read_into(pointer, out)
        self.synchronize()
        return out

    def read_into(self, pointer: DevicePointer, out: npt.NDArray[Any]) -> None:
        """Enqueue a copy to a host array (page-locked inside a graph)."""
        if out.nbytes > pointer.nbytes:
            raise ValueError(f"{out.nbytes} bytes were asked for, the memory has {pointer.nbytes}")
        check(cu.cuMemcpyDtoHAsync(out.ctypes.data, pointer.address, out.nbytes, self.stream), "reading back")

    def write_from(self, pointer: DevicePointer, array: npt.NDArray[Any]) -> None:
        """Enqueue a copy from a page-locked host array, which must stay as it is until the copy has run."""
        if array.nbytes > pointer.nbytes:
            raise ValueError(f"{array.nbytes} bytes do not fit into {pointer.nbytes}")
        check(cu.cuMemcpyHtoDAsync(pointer.address, array.ctypes.data, array.nbytes, self.stream), "uploading")

    def fill(self, pointer: DevicePointer, byte: int = 0) -> None:
        """Enqueue setting every byte."""
        if pointer.nbytes:
            check(cu.cuMemsetD8Async(pointer.address, byte, pointer.nbytes, self.stream), "filling memory")

    def copy(self, source: DevicePointer, target: DevicePointer, rows: int, pitch: int, nbytes: int) -> None:
        """Enqueue copying the first ``nbytes`` bytes of each of ``rows`` rows, ``pitch`` bytes apart, on the device."""
        if min(source.nbytes, target.nbytes) < (rows - 1) * pitch + nbytes:
            raise ValueError(f"{rows} rows of {nbytes} bytes do not lie in {source.nbytes}, or {target.nbytes}, bytes")
        if not rows * nbytes:
            return
        part = cu.CUDA_MEMCPY2D()
        part.srcMemoryType = part.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        part.srcDevice, part.dstDevice, part.srcPitch, part.dstPitch = source.address, target.address, pitch, pitch
        part.WidthInBytes, part.Height = nbytes, rows
        check(cu.cuMemcpy2DAsync(part, self.stream), "copying on the device")

    def load(self, cubin: bytes) -> Module:
        """Load a cubin."""
        return Module(check(cu.cuModuleLoadData(cubin), f"loading a cubin on {self.name} (SM{self.sm})"))

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: int,
        arguments: Sequence[Argument],
        *,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        """Enqueue a kernel.

        ``overlap`` is programmatic dependent launch (SM90 and later): the kernel may start while the one before it
        ends, and must call griddepcontrol.wait before it reads what that one wrote.
        """
        config = _launch_config(grid, block, shared_bytes)
        config.hStream = self.stream
        if overlap and supports(self.sm, "clusters"):
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = zip(*(as_argument(a) for a in arguments), strict=True) if arguments else ((), ())
        check(cu.cuLaunchKernelEx(config, kernel.handle, (values, types), 0), f"launching {kernel.name}")

    def most_clusters(self, kernel: Kernel, blocks: int, threads: int, shared_bytes: int) -> int:
        """Clusters of so many blocks that run at the same time; ``threads`` and dynamic shared memory are a block's."""
        config = _launch_config((blocks, 1, 1), threads, shared_bytes)
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = blocks, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        doing = f"asking how many clusters of {blocks} blocks of {kernel.name} fit"
        return int(check(cu.cuOccupancyMaxActiveClusters(kernel.handle, config), doing))

    def prefer_shared(self, kernel: Kernel) -> None:
        """Run ``kernel`` with as much of the L1 cache as possible made shared memory.

        A multiprocessor must be empty to change that division: kernels that ask for the same one can overlap.
        """
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(cu.cuFuncSetAttribute(kernel.handle, attribute, 100), f"asking for shared memory for {kernel.name}")

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Record what ``enqueue`` launches into a graph without running it, and bring that to the device."""
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(self.stream, mode), "starting a capture")
        try:
            enqueue()
        finally:
            captured = cu.cuStreamEndCapture(self.stream)
        handle = check(cu.cuGraphInstantiate(check(captured, "ending a capture"), 0), "instantiating a graph")
        check(cu.cuGraphUpload(handle, self.stream), "uploading a graph")
        return Graph(handle, self.stream)

    def synchronize(self) -> None:
        """Wait for everything enqueued."""
        check(cu.cuStreamSynchronize(self.stream), "waiting for the device")

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """Device time between two events around what ``enqueue`` enqueues, in seconds."""
        flags = cu.CUevent_flags.CU_EVENT_DEFAULT
        start, stop = (check(cu.cuEventCreate(flags), "creating an event") for _ in range(2))
        check(cu.cuEventRecord(start, self.stream), "recording an event")
        enqueue()
        check(cu.cuEventRecord(stop, self.stream), "recording an event")
        check(cu.cuEventSynchronize(stop), "waiting for an event")
        elapsed = float(check(cu.cuEventElapsedTime(start, stop), "reading a time")) / 1e3
        check(cu.cuEventDestroy(start), "freeing an event")
        check(cu.cuEventDestroy(stop), "freeing an event")
        return elapsed

    def free_bytes(self) -> tuple[int, int]:
        """Free and total device memory; of a Jetson, whose driver counts the page cache as used, MemAvailable."""
        free, total = (int(x) for x in check(cu.cuMemGetInfo(), "reading free memory"))
        if self._integrated:
            memory = read_memory(Path("/"))
            free = max(free, memory.available if memory else 0)
        return free, total

    def close(self) -> None:
        """Free all memory and leave the device, from any thread; twice without harm. Raises nothing if that fails."""
        if self._closed:
            return
        self._closed = True
        cu.cuCtxSetCurrent(self._context)
        cu.cuStreamSynchronize(self.stream)
        for handle in self._memory:
            cu.cuMemFree(handle)
        for handle in self._host:
            cu.cuMemFreeHost(handle)
        cu.cuStreamDestroy(self.stream)
        cu.cuDevicePrimaryCtxRelease(self._device)


class Module:
    """A loaded cubin."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def kernel(self, name: str, *, shared_bytes: int = 0) -> Kernel:
        """A kernel by its ``extern "C"`` name; dynamic shared memory above 48 KiB has to be named here."""
        function = check(cu.cuModuleGetFunction(self._handle, name.encode()), f"finding kernel {name}")
        if shared_bytes > 48 * 1024:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(function, attribute, shared_bytes), f"giving {name} {shared_bytes} bytes")
        return Kernel(function, name)


def open_device() -> Any:
    """The first device, without a context. Raises BackendError without driver or device."""
    try:
        status, *_ = cu.cuInit(0)
    except Exception as error:  # the bindings' own types, for a missing driver library
        raise BackendError(f"no NVIDIA driver was found ({type(error).__name__}); install the driver") from None
    if status != cu.CUresult.CUDA_SUCCESS:
        raise BackendError(f"the NVIDIA driver found no usable device ({status.name}); check nvidia-smi")
    return check(cu.cuDeviceGet(0), "opening the device")


def describe(device: Any) -> tuple[str, int, tuple[int, int], bool]:
    """Name, SM (90 for Hopper), the newest CUDA that the driver serves, whether it shares main memory with the CPU."""
    name = str(check(cu.cuDeviceGetName(128, device), "reading the name").split(b"\0")[0].decode())
    major, minor = (_attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    version = int(check(cu.cuDriverGetVersion(), "reading the driver's version"))  # 13020 for 13.2
    integrated = bool(_attribute(device, "INTEGRATED"))
    return name, 10 * major + minor, (version // 1000, version % 1000 // 10), integrated


def _attribute(device: Any, name: str) -> int:
    attribute = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cu.cuDeviceGetAttribute(attribute, device), f"reading {name}"))


def as_argument(value: Argument) -> tuple[Any, Any]:
    """Value and type; the type of a structure is its own."""
    match value:
        case DevicePointer():
            return value.address, ctypes.c_void_p
        case int():
            return int(value), ctypes.c_int32
        case float():
            return value, ctypes.c_float
        case ctypes.Structure():
            return value, None
        case _:
            return value.value, type(value)


def _launch_config(grid: tuple[int, int, int], block: int, shared_bytes: int) -> Any:
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.attrs, config.numAttrs = [], 0
    return config


_LASTING = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "INVALID_PC"),
        *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "LAUNCH_FAILED", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE"),
        *("CONTAINED", "CONTEXT_IS_DESTROYED", "DEVICE_UNAVAILABLE", "EXTERNAL_DEVICE", "UNKNOWN"),
    )
)
"""Statuses after which a context is of no use any more."""


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Value of a driver call; raises BackendError with the driver's words when it failed."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        said = (cu.cuGetErrorName(status), cu.cuGetErrorString(status))
        words = " ".join(text.decode() for _, text in said if text)
        lost = getattr(status, "name", "") in _LASTING
        raise (DeviceLostError if lost else BackendError)(f"{doing} failed: {words or status}")
    return values[0] if len(values) == 1 else tuple(values)
