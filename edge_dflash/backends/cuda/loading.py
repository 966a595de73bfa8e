"""Everything on the device that a pair needs, made once: budget, weights, states, kernels, passes.

The budget is summed up before a byte is loaded. After loading nothing is allocated. How dense ops are computed is a
:class:`Dense`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from edge_dflash.backends.cuda import attend, delta, small
from edge_dflash.backends.cuda.common import Buffers, Common, DeviceLayout, Kernels
from edge_dflash.backends.cuda.conv import UNIT as CONV_UNIT
from edge_dflash.backends.cuda.conv import Convolutions
from edge_dflash.backends.cuda.delta import DeltaScratch
from edge_dflash.backends.cuda.driver import Gpu, Module
from edge_dflash.backends.cuda.memory import CONTROL_BYTES, Allocator, DevicePointer, Matrix
from edge_dflash.backends.cuda.mixtures import Mixtures
from edge_dflash.backends.cuda.passes import Frame
from edge_dflash.backends.cuda.sample import UNIT as SAMPLE_UNIT
from edge_dflash.backends.cuda.sample import Sampler, SamplingBuffers
from edge_dflash.backends.cuda.splits import ALONE_ROWS, row_tile
from edge_dflash.backends.cuda.states import Sizes, States
from edge_dflash.backends.cuda.steps import Convolve
from edge_dflash.backends.cuda.tower import Tower, TowerLayout
from edge_dflash.backends.cuda.walk import UNIT as WALK_UNIT
from edge_dflash.backends.cuda.walk import DeviceWalk
from edge_dflash.backends.cuda.walk_shape import WalkBuffers, WalkWeights
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Embed
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import VisionSpec

_SLACK = 512 << 20  # bytes left to the driver for code and graphs: 345 MB for a pair of 27B on an H200

_Shape = TypeVar("_Shape")
_Face = TypeVar("_Face")


@dataclass(frozen=True)
class Loaded:
    """A pair on the device."""

    common: Common
    memory: Allocator
    passes: Mapping[str, Frame]
    tower: Tower | None = None  # of a target that sees

    @property
    def mixtures(self) -> Mixtures | None:
        """Of a target with experts that our kernels compute."""
        return self.passes["verify"].mixtures


class Dense(Protocol):
    """Who computes the dense ops of a pair, and so decides the steps of its passes."""

    @property
    def most_rows(self) -> int:
        """Rows that a pass over several slots may have; 0: there are none."""
        ...

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Decide everything that needs no device. Raises BackendError."""
        ...

    def open(self, gpu: Gpu, layout: DeviceLayout) -> int:
        """Prepare for a device; bytes of scratch that passes share."""
        ...

    def count(self, memory: Allocator) -> None:
        """Count the weights, before anything is loaded."""
        ...

    def load(self, memory: Allocator, common: Common) -> Mapping[str, Frame]:
        """Load and count the weights; make the passes of the layout, by name. Raises BackendError."""
        ...

    def lay_out_tower(self, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """The pass ``see`` as :meth:`lay_out`; ``most_tokens``: rows of the language model that a picture may fill."""
        ...

    def load_tower(self, memory: Allocator, layout: TowerLayout) -> Tower:
        """Behind :meth:`load`, the tower of that layout. Raises BackendError."""
        ...

    def close(self) -> None:
        """Let go of what is on the device and was not allocated through ``gpu``, before ``gpu`` is closed."""
        ...


def load(gpu: Gpu, layout: DeviceLayout, dense: Dense, weights: NativeWeights, cubin: Callable[[str], bytes]) -> Loaded:
    """Allocate and fill everything. Raises BackendError, naming the largest parts, when it does not fit."""
    scratch = dense.open(gpu, layout)
    _check_budget(gpu, layout, dense, weights, scratch)
    memory = Allocator(gpu)
    states = _states(layout, weights, memory)
    kernels = Kernels(
        small=small.Small(gpu, gpu.load(cubin(small.UNIT))),
        cycle=small.CycleKernels(gpu, gpu.load(cubin(small.CYCLE_UNIT))),
        sampler=Sampler(gpu, gpu.load(cubin(SAMPLE_UNIT))),
        attention=_faces(gpu, attend.Attention, gpu.load(cubin(attend.UNIT)), states.shapes),
        delta=_faces(gpu, delta.DeltaKernels, gpu.load(cubin(delta.UNIT)), states.delta_shapes)
        if states.delta_shapes
        else {},
        conv=Convolutions(gpu, gpu.load(cubin(CONV_UNIT))),
        walker=_walker(gpu, layout, weights, cubin, memory),
    )
    _put_norms(layout, states)
    buffers = _buffers(layout, states, scratch, memory)
    gpu.fill(buffers.control)
    gpu.fill(buffers.delta.counters)
    gpu.fill(buffers.clock)
    gpu.fill(buffers.counted)
    buffers.sampling.clear(gpu)
    embeddings = {}
    for name in _embedded(layout.programs):
        embeddings[name] = weights.embedding(gpu, name)
        memory.count("embedding", embeddings[name].nbytes)
    common = Common(layout, states, kernels, buffers, embeddings)
    passes = dense.load(memory, common)
    return Loaded(common, memory, passes, dense.load_tower(memory, layout.tower) if layout.tower else None)


def _check_budget(gpu: Gpu, layout: DeviceLayout, dense: Dense, weights: NativeWeights, scratch: int) -> None:
    memory = Allocator(None)
    states = _states(layout, weights, memory)
    _put_norms(layout, states)
    _buffers(layout, states, scratch, memory)
    if layout.walk is not None:
        shapes = layout.programs.propose.weights
        memory.count("walk", sum(2 * math.prod(shapes[name].shape) for name in layout.walk.op.weights))
        WalkBuffers.take(memory, layout.walk, layout.sizes.slots)
    dense.count(memory)
    if layout.tower is not None:
        layout.tower.count(memory, weights.formats)
    for name in _embedded(layout.programs):
        shape = layout.programs.weights[name].shape
        memory.count("embedding", 2 * shape[0] * shape[1])
    free, total = gpu.free_bytes()
    if memory.total + _SLACK > free:
        parts = sorted(memory.bytes.items(), key=lambda part: -part[1])[:3]
        largest = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts)
        raise BackendError(
            f"the pair needs {memory.total / 1e9:.2f} GB ({largest}), {gpu.name} has {free / 1e9:.2f} GB free of "
            f"{total / 1e9:.2f}; lower --max-context or --prefill-chunk, or {_fewer(layout.sizes.lanes)}free memory"
        )


