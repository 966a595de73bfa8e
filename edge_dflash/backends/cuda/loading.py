"""Everything on the device that a pair needs, made once: budget, weights, states, kernels, passes.

The budget is summed up before a byte is loaded. After loading nothing is allocated. Knows nothing of how dense ops are
computed: that is a :class:`Dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edge_dflash.backends.cuda import attend, delta, sample, small
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.linear import Linears
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, DevicePointer, Matrix, Memory, Place, place
from edge_dflash.backends.cuda.passes import Frame, Kernels, Pass, Shared
from edge_dflash.backends.cuda.schedule import Head, Project, Schedule, schedule
from edge_dflash.backends.cuda.splits import StreamSplits, row_tile
from edge_dflash.backends.cuda.states import Sizes, States
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Embed
from edge_dflash.model.program import PairPrograms
from edge_dflash.weights.stacks import Stack, pair_stacks

_SLACK = 512 << 20  # bytes left to the driver for code and graphs: 345 MB for a pair of 27B on an H200


@dataclass(frozen=True)
class Plan:
    """What will be on the device, known from the Programs and formats alone."""

    programs: PairPrograms
    precision: Precision
    sizes: Sizes
    schedules: Mapping[str, Schedule]  # prefill, verify, propose
    places: Mapping[str, Mapping[str, Place]]
    arena_bytes: int

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and columns of the head."""
        embed = next(op for op in self.programs.verify.ops if isinstance(op, Embed))
        return self.programs.verify.weights[embed.weight].shape[0]


@dataclass(frozen=True)
class Buffers:
    """Memory outside the arena."""

    shared: Shared
    ids: DevicePointer  # of a pass: [max(B, prefill rows)] int32
    drafts: DevicePointer  # choices of the drafter, of which row 0 is no draft: [row tile] int32
    choices: DevicePointer  # of the target: [row tile] int32
    logits: Matrix  # [row tile, V] BF16
    clock: DevicePointer
    result: DevicePointer
    sampling: sample.Buffers


@dataclass(frozen=True)
class Loaded:
    """A pair on the device."""

    plan: Plan
    memory: Memory
    states: States
    kernels: Kernels
    buffers: Buffers
    passes: Mapping[str, Frame]


@dataclass(frozen=True)
class Common:
    """What all passes share, whoever computes their dense ops."""

    states: States
    kernels: Kernels
    buffers: Buffers
    embeddings: Mapping[str, DevicePointer]

    def frame(self, plan: Plan, name: str) -> dict[str, Any]:
        """Fields of a pass's :class:`~edge_dflash.backends.cuda.passes.Frame`."""
        return {
            "plan": plan.schedules[name],
            "places": plan.places[name],
            "rows": plan.sizes.prefill_rows if name == "prefill" else plan.sizes.rows,
            "wide": name == "prefill",
            "vocabulary": plan.vocabulary,
            "kernels": self.kernels,
            "states": self.states,
            "shared": self.buffers.shared,
            "embeddings": self.embeddings,
            "ids": self.buffers.ids,
            "choices": self.buffers.drafts if name == "propose" else self.buffers.choices,
            "logits": self.buffers.logits,
        }


