"""The vision tower on the device: its Program as steps, its weights and memory, and the pass over one picture.

A linear, its bias, and the GELU or residual behind them are one step of two launches. A pass holds the patches of one
picture; its rows come back to the host, where a cache may keep them, and go to the device again with a prompt's chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.linear import LinearWeights, Tiles, job_of
from edge_dflash.backends.cuda.kernels.tower import UNIT, Activation, TowerKernels, check_tower, most_patches
from edge_dflash.backends.cuda.memory import NULL, Allocator, Array, DevicePointer, Matrix, Placement
from edge_dflash.backends.cuda.rotary import RotaryTables
from edge_dflash.backends.cuda.schedule import Schedule, place, readers_of
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import no_tower
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Add, Bias, Fold, FrameAttend, GeluErf, GeluTanh, LayerNorm, Linear, Op, PositionRows
from edge_dflash.model.program import Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.model.vision import patch_tables
from edge_dflash.pictures.pictured import Picture, Sight
from edge_dflash.weights.formats import WeightFormat
from edge_dflash.weights.stacks import program_stacks

PATCHES, PURPOSE = "patches", "vision tower"  # the input that our kernel makes of levels; of memory


@dataclass(frozen=True)
class Product(PassStep):
    """A linear, its bias, then an activation or a residual. Reads (x[, residual]); writes (y)."""

    weight: str
    bias: str
    activation: Activation


@dataclass(frozen=True)
class LayerNormed(PassStep):
    """``LayerNorm``."""

    op: LayerNorm


@dataclass(frozen=True)
class Places(PassStep):
    """Adds the rows of the table of positions, in place."""

    table: str


@dataclass(frozen=True)
class Looked(PassStep):
    """Queries and keys are rotated in place, then every row attends to all. Reads (qkv); writes (attended)."""

    op: FrameAttend


class HostRows:
    """Rows of a picture as the target reads them, BF16 bits [tokens, H] on the host."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits

    def __len__(self) -> int:
        return len(self.bits)

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self.bits.nbytes

    def host(self) -> npt.NDArray[np.float32]:
        """The rows [tokens, H]."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


@dataclass
class TowerSchedule(Schedule):
    """Steps of the pass ``see``. Columns of root tensors are those of a patch."""

    folds: dict[str, int] = field(default_factory=dict)  # of each tensor: patches that make one of its rows


def tower_schedule(program: Program) -> TowerSchedule:
    """Steps of the pass ``see``. Raises BackendError for what has no kernel."""
    return _Steps(program).run()


class _Steps:
    def __init__(self, program: Program) -> None:
        self._out = TowerSchedule(program, widths=dict(program.columns), folds=dict.fromkeys(program.inputs, 1))
        self._out.columns[PATCHES] = program.columns[PATCHES]
        self._readers = readers_of(program)

    def run(self) -> TowerSchedule:
        for op in self._out.program.ops:
            if op.output not in self._out.folds:
                self._step(op)
        return self._out

    def _step(self, op: Op) -> None:
        match op:
            case Linear():
                self._product(op)
            case LayerNorm():
                self._emit(LayerNormed(op.inputs, (op.output,), op))
            case FrameAttend():
                self._emit(Looked(op.inputs[:1], (op.output,), op))
            case PositionRows():  # with the addition that reads them
                (add,) = self._readers[op.output]
                x = next(name for name in add.inputs if name != op.output)
                self._out.folds[op.output] = 1
                self._alias(add.output, x, 1)
                self._out.steps.append(Places((x,), (add.output,), op.weight))
            case Fold():
                self._alias(op.output, op.inputs[0], op.count)
            case _:
                raise BackendError(
                    f"{op.output}: the native backend has no kernel for op {type(op).__name__} of a tower"
                )

    def _product(self, op: Linear) -> None:
        """A linear with what follows it."""
        folds, (bias,) = self._out.folds, self._readers[op.output]
        if not isinstance(bias, Bias):
            raise BackendError(f"{op.output}: the native backend multiplies with a bias behind it in a tower")
        made, activation, residual = bias.output, Activation.NONE, tuple[str, ...]()
        folds[op.output] = folds[made] = folds[op.inputs[0]]
        match self._readers.get(made, []):
            case [GeluTanh() | GeluErf() as gelu]:
                activation = Activation.GELU_TANH if isinstance(gelu, GeluTanh) else Activation.GELU_ERF
                made = gelu.output
            case [Add() as add]:
                others = tuple(name for name in add.inputs if name != made)
                if others[0] in folds:
                    residual, made = others, add.output
        self._emit(Product((op.inputs[0], *residual), (made,), op.weight, bias.weight, activation))

    def _emit(self, step: PassStep) -> None:
        """Append a step, whose output then exists."""
        out, (name,) = self._out, step.writes
        out.steps.append(step)
        out.folds[name] = count = out.folds[step.reads[0]]
        out.columns[name] = -(-out.widths[name] // count)

    def _alias(self, name: str, other: str, count: int) -> None:
        self._out.slices[name] = other, 0
        self._out.folds[name] = count * self._out.folds[other]


@dataclass(frozen=True)
class TowerLayout:
    """What a tower has on the device, known without one."""

    spec: VisionSpec
    program: Program
    schedule: TowerSchedule
    places: Mapping[str, Placement]
    arena_bytes: int
    most: int  # patches of a picture

    @classmethod
    def of(cls, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """``most_tokens``: rows of the language model that a picture may fill. Raises BackendError."""
        check_tower(spec)
        schedule = tower_schedule(program)
        most = min(most_patches(spec), most_tokens * spec.patches.merge**2)
        places, size = place(schedule, most)
        return cls(spec, program, schedule, places, size, most)

    @property
    def tables(self) -> Mapping[str, int]:
        """Columns of the inputs by patch, FP32 or int32."""
        return {name: self.program.columns[name] for name in self.program.inputs if name != PATCHES}

    def take(self, memory: Allocator) -> tuple[DevicePointer, DevicePointer, Mapping[str, DevicePointer]]:
        """Activations, levels of a picture, and tables."""
        return (
            memory.take("activations", self.arena_bytes),
            memory.take(PURPOSE, self.most * 3 * self.spec.patches.patch**2),
            {name: memory.take(PURPOSE, 4 * self.most * columns) for name, columns in self.tables.items()},
        )

    def count(self, memory: Allocator, formats: Mapping[str, WeightFormat]) -> None:
        """Count everything, before anything is loaded."""
        self.take(memory)
        for stack in program_stacks(self.program, formats):
            memory.count(PURPOSE, stack.layout.nbytes + 4 * stack.rows)
        for spec in self.program.weights.values():
            if spec.kind != "linear":
                memory.count(PURPOSE, (2 if spec.kind == "embedding" else 4) * math.prod(spec.shape))


class Tower:
    """The tower of a loaded target. Allocates at load only."""

    def __init__(
        self, gpu: Gpu, layout: TowerLayout, weights: NativeWeights, cubin: Callable[[str], bytes], memory: Allocator
    ) -> None:
        self._gpu, self._layout, self._schedule, self._spec = gpu, layout, layout.schedule, layout.spec
        self._kernels = TowerKernels(gpu, gpu.load(cubin(UNIT)), layout.spec.head_dim)
        self._arena, self._levels, self._tables = layout.take(memory)
        self._load(weights, cubin, memory)
        self._grid: tuple[int, int] | None = None  # of the tables on the device

    def _load(self, weights: NativeWeights, cubin: Callable[[str], bytes], memory: Allocator) -> None:
        self._tiles = Tiles(self._gpu, cubin)
        self._linears: dict[str, LinearWeights] = {}
        for stack in program_stacks(self._layout.program, weights.formats):
            loaded = self._linears[stack.names[0]] = weights.stack(self._gpu, stack)
            memory.count(PURPOSE, stack.layout.nbytes + loaded.scale.nbytes)
        self._vectors: dict[str, DevicePointer] = {}
        for step in self._schedule.steps:
            match step:
                case Product():
                    self._put(step.bias, weights, memory)
                case LayerNormed():
                    self._put(step.op.weight, weights, memory)
                    self._put(step.op.bias, weights, memory)
                case Places():
                    self._vectors[step.table] = table = weights.embedding(self._gpu, step.table)
                    memory.count(PURPOSE, table.nbytes)

    def _put(self, name: str, weights: NativeWeights, memory: Allocator) -> None:
        self._vectors[name] = memory.put(PURPOSE, np.ascontiguousarray(weights.vector(name), np.float32))

    def see(self, picture: Picture) -> HostRows:
        """Rows of a picture. Raises BackendError for one with more patches than there is memory for."""
        rows = picture.grid[0] * picture.grid[1]
        if rows > (most := self._layout.most):
            raise BackendError(
                f"an image of {picture.grid[0]} x {picture.grid[1]} patches; this tower takes {most} at most: "
                "give a smaller image, or build the bundle with a longer context"
            )
        if picture.grid != self._grid:
            for name, table in vars(patch_tables(self._spec, picture.grid)).items():
                self._gpu.write(self._tables[name], table)
            self._grid = picture.grid
        self._gpu.write(self._levels, picture.levels)
        self._kernels.patches(self._levels, self._matrix(PATCHES), rows, self._spec.patches)
        self._compute(rows)
        out = self._matrix(self._layout.program.outputs["rows"])
        bits = self._gpu.read(out.pointer, (picture.tokens, out.stride), np.uint16)
        return HostRows(np.ascontiguousarray(bits[:, : self._spec.out]))

    def _compute(self, patches: int) -> None:
        """Enqueue the pass: patches and tables are on the device."""
        for step in self._schedule.steps:
            self._run(step, patches)

    def _run(self, step: PassStep, patches: int) -> None:
        kernels, name = self._kernels, step.writes[0]
        out, rows, columns = self._matrix(name), patches // self._schedule.folds[name], self._schedule.widths[name]
        x, *others = (self._matrix(read) for read in step.reads)
        match step:
            case Product():
                weights = self._linears[step.weight]
                self._tiles.launch(weights.layout, job_of(weights, x, [out]), x, rows, NULL)
                residual = others[0] if others else None
                kernels.finish(out, self._vectors[step.bias], out, rows, columns, step.activation, residual)
            case LayerNormed():
                weight, bias = self._vectors[step.op.weight], self._vectors[step.op.bias]
                kernels.norm(x, weight, bias, out, rows, columns, step.op.eps)
            case Places():
                tables = self._tables["corners"], self._tables["shares"]
                kernels.positions(x, self._vectors[step.table], *tables, rows, columns)
            case Looked():
                kernels.rotate(x, self._tables["cos"], self._tables["sin"], rows, step.op.heads)
                kernels.attend(x, out, rows, step.op.heads)
            case _:
                raise TypeError(f"no kernel for step {type(step).__name__}")

    def _matrix(self, name: str) -> Matrix:
        spot = self._layout.places[self._schedule.place(name)[0]]
        return Matrix(self._arena.at(spot.offset, spot.nbytes), spot.stride * self._schedule.folds[name])


class Eyes:
    """The tower of a loaded pair, and what images change on the device; without a tower, text alone.

    Rows of a picture stand in a prompt's chunk in the place of embeddings, and tokens are rotated by other positions.
    """

    def __init__(
        self, gpu: Gpu, tower: Tower | None, rotary: Sequence[RotaryTables], images: DevicePointer, vocabulary: int
    ) -> None:
        """``images``: rows of a prefill chunk, behind ``vocabulary``."""
        self._gpu, self._tower, self._rotary = gpu, tower, rotary
        self._images, self._vocabulary = images, vocabulary

    def see(self, picture: Picture) -> HostRows:
        """Run the tower. Raises BackendError without one."""
        if self._tower is None:
            raise no_tower()
        return self._tower.see(picture)

    def place(self, lane: int, first: int, sight: Sight) -> None:
        """Tokens from index ``first`` of a lane on are where ``sight`` says. Raises BackendError without a tower."""
        if self._tower is None:
            raise no_tower()
        for tables in self._rotary:
            tables.place(self._gpu, lane, first, sight.positions)
            tables.shift(self._gpu, lane, first + sight.positions.shape[1], sight.delta)

    def shift(self, lane: int, first: int, delta: int) -> None:
        """Tokens from index ``first`` of a lane on are at their index + ``delta``."""
        for tables in self._rotary:
            tables.shift(self._gpu, lane, first if delta else 0, delta)

    def fill(self, ids: Array, first: int, sight: Sight) -> None:
        """Bring the images' rows of a pass to the device: rows ``first``, ... of the sight, whose ``ids`` these are.

        Ids of such rows become those behind the vocabulary, which the gather takes from there.
        """
        for part in sight.rows:
            assert isinstance(part.seen, HostRows)
            begin, end = max(part.row, first), min(part.row + part.count, first + len(ids))
            if begin >= end:
                continue
            bits = part.seen.bits[part.first + begin - part.row : part.first + end - part.row]
            self._gpu.write(self._images.at(bits[0].nbytes * (begin - first), bits.nbytes), bits)
            ids[begin - first : end - first] = range(self._vocabulary + begin - first, self._vocabulary + end - first)