def _fewer(lanes: int) -> str:
    return f"give fewer than {lanes} lanes, or " if lanes > 1 else ""


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
    gpu: Gpu, layout: DeviceLayout, weights: NativeWeights, cubin: Callable[[str], bytes], memory: Allocator
) -> DeviceWalk | None:
    if (shape := layout.walk) is None:
        return None

    def matrix(name: str) -> DevicePointer:
        pointer = weights.embedding(gpu, name)
        memory.count("walk", pointer.nbytes)
        return pointer

    loaded = WalkWeights.load(shape.op, matrix, weights.vector, memory)
    buffers, apart = WalkBuffers.take(memory, shape, layout.sizes.slots), layout.sizes.of_pass("propose")
    return DeviceWalk(gpu, gpu.load(cubin(WALK_UNIT)), shape, loaded, buffers, apart)


def _buffers(layout: DeviceLayout, states: States, scratch: int, memory: Allocator) -> Buffers:
    sizes, vocabulary = layout.sizes, layout.vocabulary
    slots, tile, rows = sizes.slots, row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows)
    floats, counters = states.delta_scratch
    stride = -(-vocabulary // 16) * 16
    return Buffers(
        control=memory.take("cycle", CONTROL_BYTES * slots),
        arena=memory.take("activations", layout.arena_bytes),
        attention=memory.take("scratch", states.attention_scratch),
        delta=DeltaScratch(memory.take("scratch", floats), memory.take("scratch", counters)),
        linear=memory.take("scratch", scratch),
        ids=memory.take("cycle", 4 * max(layout.sizes.prefill_rows, rows)),
        drafts=memory.take("cycle", 4 * rows),
        choices=memory.take("cycle", 4 * rows),
        logits=Matrix(memory.take("logits", 2 * rows * stride), stride),
        clock=memory.take("cycle", small.clock_bytes(layout.sizes.lanes)),
        counted=memory.take("cycle", 4 * small.COUNTED_WORDS * slots),
        sampling=SamplingBuffers.take(memory, tile, vocabulary, slots),
        images=memory.take("activations", layout.image_bytes),
    )


def _embedded(programs: PairPrograms) -> list[str]:
    ops = (*programs.prefill.ops, *programs.verify.ops, *programs.propose.ops)
    return sorted({op.weight for op in ops if isinstance(op, Embed)})
