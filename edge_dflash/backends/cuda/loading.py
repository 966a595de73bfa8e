"""Everything on the device that a pair needs, made once: budget, weights, states, kernels, passes.

The budget is summed up before a byte is loaded. After loading nothing is allocated. Dense ops are computed by
:class:`Launches` of our kernels over stacks of weights, or by what TensorRT has in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.kernels import attend, conv, cycle, delta, sample, small, walk
from edge_dflash.backends.cuda.kernels.attend import Attention
from edge_dflash.backends.cuda.kernels.conv import Convolutions
from edge_dflash.backends.cuda.kernels.cycle import CycleKernels
from edge_dflash.backends.cuda.kernels.delta import DeltaKernels, DeltaScratch
from edge_dflash.backends.cuda.kernels.experts import ExpertKernels
from edge_dflash.backends.cuda.kernels.linear import Linears
from edge_dflash.backends.cuda.kernels.sample import Sampler, SamplingBuffers
from edge_dflash.backends.cuda.kernels.small import Small
from edge_dflash.backends.cuda.kernels.splits import ALONE_ROWS, MOST_ROWS, StreamSplits, row_tile
from edge_dflash.backends.cuda.kernels.walk import DeviceWalk
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, Allocator, DevicePointer, Matrix, Placement
from edge_dflash.backends.cuda.mixtures import Mixtures, count_mixtures, mixes
from edge_dflash.backends.cuda.passes import Pass, PassBase
from edge_dflash.backends.cuda.schedule import Schedule, place, schedule
from edge_dflash.backends.cuda.states import Sizes, States
from edge_dflash.backends.cuda.steps import Convolve, Head, PassStep, Project
from edge_dflash.backends.cuda.tower import Tower, TowerLayout
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Precision
from edge_dflash.decode.shape import lane_steps
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Embed, SelectRows
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.weights.stacks import Stack, pair_stacks

_SLACK = 512 << 20  # bytes left to the driver for code and graphs: 345 MB for a pair of 27B on an H200

_Shape = TypeVar("_Shape")
_Face = TypeVar("_Face")


@dataclass(frozen=True)
class DeviceLayout:
    """What will be on the device, known from the Programs and formats alone. Passes: prefill, verify, propose."""

    programs: PairPrograms
    precision: Precision
    sizes: Sizes
    schedules: Mapping[str, Schedule]
    places: Mapping[str, Mapping[str, Placement]]
    arena_bytes: int
    tower: TowerLayout | None = None  # of a target that sees

    @property
    def first_draft(self) -> int:
        """Row of a propose pass that is the first draft: 0 where the anchor's drafts, else 1."""
        return int(any(isinstance(op, SelectRows) for op in self.programs.propose.ops))

    @property
    def walk(self) -> walk.WalkShape | None:
        """How the drafts are chosen; None: each row's logits alone do."""
        if (op := self.programs.propose.walk) is None:
            return None
        columns = self.programs.propose.columns[op.inputs[0]]
        return walk.WalkShape(op, self.sizes.of_pass("propose") - self.first_draft, columns, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and columns of the head."""
        embed = next(op for op in self.programs.verify.ops if isinstance(op, Embed))
        return self.programs.verify.weights[embed.weight].shape[0]


@dataclass(frozen=True)
class Kernels:
    """Everything that launches, but for dense ops."""

    small: Small
    cycle: CycleKernels
    sampler: Sampler
    attention: Mapping[str, Attention]  # by KV state
    delta: Mapping[str, DeltaKernels]  # by gated delta state
    conv: Convolutions
    walker: DeviceWalk | None = None  # of a drafter whose drafts depend on each other


@dataclass(frozen=True)
class Buffers:
    """Memory that passes share."""

    control: DevicePointer  # of every slot
    arena: DevicePointer
    attention: DevicePointer  # scratch
    delta: DeltaScratch
    linear: DevicePointer  # scratch
    ids: DevicePointer  # of a pass: [rows of all slots, or of a prefill] int32
    drafts: DevicePointer  # choices of the drafter, of which a slot's row 0 may be no draft: [rows of all slots] int32
    choices: DevicePointer  # of the target: [rows of all slots] int32
    logits: Matrix  # [rows of all slots, V] BF16
    clock: DevicePointer  # of propose and of verify, ns; each lane's cycles so far, where benchmarks count them
    counted: DevicePointer  # rows of a slot's verify that count, as in kernels/control.cuh: [slots, COUNTED_WORDS]
    sampling: SamplingBuffers
    images: DevicePointer  # rows of images in a prefill pass [rows, H] BF16; of no bytes without a tower


@dataclass(frozen=True)
class Common:
    """What all passes share, whoever computes their dense ops."""

    layout: DeviceLayout
    states: States
    kernels: Kernels
    buffers: Buffers
    embeddings: Mapping[str, DevicePointer]


@dataclass(frozen=True)
class Loaded:
    """A pair on the device."""

    common: Common
    memory: Allocator
    passes: Mapping[str, PassBase]
    tower: Tower | None = None  # of a target that sees

    @property
    def mixtures(self) -> Mixtures | None:
        """Of a target with experts that our kernels compute."""
        return self.passes["verify"].mixtures


class Launches:
    """Who computes the dense ops of a pair, and so decides the steps of its passes: launches of our kernels.

    ``cubin`` gives a compilation unit's cubin for this device; tensors ``kept`` can be read behind a prefill.
    """

    most_rows = MOST_ROWS  # that a pass over several slots may have; 0: there are none

    def __init__(self, weights: NativeWeights, cubin: Callable[[str], bytes], kept: Collection[str] = ()) -> None:
        self._weights, self._cubin, self._kept = weights, cubin, kept

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Decide everything that needs no device. Raises BackendError for what has no kernel."""
        if precision.activations != "bfloat16":
            raise BackendError(f"activations are {precision.activations!r}; the native backend computes in bfloat16")
        formats, tile = self._weights.formats, max(row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows))
        self._stacks: Mapping[str, Stack] = pair_stacks(programs, formats)
        passes = {"prefill": programs.prefill, "verify": programs.verify, "propose": programs.propose}
        schedules = {name: schedule(program, formats, wide=name == "prefill") for name, program in passes.items()}
        self._mixes, self._most_rows = mixes(schedules.values()), max(sizes.prefill_rows, sizes.most_rows)
        placed = {name: place(steps, tile) for name, steps in schedules.items() if name != "prefill"}
        placed["prefill"] = place(schedules["prefill"], max(sizes.prefill_rows, tile), self._kept)
        places = {name: found for name, (found, _) in placed.items()}
        return DeviceLayout(programs, precision, sizes, schedules, places, max(size for _, size in placed.values()))

    def open(self, gpu: Gpu, layout: DeviceLayout) -> int:
        """Prepare for a device; bytes of scratch that passes share."""
        most, sizes = [0], layout.sizes
        alone, joint = row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows) if sizes.slots > 1 else 0
        self._gpu, self._linears = gpu, Linears(gpu, self._cubin, most_rows=alone, joint=joint)
        for name, each in layout.schedules.items():
            prefill = name == "prefill"
            rows = sizes.rows if prefill else sizes.of_pass(name)
            for slots in (1,) if prefill else lane_steps(sizes.slots):
                most += [self._scratch(step, slots * rows) for step in each.steps]
        return max(most)

    def _scratch(self, step: PassStep, rows: int) -> int:
        """Bytes of scratch of a step over so many rows."""
        if isinstance(step, Project):
            splits = self._linears.choose(step.stack.layout, rows, may_split=True)
            return splits.sum_bytes(step.stack.layout) if isinstance(splits, StreamSplits) else 0
        return self._linears.choose(step.stack.layout, rows).rank_bytes if isinstance(step, Head) else 0

    def count(self, memory: Allocator) -> None:
        """Count the weights, before anything is loaded."""
        for stack in self._stacks.values():
            memory.count(_purpose(stack), stack.layout.nbytes + 128 * stack.layout.units)
        count_mixtures(memory, self._mixes, self._most_rows)

    def load(self, memory: Allocator, common: Common) -> dict[str, PassBase]:
        """Load and count the weights; make the passes of the layout, by name. Raises BackendError."""
        loaded = {}
        for key, stack in self._stacks.items():
            loaded[key] = self._weights.stack(self._gpu, stack)
            memory.count(_purpose(stack), stack.layout.nbytes + loaded[key].scale.nbytes)
        mixtures = self._mixtures(memory)
        return {name: Pass(common, name, self._linears, loaded, mixtures) for name in common.layout.schedules}

    def _mixtures(self, memory: Allocator) -> Mixtures | None:
        """Those of a target with experts, loaded."""
        given = self._weights, memory, self._mixes, self._most_rows
        return Mixtures(self._gpu, ExpertKernels(self._gpu, self._cubin), *given) if self._mixes else None

    def lay_out_tower(self, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """The pass ``see`` as :meth:`lay_out`; ``most_tokens``: rows of the language model that a picture may fill."""
        return TowerLayout.of(spec, program, most_tokens)

    def load_tower(self, memory: Allocator, layout: TowerLayout) -> Tower:
        """Behind :meth:`load`, the tower of that layout. Raises BackendError."""
        return Tower(self._gpu, layout, self._weights, self._cubin, memory)

    def close(self) -> None:
        """Let go of what is on the device and was not allocated through ``gpu``, before ``gpu`` is closed."""


def _purpose(stack: Stack) -> str:
    return f"{stack.names[0].partition('.')[0]} weights"


def load(
    gpu: Gpu, layout: DeviceLayout, dense: Launches, weights: NativeWeights, cubin: Callable[[str], bytes]
) -> Loaded:
    """Allocate and fill everything. Raises BackendError, naming the largest parts, when it does not fit."""
    scratch = dense.open(gpu, layout)
    _check_budget(gpu, layout, dense, weights, scratch)
    memory = Allocator(gpu)
    states = _states(layout, weights, memory)

    def module(unit: str) -> Module:
        return gpu.load(cubin(unit))

    kernels = Kernels(
        small=Small(gpu, module(small.UNIT)),
        cycle=CycleKernels(gpu, module(cycle.UNIT)),
        sampler=Sampler(gpu, module(sample.UNIT)),
        attention=_faces(gpu, Attention, module(attend.UNIT), states.shapes),
        delta=_faces(gpu, DeltaKernels, module(delta.UNIT), states.delta_shapes) if states.delta_shapes else {},
        conv=Convolutions(gpu, module(conv.UNIT)),
        walker=_walker(gpu, layout, weights, module, memory),
    )
    _put_norms(layout, states)
    buffers = _buffers(layout, states, scratch, memory)
    for zeroed in (buffers.control, buffers.delta.counters, buffers.clock, buffers.counted):
        gpu.fill(zeroed)
    buffers.sampling.clear(gpu)
    embeddings = {}
    for name in _embedded(layout.programs):
        embeddings[name] = weights.embedding(gpu, name)
        memory.count("embedding", embeddings[name].nbytes)
    common = Common(layout, states, kernels, buffers, embeddings)
    passes = dense.load(memory, common)
    return Loaded(common, memory, passes, dense.load_tower(memory, layout.tower) if layout.tower else None)


def _check_budget(gpu: Gpu, layout: DeviceLayout, dense: Launches, weights: NativeWeights, scratch: int) -> None:
    memory = Allocator(None)
    states = _states(layout, weights, memory)
    _put_norms(layout, states)
    _buffers(layout, states, scratch, memory)
    if layout.walk is not None:
        shapes = layout.programs.propose.weights
        memory.count("walk", sum(2 * math.prod(shapes[name].shape) for name in layout.walk.op.weights))
        walk.WalkBuffers.take(memory, layout.walk, layout.sizes.slots)
    dense.count(memory)
    if layout.tower is not None:
        layout.tower.count(memory, weights.formats)
    for name in _embedded(layout.programs):
        memory.count("embedding", 2 * math.prod(layout.programs.weights[name].shape))
    free, total = gpu.free_bytes()
    if memory.total + _SLACK > free:
        parts = sorted(memory.bytes.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)
        fewer = f"give fewer than {layout.sizes.lanes} lanes, or " if layout.sizes.lanes > 1 else ""
        raise BackendError(
            f"the pair needs {memory.total / 1e9:.2f} GB ({largest}), {gpu.name} has {free / 1e9:.2f} GB free of "
            f"{total / 1e9:.2f}; lower --max-context or --prefill-chunk, or {fewer}free memory"
        )


def _states(layout: DeviceLayout, weights: NativeWeights, memory: Allocator) -> States:
    return States(layout.programs, layout.precision, layout.sizes, weights.vector, weights.kv_scale, memory)


def _faces(
    gpu: Gpu, face: Callable[[Gpu, Module, _Shape], _Face], module: Module, shapes: Mapping[str, _Shape]
) -> dict[str, _Face]:
    """Kernels of every state, of one shape once."""
    made = {shape: face(gpu, module, shape) for shape in set(shapes.values())}
    return {name: made[shape] for name, shape in shapes.items()}


def _put_norms(layout: DeviceLayout, states: States) -> None:
    """Put every norm's weight on the device, so that a capture finds them there."""
    for each in layout.schedules.values():
        for step in each.steps:
            for op in step.norms:
                states.norm(op.weight, plus_one=op.plus_one)
            if isinstance(step, Convolve):
                states.norm(step.op.base, plus_one=False)


def _walker(
    gpu: Gpu, layout: DeviceLayout, weights: NativeWeights, module: Callable[[str], Module], memory: Allocator
) -> DeviceWalk | None:
    if (shape := layout.walk) is None:
        return None

    def matrix(name: str) -> DevicePointer:
        pointer = weights.embedding(gpu, name)
        memory.count("walk", pointer.nbytes)
        return pointer

    loaded = walk.WalkWeights.load(shape.op, matrix, weights.vector, memory)
    buffers = walk.WalkBuffers.take(memory, shape, layout.sizes.slots)
    return DeviceWalk(gpu, module(walk.UNIT), shape, loaded, buffers, layout.sizes.of_pass("propose"))


def _buffers(layout: DeviceLayout, states: States, scratch: int, memory: Allocator) -> Buffers:
    sizes, vocabulary = layout.sizes, layout.vocabulary
    slots, tile, rows = sizes.slots, row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows)
    floats, counters = states.delta_scratch
    image = 2 * layout.tower.spec.out if layout.tower else 0  # bytes of a row of one
    stride = -(-vocabulary // 16) * 16
    return Buffers(
        control=memory.take("cycle", CONTROL_BYTES * slots),
        arena=memory.take("activations", layout.arena_bytes),
        attention=memory.take("scratch", states.attention_scratch),
        delta=DeltaScratch(memory.take("scratch", floats), memory.take("scratch", counters)),
        linear=memory.take("scratch", scratch),
        ids=memory.take("cycle", 4 * max(sizes.prefill_rows, rows)),
        drafts=memory.take("cycle", 4 * rows),
        choices=memory.take("cycle", 4 * rows),
        logits=Matrix(memory.take("logits", 2 * rows * stride), stride),
        clock=memory.take("cycle", 8 * (2 + sizes.lanes)),
        counted=memory.take("cycle", 4 * cycle.COUNTED_WORDS * slots),
        sampling=SamplingBuffers.take(memory, tile, vocabulary, slots),
        images=memory.take("activations", image * sizes.prefill_rows),
    )


def _embedded(programs: PairPrograms) -> list[str]:
    ops = (*programs.prefill.ops, *programs.verify.ops, *programs.propose.ops)
    return sorted({op.weight for op in ops if isinstance(op, Embed)})