class Dense(Protocol):
    """Who computes the dense ops of a pair, and so decides the steps of its passes."""

    def plan(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> Plan:
        """Decide everything that needs no device. Raises BackendError."""
        ...

    def open(self, gpu: Gpu, plan: Plan) -> int:
        """Prepare for a device; bytes of scratch that passes share."""
        ...

    def count(self, memory: Memory) -> None:
        """Count the weights, before anything is loaded."""
        ...

    def load(self, memory: Memory, common: Common) -> Mapping[str, Frame]:
        """Load and count the weights; make the passes of the plan, by name. Raises BackendError."""
        ...

    def close(self) -> None:
        """Let go of what is on the device and was not allocated through ``gpu``, before ``gpu`` is closed."""
        ...


def load(gpu: Gpu, plan: Plan, dense: Dense, weights: NativeWeights, cubin: Callable[[str], bytes]) -> Loaded:
    """Allocate and fill everything. Raises BackendError, naming the largest parts, when it does not fit."""
    scratch = dense.open(gpu, plan)
    _check_budget(gpu, plan, dense, weights, scratch)
    memory = Memory(gpu)
    states = _states(plan, weights, memory)
    kernels = Kernels(
        small=small.Small(gpu, gpu.load(cubin(small.UNIT))),
        cycle=small.CycleKernels(gpu, gpu.load(cubin(small.CYCLE_UNIT))),
        sampler=sample.Sampler(gpu, gpu.load(cubin(sample.UNIT))),
        attention=_attention(gpu, states, cubin),
        delta=_delta(gpu, states, cubin),
    )
    _norms(plan, states)
    buffers = _buffers(plan, states, scratch, memory)
    gpu.fill(buffers.shared.counters)
    gpu.fill(buffers.result)
    buffers.sampling.clear(gpu)
    embeddings = {}
    for name in _embedded(plan):
        embeddings[name] = weights.embedding(gpu, name)
        memory.count("embedding", embeddings[name].nbytes)
    passes = dense.load(memory, Common(states, kernels, buffers, embeddings))
    return Loaded(plan, memory, states, kernels, buffers, passes)


def _check_budget(gpu: Gpu, plan: Plan, dense: Dense, weights: NativeWeights, scratch: int) -> None:
    memory = Memory(None)
    states = _states(plan, weights, memory)
    _norms(plan, states)
    _buffers(plan, states, scratch, memory)
    dense.count(memory)
    for name in _embedded(plan):
        shape = plan.programs.weights[name].shape
        memory.count("embedding", 2 * shape[0] * shape[1])
    free, total = gpu.free_bytes()
    if memory.total + _SLACK > free:
        parts = sorted(memory.bytes.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)
        raise BackendError(
            f"the pair needs {memory.total / 1e9:.2f} GB ({largest}), {gpu.name} has {free / 1e9:.2f} GB free of "
            f"{total / 1e9:.2f}; lower --max-context or --prefill-chunk, or free memory"
        )


def _states(plan: Plan, weights: NativeWeights, memory: Memory) -> States:
    return States(plan.programs, plan.precision, plan.sizes, weights.vector, weights.kv_scale, memory)


def _attention(gpu: Gpu, states: States, cubin: Callable[[str], bytes]) -> dict[str, attend.Attention]:
    module = gpu.load(cubin(attend.UNIT))
    made = {shape: attend.Attention(gpu, module, shape) for shape in set(states.shapes.values())}
    return {name: made[shape] for name, shape in states.shapes.items()}


def _delta(gpu: Gpu, states: States, cubin: Callable[[str], bytes]) -> dict[str, delta.GatedDelta]:
    if not states.delta_shapes:
        return {}
    module = gpu.load(cubin(delta.UNIT))
    made = {shape: delta.GatedDelta(gpu, module, shape) for shape in set(states.delta_shapes.values())}
    return {name: made[shape] for name, shape in states.delta_shapes.items()}


def _norms(plan: Plan, states: States) -> None:
    """Put every norm's weight on the device, so that a capture finds them there."""
    for steps in plan.schedules.values():
        for step in steps.steps:
            op = getattr(step, "norm", None) or getattr(step, "op", None)
            if op is not None and hasattr(op, "weight"):
                states.norm(op.weight, plus_one=op.plus_one)


def _buffers(plan: Plan, states: States, scratch: int, memory: Memory) -> Buffers:
    tile = row_tile(plan.sizes.rows)
    delta_scratch, counters = states.delta_scratch
    stride = -(-plan.vocabulary // 16) * 16
    shared = Shared(
        control=memory.take("cycle", CONTROL_BYTES),
        arena=memory.take("activations", plan.arena_bytes),
        attention=memory.take("scratch", states.attention_scratch),
        delta=memory.take("scratch", delta_scratch),
        counters=memory.take("scratch", counters),
        linear=memory.take("scratch", scratch),
    )
    return Buffers(
        shared=shared,
        ids=memory.take("cycle", 4 * max(plan.sizes.prefill_rows, tile)),
        drafts=memory.take("cycle", 4 * tile),
        choices=memory.take("cycle", 4 * tile),
        logits=Matrix(memory.take("logits", 2 * tile * stride), stride),
        clock=memory.take("cycle", small.CLOCK_BYTES),
        result=memory.take("cycle", 4 * small.RESULT_WORDS),
        sampling=sample.Buffers.take(memory, tile, plan.vocabulary),
    )


def _embedded(plan: Plan) -> list[str]:
    programs = plan.programs
    ops = (*programs.prefill.ops, *programs.verify.ops, *programs.propose.ops)
    return sorted({op.weight for op in ops if isinstance(op, Embed)})


class Launches:
    """:class:`~edge_dflash.backends.cuda.loading.Dense` of the native backend; ``cubin`` as there."""

    def __init__(self, weights: NativeWeights, cubin: Callable[[str], bytes]) -> None:
        self._weights, self._cubin = weights, cubin

    def plan(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> Plan:
        """Stacks, steps and places. Raises BackendError for what has no kernel."""
        if precision.activations != "bfloat16":
            raise BackendError(f"activations are {precision.activations!r}; the native backend computes in bfloat16")
        formats = self._weights.formats
        self._stacks: Mapping[str, Stack] = pair_stacks(programs, formats)
        schedules = {
            "prefill": schedule(programs.prefill, formats, wide=True),
            "verify": schedule(programs.verify, formats, wide=False),
            "propose": schedule(programs.propose, formats, wide=False),
        }
        tile = row_tile(sizes.rows)
        placed = {
            name: place(steps, max(sizes.prefill_rows, tile) if name == "prefill" else tile)
            for name, steps in schedules.items()
        }
        arena = max(size for _, size in placed.values())
        return Plan(
            programs, precision, sizes, schedules, {name: places for name, (places, _) in placed.items()}, arena
        )

    def open(self, gpu: Gpu, plan: Plan) -> int:
        """Load the kernels of linears."""
        self._gpu, self._plan = gpu, plan
        self._linears = Linears(gpu, self._cubin, most_rows=row_tile(plan.sizes.rows))
        return self._scratch_bytes()

    def count(self, memory: Memory) -> None:
        """Count all stacks."""
        for stack in self._stacks.values():
            memory.count(_purpose(stack), stack.layout.nbytes + 128 * stack.layout.units)

    def load(self, memory: Memory, common: Common) -> dict[str, Frame]:
        """Bring the stacks to the device."""
        loaded = {}
        for key, stack in self._stacks.items():
            loaded[key] = self._weights.stack(self._gpu, stack)
            memory.count(_purpose(stack), stack.layout.nbytes + loaded[key].scale.nbytes)
        return {
            name: Pass(**common.frame(self._plan, name), linears=self._linears, weights=loaded)
            for name in self._plan.schedules
        }

    def close(self) -> None:
        """All its memory is the device's own."""

    def _scratch_bytes(self) -> int:
        rows, most, linears = self._plan.sizes.rows, 0, self._linears
        for steps in self._plan.schedules.values():
            for step in steps.steps:
                if isinstance(step, Project):
                    layout = step.stack.layout
                    splits = linears.choose(layout, rows, may_split=True)
                    most = max(most, splits.sum_bytes(layout) if isinstance(splits, StreamSplits) else 0)
                elif isinstance(step, Head):
                    most = max(most, linears.choose(step.stack.layout, rows).rank_bytes)
        return most


def _purpose(stack: Stack) -> str:
    return f"{stack.names[0].partition('.')[0]} weights"
