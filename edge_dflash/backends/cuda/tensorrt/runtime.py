"""Engines on a device: engines, and for each use of one a context whose shapes and addresses are set once.

All contexts work in one block of scratch, because engines run one after the other on one stream. A context is enqueued
once before anything is captured: only then does TensorRT have nothing left to set up. The calls of TensorRT that need
a GPU are all here, and ``execute_async_v3`` is the only one that runs after the load.

TensorRT's objects point at each other without holding each other: a context at its configuration (dropping that one
early ended in a segmentation fault at the context's next call, TensorRT for RTX 1.4), a configuration at its cache, a
context at its engine, an engine at the runtime, the runtime at its log. :class:`Engines` holds all of them and lets go
of what points before what is pointed at.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.memory import Allocator, DevicePointer
from edge_dflash.backends.cuda.tensorrt.compile import error_log
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT_RTX, Flavour, load
from edge_dflash.backends.cuda.tensorrt.lower import DTYPES
from edge_dflash.backends.cuda.tensorrt.units import Binding, Unit
from edge_dflash.errors import BackendError

Enqueue = Callable[..., None]  # of the rows, where they are others than before
Made = TypeVar("Made")
_WHENCE = {"SET": io.SEEK_SET, "CUR": io.SEEK_CUR, "END": io.SEEK_END}


@dataclass(frozen=True)
class LoadedEngine:
    """An engine on the device."""

    unit: Unit
    engine: Any
    scratch: int  # bytes that a context of it needs


@dataclass
class HeldContext:
    """An execution context, and the configuration that TensorRT for RTX reads from it for as long as it lives."""

    context: Any
    config: Any


class Engines:
    """Engines by their unit's key, and what they share."""

    def __init__(self, gpu: Gpu, flavour: Flavour) -> None:
        """Raises BackendError without TensorRT, or when it does not start here."""
        self._gpu, self._flavour, self._trt = gpu, flavour, load(flavour)
        self._log = error_log(self._trt)
        try:
            self._runtime = self._trt.Runtime(self._log)
        except RuntimeError as error:
            raise BackendError(f"{flavour.product} does not start here: {error}; check the driver") from None
        self._engines: dict[str, LoadedEngine] = {}
        self._contexts: list[HeldContext] = []
        self._cache: Any = None  # kernels that TensorRT for RTX compiled for this GPU, shared by all contexts
        self._scratch = DevicePointer(0, 0)

    def load(self, units: Mapping[str, Unit], files: Mapping[str, Path]) -> None:
        """Read the engines in ``files`` (by key). Raises BackendError naming the engine."""
        for key, path in files.items():
            try:
                engine = read_engine(self._trt, path, self._runtime.deserialize_cuda_engine)
            except RuntimeError as error:  # TensorRT for RTX 1.7 finds only here that there is no driver (measured)
                product = self._flavour.product
                raise BackendError(f"{path}: {product} does not start here: {error}; check the driver") from None
            if engine is None:
                raise self._failed(f"{path}", "cannot be loaded; build it again with edge-dflash build --finish")
            _check(self._trt, units[key], engine)
            self._engines[key] = LoadedEngine(units[key], engine, int(engine.device_memory_size_v2))

    def share_scratch(self, memory: Allocator) -> None:
        """Take the one block that all contexts work in."""
        size = max((engine.scratch for engine in self._engines.values()), default=0)
        self._scratch = memory.take("plans' scratch", size)

    def context(self, key: str, profile: int, rows: int, addresses: Mapping[str, int]) -> Enqueue:
        """Make a context for ``rows``, bound to device addresses; what enqueues it. Raises BackendError."""
        engine = self._engines[key]
        made = self._make(engine.engine).context
        if made is None:
            raise self._failed(key, "gives no execution context; free memory")
        made.set_device_memory(self._scratch.address, self._scratch.nbytes)
        stream = int(self._gpu.stream)
        if not made.set_optimization_profile_async(profile, stream):
            raise self._failed(key, f"does not take profile {profile}")
        self._shape(key, made, rows)
        for binding in (*engine.unit.inputs, *engine.unit.outputs):
            if not made.set_tensor_address(binding.name, addresses[binding.name]):
                raise self._failed(key, f"does not take an address for {binding.name}")
        if missing := list(made.infer_shapes()):
            raise self._failed(key, f"lacks the shape or address of {missing[0]}")
        return partial(self._enqueue, key, len(self._contexts) - 1)

    def _enqueue(self, key: str, number: int, rows: int | None = None) -> None:
        """Enqueue context ``number`` on the device's stream. Raises BackendError with TensorRT's words."""
        context = self._contexts[number].context
        if rows is not None:
            self._shape(key, context, rows)
        if not context.execute_async_v3(int(self._gpu.stream)):
            raise self._failed(key, "cannot be enqueued")

    def _shape(self, key: str, context: Any, rows: int) -> None:
        for binding in self._engines[key].unit.inputs:
            if not context.set_input_shape(binding.name, _shape(binding, rows)):
                raise self._failed(key, f"does not take {rows} rows of {binding.name}")

    def close(self) -> None:
        """Let go of contexts and engines, and so of the weights on the device, before that is closed."""
        with suppress(BackendError):  # a device that failed, or is closed already
            self._gpu.enter()
            self._gpu.synchronize()
        for held in self._contexts:
            held.context = None
            held.config = None
        self._contexts.clear()
        self._cache = None
        self._engines.clear()
        self._runtime = None

    def _make(self, engine: Any) -> HeldContext:
        """A context that is held from the moment that it exists; None in it where TensorRT gives none."""
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        config = self._config(engine, strategy) if self._flavour is TENSORRT_RTX else None
        given = strategy if config is None else config
        self._contexts.append(HeldContext(engine.create_execution_context(given), config))
        return self._contexts[-1]

    def _config(self, engine: Any, strategy: Any) -> Any:
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        # Compiled at the first enqueue and not behind our back: what is captured is what runs.
        config.dynamic_shapes_kernel_specialization_strategy = self._trt.DynamicShapesKernelSpecializationStrategy.EAGER
        self._cache = self._cache or config.create_runtime_cache()
        config.set_runtime_cache(self._cache)
        return config

    def _failed(self, what: str, how: str) -> BackendError:
        return BackendError(f"plan {what} {how}; TensorRT {self._trt.__version__} says {self._log.said}")


