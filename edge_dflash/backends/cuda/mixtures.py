"""The mixtures of experts of a pair on the device: their sizes, weights and memory, and what a benchmark forces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels import experts
from edge_dflash.backends.cuda.memory import NULL, Allocator, DevicePointer, Matrix, Norm, Words
from edge_dflash.backends.cuda.schedule import Schedule
from edge_dflash.backends.cuda.steps import Mix
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.errors import BackendError


def mixes(schedules: Iterable[Schedule]) -> dict[str, Mix]:
    """The layers of experts in some passes, by the output of the op. Raises BackendError for what no kernel takes."""
    found = {step.op.output: step for each in schedules for step in each.steps if isinstance(step, Mix)}
    for step in found.values():
        shape_of(step)
    return found


def shape_of(step: Mix) -> experts.ExpertsShape:
    """Raises BackendError for what the kernels do not take."""
    up, down, op = step.up, step.down, step.op
    sizes = (up.layout.k, up.experts, op.top_k, down.layout.k, up.parts, op.renormalised)
    return experts.ExpertsShape(*sizes, up.layout.format, down.layout.format)


def take_buffers(memory: Allocator, steps: Mapping[str, Mix], rows: int) -> experts.ExpertsBuffers:
    """Memory of all layers, which are of one size but for formats. Raises BackendError otherwise."""
    first, *others = [shape_of(step) for step in steps.values()]
    for shape in others:
        if replace(shape, up_format=first.up_format, down_format=first.down_format) != first:
            raise BackendError(f"layers of experts differ: {shape} beside {first}; the native backend takes one size")
    return experts.ExpertsBuffers.take(memory, first, rows)


def count_mixtures(memory: Allocator, steps: Mapping[str, Mix], rows: int) -> None:
    """Count what :class:`Mixtures` will take, if there are some. Raises BackendError for layers of different sizes."""
    if not steps:
        return
    take_buffers(memory, steps, rows)
    memory.count("experts", experts.COUNTER_BYTES)
    for step in steps.values():
        stacks = sum(stack.nbytes + 4 * stack.rows for stack in (step.up, step.down))
        routers = 2 * step.up.layout.k * (step.up.experts + (step.op.shared is not None))
        memory.count("target weights", stacks + routers)


class Mixtures:
    """All layers, loaded."""

    def __init__(
        self,
        gpu: Gpu,
        kernels: experts.ExpertKernels,
        weights: NativeWeights,
        memory: Allocator,
        steps: Mapping[str, Mix],
        rows: int,
    ) -> None:
        """Bring the weights to the device; ``rows``: most rows of a pass."""
        self._gpu, self._kernels, self._steps = gpu, kernels, steps
        self._buffers = take_buffers(memory, steps, rows)
        uncounted = memory.take("experts", experts.COUNTER_BYTES)
        self._unread = replace(self._buffers, distinct=uncounted)  # of passes that are not counted
        for counter in (self._buffers.distinct, self._unread.distinct):
            gpu.fill(counter)
        self._shapes = {name: shape_of(step) for name, step in steps.items()}
        self._weights = {name: self._load(step, weights, memory) for name, step in steps.items()}
        self._table: tuple[DevicePointer, int] | None = None

    def _load(self, step: Mix, weights: NativeWeights, memory: Allocator) -> experts.ExpertWeights:
        up, down = (weights.stack(self._gpu, stack) for stack in (step.up, step.down))
        router = weights.embedding(self._gpu, step.op.router)
        judge = weights.embedding(self._gpu, step.op.shared.judge) if step.op.shared else NULL
        loaded = experts.ExpertWeights(router, judge, up.data, up.scale, down.data, down.scale)
        memory.count("target weights", sum(pointer.nbytes for pointer in vars(loaded).values()))
        return loaded

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self._steps)

    @property
    def read(self) -> int:
        """Experts that rows of verify passes have chosen since load, in all layers."""
        return int(self._gpu.read(self._buffers.distinct, (1,), np.uint64)[0])

    def force(self, table: npt.NDArray[np.int32] | None) -> None:
        """Benchmarks: the token at position p takes experts table[p % len(table)]; None ends it.

        Raises BackendError for a table of another shape. Graphs have to be captured anew.
        """
        if table is None:
            self._table = None
            return
        op = next(iter(self._steps.values())).op
        count, chosen = len(op.gates), op.top_k
        fits = table.ndim == 2 and table.shape[1] == chosen and table.min() >= 0 and table.max() < count
        if not fits or any(len(set(line)) < chosen for line in table.tolist()):
            raise BackendError(f"forced experts are not [positions, {chosen}] different ones of {count}")
        self._table = self._gpu.upload(np.ascontiguousarray(table, np.int32)), len(table)

    def run(
        self,
        step: Mix,
        x: Matrix,
        out: Matrix,
        rows: int,
        words: Words,
        *,
        residual: Matrix | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Enqueue one layer of a pass."""
        shape, weights = self._shapes[step.op.output], self._weights[step.op.output]
        buffers = self._unread if words.prefill else self._buffers
        forced = None if self._table is None else experts.Forced(*self._table, words.length)
        run, valid = self._kernels.run, words.rows_there
        run(shape, weights, buffers, x, out, rows, residual=residual, norm=norm, valid=valid, forced=forced)
