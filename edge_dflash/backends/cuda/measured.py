"""What benchmarks ask of a native backend: forced choices, the experts that were read, times of steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.graphs import REPEATS, Capture, Cycles, Graphs, HostBuffers, StepTime, profile_cycle
from edge_dflash.backends.cuda.loading import Loaded
from edge_dflash.backends.cuda.states import Lane
from edge_dflash.decode.backend import PairShape
from edge_dflash.errors import BackendError


class Measured(ABC):
    """The part of :class:`~edge_dflash.backends.cuda.backend.NativeBackend` that serves benchmarks alone."""

    gpu: Gpu
    loaded: Loaded
    graphs: Graphs
    _shape: PairShape
    _host: HostBuffers
    _capture: Capture
    _cycles: Cycles
    _own_cycles: Cycles

    def force(self, accept: Sequence[int] | None) -> None:
        """Benchmarks: accept so many drafts a cycle, whatever the target says; None ends it. Captures graphs."""
        self.gpu.enter()
        self._cycles = self._own_cycles
        if accept is None:
            return
        if not accept or not all(0 <= n <= self._shape.drafts for n in accept):
            raise BackendError(f"accept pattern {list(accept)} is not made of 0 to {self._shape.drafts} drafts")
        self._cycles = self._capture.cycles(self.gpu.upload(np.array(accept, np.int32)))

    def profile(self, anchor: int = 0) -> list[StepTime]:
        """Time of each step of one cycle, on the device's clock; the steps do not overlap here.

        Captures a graph and runs REPEATS cycles from ``anchor``, of which it leaves an empty sequence.
        """
        self._begin_at(anchor, 0, REPEATS * self._shape.verify_rows)
        self._host.count(self._shape.verify_rows)
        times = profile_cycle(self.gpu, self.loaded, self._capture)
        self.reset()
        return times

    def force_experts(self, table: npt.NDArray[np.int32] | None) -> None:
        """Benchmarks: the token at position p takes experts table[p % len(table)] in every layer; None ends it.

        Captures graphs, and ends what :meth:`force` began. Raises BackendError for a target without experts.
        """
        if (mixtures := self.loaded.mixtures) is None:
            raise BackendError("the pair has no experts on this backend; none can be forced")
        self.gpu.enter()
        mixtures.force(table)
        self.graphs, self._own_cycles = self._capture.passes(), self._capture.cycles()
        self._cycles = self._own_cycles

    def experts_read(self) -> int:
        """Benchmarks: experts that rows of verify passes have chosen since load, all layers together."""
        self.gpu.enter()
        self.gpu.synchronize()
        return self.loaded.mixtures.read if self.loaded.mixtures else 0

    @abstractmethod
    def reset(self, lane: int = 0) -> None:
        """Forget the sequence."""

    @abstractmethod
    def _begin_at(self, anchor: int, lane: int, rows: int) -> Lane:
        """A new pass that drafts from ``anchor``."""
