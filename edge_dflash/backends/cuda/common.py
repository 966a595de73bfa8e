"""What all passes of a loaded pair share: sizes and places, kernels, memory. Who fills it is in loading.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_dflash.backends.cuda.attend import Attention
from edge_dflash.backends.cuda.conv import Convolutions
from edge_dflash.backends.cuda.delta import DeltaKernels, DeltaScratch
from edge_dflash.backends.cuda.memory import DevicePointer, Matrix, Placement
from edge_dflash.backends.cuda.sample import Sampler, SamplingBuffers
from edge_dflash.backends.cuda.schedule import Schedule
from edge_dflash.backends.cuda.small import CycleKernels, Small
from edge_dflash.backends.cuda.states import Sizes, States
from edge_dflash.backends.cuda.tower import TowerLayout
from edge_dflash.backends.cuda.walk import DeviceWalk
from edge_dflash.backends.cuda.walk_shape import WalkShape
from edge_dflash.decode.backend import Precision
from edge_dflash.model.ops import Embed, SelectRows
from edge_dflash.model.program import PairPrograms


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
    def image_bytes(self) -> int:
        """Of the rows of images in a prefill pass."""
        return 2 * self.sizes.prefill_rows * self.tower.spec.out if self.tower else 0

    @property
    def first_draft(self) -> int:
        """Row of a propose pass that is the first draft: 0 where the anchor's drafts, else 1."""
        return int(any(isinstance(op, SelectRows) for op in self.programs.propose.ops))

    @property
    def walk(self) -> WalkShape | None:
        """How the drafts are chosen; None: each row's logits alone do."""
        if (op := self.programs.propose.walk) is None:
            return None
        columns = self.programs.propose.columns[op.inputs[0]]
        return WalkShape(op, self.sizes.of_pass("propose") - self.first_draft, columns, self.vocabulary)

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
    clock: DevicePointer
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
