"""A network -> an engine for one architecture. TensorRT's messages become ours, with the op's name in them.

TensorRT's progress becomes one number: phases nest, and how many there are is TensorRT's own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT_RTX, flavour_of, load
from edge_dflash.backends.cuda.tensorrt.lower import Lowered, lower
from edge_dflash.backends.cuda.tensorrt.units import Binding, RowRange, Unit
from edge_dflash.board.archs import find_arch
from edge_dflash.errors import BackendError, BuildError
from edge_dflash.weights.formats import WeightStore


class Compiler:
    """Builds engines for ``arch``. Raises BackendError when no TensorRT that builds for it is installed.

    ``timing`` is the timing cache of earlier engines; it grows with each. TensorRT for RTX times nothing and has none.
    """

    def __init__(self, arch: str, timing: bytes = b"") -> None:
        flavour = flavour_of(arch)
        self.arch, self.trt = arch, load(flavour)
        self._named = flavour is TENSORRT_RTX  # the other flavour builds for the GPU at hand
        self.timing = timing
        self._log = error_log(self.trt)
        self._builder = self.trt.Builder(self._log)

    def lower(self, unit: Unit, store: WeightStore) -> Lowered:
        """Write a unit as a network. Raises BackendError with what TensorRT said, if it said anything."""
        self._log.errors.clear()
        try:
            return lower(unit, store, self.trt, self._builder)
        except BackendError as error:
            if not self._log.errors:
                raise
            first = self._log.errors[0]  # behind it, without a GPU, comes one about the driver
            raise BackendError(f"{error}; TensorRT says {' '.join(first.split())[:400]}") from None

    def build(self, lowered: Lowered, advance: Callable[[float], bool] | None = None) -> memoryview:
        """Build an engine; profile i is ``profiles[i]`` of the unit. Raises BuildError with what TensorRT said.

        The bytes are TensorRT's own memory, not copied: write them out and let go of them. ``advance`` is told the
        share that is done, and stops the build by returning False.
        """
        self._log.errors.clear()
        config = self._config(lowered.unit)
        if advance is not None:
            config.progress_monitor = monitor(self.trt, advance)
        cache = None if self._named else self._timing_cache(config)
        engine = self._builder.build_serialized_network(lowered.network, config)
        if cache is not None:
            self.timing = bytes(cache.serialize())
        if engine is None:
            raise BuildError(
                f"plan {lowered.unit.key} for {self.arch}: TensorRT {self.trt.__version__} says {self._log.said}; "
                "build with another recipe, or report it"
            )
        return memoryview(engine).cast("B")

    def _timing_cache(self, config: Any) -> Any:
        """The cache so far, or an empty one when it is of another GPU or version."""
        cache = config.create_timing_cache(self.timing)
        if cache is None or not config.set_timing_cache(cache, False):
            cache = config.create_timing_cache(b"")
            config.set_timing_cache(cache, False)
        return cache

    def _config(self, unit: Unit) -> Any:
        config = self._builder.create_builder_config()
        for rows in unit.profiles:
            profile = self._builder.create_optimization_profile()
            for binding in unit.inputs:
                profile.set_shape(binding.name, *_shapes(binding, rows))
            config.add_optimization_profile(profile)
        config.max_aux_streams = 0  # one stream: a pass is one CUDA graph of one stream
        if self._named:
            config.num_compute_capabilities = 1
            capability = getattr(self.trt.ComputeCapability, find_arch(self.arch).capability)
            config.set_compute_capability(capability, 0)
        return config


def _shapes(binding: Binding, rows: RowRange) -> tuple[tuple[int, ...], ...]:
    tail = () if binding.columns is None else (binding.columns,)
    return tuple((count, *tail) for count in (rows.low, rows.best, rows.high))


def error_log(trt: Any) -> Any:
    """A logger that keeps errors. Its class exists only once TensorRT is loaded."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        @property
        def said(self) -> str:
            """The last error, in one line."""
            return " ".join((self.errors or ["nothing"])[-1].split())[:400]

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(message)

    return Log()


def monitor(trt: Any, advance: Callable[[float], bool]) -> Any:
    """A progress monitor. ``advance`` is told the share that is done, which never falls; False stops the build.

    Phases nest; a step of one counts as an equal share of it.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._open: list[tuple[str, int, int]] = []  # name, steps done, steps; innermost last
            self._most = 0.0

        def _innermost(self, name: str) -> list[int]:
            return [index for index, phase in enumerate(self._open) if phase[0] == name][-1:]

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._open.append((phase_name, 0, max(1, num_steps)))

        def phase_finish(self, phase_name: str) -> None:
            for index in self._innermost(phase_name):
                del self._open[index]

        def step_complete(self, phase_name: str, step: int) -> bool:
            for index in self._innermost(phase_name):
                self._open[index] = (phase_name, step + 1, self._open[index][2])
            done, width = 0.0, 1.0
            for _, steps_done, steps in self._open:
                done += width * min(steps_done, steps) / steps
                width /= steps
            self._most = max(self._most, min(done, 1.0))
            return advance(self._most)

    return Monitor()
