"""The TensorRT mode of the native engine: engines in the place of its launches for linears and what goes with them.

States, embedding, convolutions, experts and walks stay the native kernels', the cycle and its graphs the native
backend's. TensorRT reads and writes rows without gaps, so the stride of a tensor is its columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.tower import check_tower, most_patches
from edge_dflash.backends.cuda.loading import Common, DeviceLayout, Launches
from edge_dflash.backends.cuda.memory import Allocator, DevicePointer, Placement, aligned
from edge_dflash.backends.cuda.mixtures import Mixtures, count_mixtures, mixes
from edge_dflash.backends.cuda.passes import PassBase
from edge_dflash.backends.cuda.schedule import place
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.steps import PassStep
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.tensorrt import units
from edge_dflash.backends.cuda.tensorrt.flavours import TENSORRT, TENSORRT_RTX, Flavour, load, version
from edge_dflash.backends.cuda.tensorrt.runtime import Engines, Enqueue
from edge_dflash.backends.cuda.tower import PATCHES, PURPOSE, Tower, TowerLayout, TowerSchedule
from edge_dflash.backends.cuda.weights import BundleWeights, NativeWeights
from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec, VisionSpec
from edge_dflash.weights.formats import WeightFormat, read_as

WORD = 16  # rows of logits lie behind each other without gaps, and start on so many


def layout_of(programs: PairPrograms, precision: Precision, sizes: Sizes, pair: units.PairUnits) -> DeviceLayout:
    """What will be on the device. Every tensor has room for the rows of its pass or the head's, whichever is more.

    Raises BackendError for other arithmetic than that of engines.
    """
    if precision.activations != "bfloat16":
        raise BackendError(f"activations are {precision.activations!r}; plans compute in bfloat16")
    places, arena = dict[str, Mapping[str, Placement]](), 0
    for name, each in pair.schedules.items():
        placed, size = place(each, max(sizes.of_pass(name), sizes.rows))
        places[name] = {tensor: replace(where, stride=each.columns[tensor]) for tensor, where in placed.items()}
        arena = max(arena, size)
    return DeviceLayout(programs, precision, sizes, pair.schedules, places, arena)


class EnginePass(PassBase):
    """A pass with engines; each is enqueued once when it is made, over whatever lies in the arena."""

    def __init__(self, common: Common, name: str, mixtures: Mixtures | None, engines: Engines) -> None:
        super().__init__(common, name, mixtures)
        self.runs: dict[PassStep, Enqueue] = {}
        for step in self.schedule.steps:
            if isinstance(step, units.RunEngine):
                where = {name: self._where(tensor).address for name, tensor in (*step.inputs, *step.outputs)}
                self.runs[step] = engines.context(step.key, step.profile, step.rows, where)
        for enqueue in self.runs.values():
            enqueue()

    def _where(self, tensor: str) -> DevicePointer:
        if tensor == units.CHOICES:
            return self.choices
        root, _ = self.schedule.place(tensor)
        logits = root == self.schedule.program.outputs[units.LOGITS]
        return self.common.buffers.logits.pointer if logits else self._matrix(tensor).pointer

    def _dense(self, step: PassStep, logits: bool) -> None:
        """Engines always leave logits."""
        self.runs[step]()


class EngineOps(Launches):
    """Engines in files, by path in the bundle. ``weights`` and ``cubin``: of the experts, which are our kernels'."""

    most_rows = 0  # engines are built for the rows of one slot

    def __init__(
        self, flavour: Flavour, files: Mapping[str, Path], weights: NativeWeights, cubin: Callable[[str], bytes]
    ) -> None:
        super().__init__(weights, cubin)
        self._flavour, self._files = flavour, files
        self._engines: Engines | None = None

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Steps and places of all passes, checked. Raises BackendError."""
        rows = sizes.rows, sizes.prefill_rows, sizes.of_pass("propose")
        pair = units.pair_units(programs, self._weights.formats, *rows)
        self._units = dict(pair.units)
        self._check_files()
        self._mixes, self._most_rows = mixes(pair.schedules.values()), max(rows)
        return layout_of(programs, precision, sizes, pair)

    def lay_out_tower(self, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """Patches and rows. Raises BackendError without the tower's engine."""
        self._units[units.TOWER] = units.tower_unit(spec, program)
        self._check_files()
        return EngineTowerLayout.of(spec, program, most_tokens)

    def _check_files(self) -> None:
        if missing := sorted(units.engine_units(self._units).keys() - self._files.keys()):
            raise BackendError(f"{missing[0]} is missing; build the bundle again")

    def open(self, gpu: Gpu, layout: DeviceLayout) -> int:
        """Start TensorRT. Passes share no scratch but that of the contexts, which is known when engines are loaded."""
        self._gpu, self._engines = gpu, Engines(gpu, self._flavour)
        return 0

    def close(self) -> None:
        """Give the engines' memory back."""
        if self._engines is not None:
            self._engines.close()

    def count(self, memory: Allocator) -> None:
        """Count engines and experts."""
        self._count_files(memory)
        count_mixtures(memory, self._mixes, self._most_rows)

    def _count_files(self, memory: Allocator) -> None:
        """An engine's weights on the device are about its file."""
        for name, path in self._files.items():
            purpose = "drafter weights" if "/drafter-" in name else "target weights"
            memory.count(PURPOSE if name == units.engine_file(units.TOWER) else purpose, path.stat().st_size)

    def load(self, memory: Allocator, common: Common) -> dict[str, PassBase]:
        """Read all engines, and bind a context for each use of one."""
        engines = self._engines
        assert engines is not None
        engines.load(self._units, {key: self._files[units.engine_file(key)] for key in self._units})
        self._count_files(memory)
        engines.share_scratch(memory)
        mixtures = self._mixtures(memory)
        return {name: EnginePass(common, name, mixtures, engines) for name in common.layout.schedules}

    def load_tower(self, memory: Allocator, layout: TowerLayout) -> Tower:
        """Bind a context of the tower's engine."""
        assert self._engines is not None
        return EngineTower(self._engines, self._gpu, layout, self._weights, self._cubin, memory)