def _check(trt: Any, unit: Unit, engine: Any) -> None:
    """Raise BackendError unless an engine has the inputs and outputs, types and profiles of its unit."""
    found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    wanted = {binding.name: binding for binding in (*unit.inputs, *unit.outputs)}
    remedy = "it is not of this version: build it again with edge-dflash build --finish"
    if found != wanted.keys():
        odd = sorted(found ^ wanted.keys())[0]
        raise BackendError(f"plan {unit.key} and this version disagree on {odd}; {remedy}")
    for name, binding in wanted.items():
        dtype, shape = engine.get_tensor_dtype(name), tuple(engine.get_tensor_shape(name))
        if dtype != getattr(trt.DataType, DTYPES[binding.dtype]) or shape[1:] != _shape(binding, 1)[1:]:
            raise BackendError(
                f"plan {unit.key}: {name} is {dtype} {list(shape)}, wanted {binding.dtype} of "
                f"{binding.columns or 'no'} columns; {remedy}"
            )
    if engine.num_optimization_profiles != len(unit.profiles):
        count = engine.num_optimization_profiles
        raise BackendError(f"plan {unit.key} has {count} profiles, wanted {len(unit.profiles)}; {remedy}")


def _shape(binding: Binding, rows: int) -> tuple[int, ...]:
    return (rows,) if binding.columns is None else (rows, binding.columns)


def read_engine(trt: Any, path: Path, make: Callable[[Any], Made]) -> Made:
    """What ``make`` makes of a stream reader over ``path``, whose pages are given back. Raises OSError."""
    places = {int(getattr(trt.SeekPosition, name)): whence for name, whence in _WHENCE.items()}

    with path.open("rb") as file:

        class Reader(trt.IStreamReaderV2):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.IStreamReaderV2.__init__(self)

            def read(self, num_bytes: int, stream: int) -> bytes:
                return file.read(num_bytes)

            def seek(self, offset: int, where: Any) -> bool:
                try:
                    file.seek(offset, places[int(where)])
                except (OSError, ValueError):
                    return False
                return True

        try:
            return make(Reader())
        finally:  # the weights are on the device now, which on a Jetson is the same memory
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