@dataclass(frozen=True)
class EngineTowerLayout(TowerLayout):
    """Patches and rows, without gaps; what is between them is the engine's."""

    @classmethod
    def of(cls, spec: VisionSpec, program: Program, most_tokens: int) -> EngineTowerLayout:
        """See :class:`~edge_dflash.backends.cuda.tower.TowerLayout`."""
        check_tower(spec)
        rows, merged = program.outputs["rows"], spec.patches.merge**2
        most = min(most_patches(spec), most_tokens * merged)
        columns, folds = program.columns[PATCHES], {PATCHES: 1, rows: 1}  # a stride is that of the tensor's own rows
        patches = Placement(0, columns, aligned(2 * most * columns))
        out = Placement(patches.nbytes, spec.out, aligned(2 * (most // merged) * spec.out))
        schedule = TowerSchedule(program, widths=dict(program.columns), folds=folds)
        places = {PATCHES: patches, rows: out}
        return cls(spec, program, schedule, places, patches.nbytes + out.nbytes, most)

    def count(self, memory: Allocator, formats: Mapping[str, WeightFormat]) -> None:
        """Count all but the engine, whose file is counted."""
        self.take(memory)


class EngineTower(Tower):
    """The tower of a loaded target; its engine is loaded."""

    def __init__(self, engines: Engines, *given: Any) -> None:
        """``given``: as for Tower."""
        self._engines = engines
        super().__init__(*given)

    def _load(self, weights: NativeWeights, cubin: Callable[[str], bytes], memory: Allocator) -> None:
        places = {name: self._matrix(name).pointer for name in self._layout.places} | dict(self._tables)
        where = {name: pointer.address for name, pointer in places.items()}
        self._enqueue = self._engines.context(units.TOWER, 0, self._layout.most, where)

    def _compute(self, patches: int) -> None:
        self._enqueue(patches)


def installed_flavour(bundle: Bundle) -> Flavour:
    """The TensorRT that runs the bundle's engines. Raises BackendError unless they are there and it is theirs."""
    engines = bundle.manifest.plans
    command = f"edge-dflash build --finish {bundle.path}"
    if engines is None or engines.deferred:
        count = 0 if engines is None else len(engines.deferred)
        raise BackendError(f"{bundle.path} lacks {count} plans, which its board has to build: {command}")
    flavour = TENSORRT_RTX if engines.flavour == TENSORRT_RTX.module else TENSORRT
    if (found := version(load(flavour))) != engines.version:
        raise BackendError(
            f"{bundle.path} has plans of {flavour.product} {engines.version}, here is {found}: "
            f"build new ones with {command}"
        )
    return flavour


def bundle_ops(bundle: Bundle) -> EngineOps:
    """The engines of a finished bundle. Raises BackendError when they are not for this TensorRT or not all there."""
    manifest = bundle.manifest
    flavour = installed_flavour(bundle)
    assert manifest.plans is not None
    check_engines(bundle.pair, manifest.weights, manifest.arch)
    files = {name: bundle.plan(name) for name in manifest.plans.names}
    return EngineOps(flavour, files, BundleWeights(bundle), bundle.cubin)


def check_engines(
    pair: PairSpec, formats: Mapping[str, WeightFormat], arch: str, kv: Literal["fp8", "bfloat16"] = "fp8"
) -> None:
    """Raise BackendError, naming weight or op, unless engines and state kernels for ``arch`` run the pair."""
    check_native(pair, formats, kv=kv)
    sm = find_arch(arch, "tensorrt").sm
    for name, word in formats.items():
        first = read_as(word).tensorrt
        if first is None or sm < first:
            where = "does not run" if first is None else f"runs on SM {first} and later, not on {arch}"
            raise BackendError(
                f"{name} is {word}, which TensorRT {where}; build it with --backend native, or choose fp8 in the recipe"
            )
    if pair.target.vocab_size % WORD:
        raise BackendError(
            f"the vocabulary has {pair.target.vocab_size} tokens, plans need a multiple of {WORD}; "
            "build it with --backend native"
        )
