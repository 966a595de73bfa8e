"""The TensorRT backend: the native backend with engines in the place of its launches for dense ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.memory import NULL, Allocator, DevicePointer
from edge_dflash.backends.cuda.mixtures import Mixtures
from edge_dflash.backends.cuda.passes import Common, DeviceLayout, Frame
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.steps import Convolve, Mix, PassStep
from edge_dflash.backends.cuda.support import check_native
from edge_dflash.backends.cuda.tower import PURPOSE, Tower, TowerLayout
from edge_dflash.backends.cuda.weights import BundleWeights, NativeWeights
from edge_dflash.backends.tensorrt.flavours import TENSORRT, TENSORRT_RTX, Flavour, load, version
from edge_dflash.backends.tensorrt.mixtures import EngineMixtures
from edge_dflash.backends.tensorrt.runs import EnginePass, RunEngine, RunExperts, engine_pass
from edge_dflash.backends.tensorrt.runtime import Engines, Enqueue
from edge_dflash.backends.tensorrt.tower import EngineTower, EngineTowerLayout
from edge_dflash.backends.tensorrt.units import (
    EMBEDDING,
    TOWER,
    PairUnits,
    engine_file,
    engine_units,
    pair_units,
    tower_unit,
)
from edge_dflash.board.archs import find_arch
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Embed
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec, VisionSpec
from edge_dflash.weights.formats import WeightFormat, read_as

WORD = 16  # rows of logits lie behind each other without gaps, and start on so many


class EngineFrame(Frame):
    """``runs``: for each step that runs an engine, what enqueues it; ``mixes``: layers of ``mixtures`` by their op."""

    def __init__(
        self,
        common: Common,
        name: str,
        pair: PairUnits,
        runs: Mapping[RunEngine, Enqueue],
        mixtures: Mixtures | None,
        mixes: Mapping[str, Mix],
    ) -> None:
        super().__init__(common, name)
        self.pair, self.runs, self.mixtures, self._mixes = pair, runs, mixtures, mixes

    def _dense(self, step: PassStep, logits: bool) -> None:
        """Engines always leave logits."""
        if isinstance(step, Convolve):
            self._convolve(step)
            return
        if isinstance(step, RunExperts):
            self._mix(step)
            return
        if not isinstance(step, RunEngine):
            raise TypeError(f"{type(step).__name__} is no step of a TensorRT pass")
        if step.run.key == EMBEDDING:
            ((_, out),) = step.run.writes
            (op,) = self.pair.units[EMBEDDING].ops
            assert isinstance(op, Embed)
            self._gather(op.weight, out)
        else:
            self.runs[step]()

    def _convolve(self, step: Convolve) -> None:
        u, c, out = (self._matrix(name) for name in (*step.reads, *step.writes))
        base = self.common.states.norm(step.op.base, plus_one=False)
        self.kernels.conv.convolve(step.op, u, c, base, out, self.rows, self.schedule.widths[step.writes[0]])

    def _mix(self, step: RunExperts) -> None:
        x, out = (self._matrix(name) for name in (*step.reads, *step.writes))
        assert self.mixtures is not None
        self.mixtures.run(self._mixes[step.op.output], x, out, self.rows, self.words)


def engine_passes(pair: PairUnits, sizes: Sizes) -> dict[str, EnginePass]:
    """All passes by name."""
    return {name: engine_pass(pair, name, sizes.of_pass(name)) for name in ("prefill", "verify", "propose")}


def layout_of(
    programs: PairPrograms, precision: Precision, sizes: Sizes, passes: Mapping[str, EnginePass]
) -> DeviceLayout:
    """What will be on the device, with these passes. Raises BackendError for other arithmetic than theirs."""
    if precision.activations != "bfloat16":
        raise BackendError(f"activations are {precision.activations!r}; plans compute in bfloat16")
    return DeviceLayout(
        programs,
        precision,
        sizes,
        {name: each.schedule for name, each in passes.items()},
        {name: each.places for name, each in passes.items()},
        max(each.arena for each in passes.values()),
    )


def addresses(each: EnginePass, name: str, step: RunEngine, common: Common) -> dict[str, DevicePointer]:
    """Where the inputs and outputs of one run lie on the device."""
    buffers = common.buffers
    places = {
        "arena": buffers.arena,
        "ids": buffers.ids,
        "logits": buffers.logits.pointer,
        "choices": buffers.drafts if name == "propose" else buffers.choices,
    }
    found = {}
    for tensor, address in each.bound(step).addresses:
        memory = places[address.buffer]
        found[tensor] = memory.at(address.offset, memory.nbytes - address.offset)
    assert NULL not in found.values()
    return found


class EngineOps:
    """:class:`~edge_dflash.backends.cuda.loading.Dense` of engines in files, by path in the bundle.

    ``weights`` and ``cubin``: of the experts beside them.
    """

    def __init__(
        self, flavour: Flavour, files: Mapping[str, Path], weights: NativeWeights, cubin: Callable[[str], bytes]
    ) -> None:
        self._flavour, self._files = flavour, files
        self._weights, self._cubin, self._mixtures = weights, cubin, EngineMixtures(weights, cubin)
        self._engines: Engines | None = None

    @property
    def most_rows(self) -> int:
        """Engines are built for the rows of one slot."""
        return 0

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Steps and places of all passes, checked. Raises BackendError."""
        self._pair = pair_units(programs, sizes.rows, sizes.prefill_rows, sizes.of_pass("propose"))
        self._units = dict(self._pair.units)
        self._check_files()
        self._mixtures.lay_out(programs, sizes)
        self._passes = engine_passes(self._pair, sizes)
        return layout_of(programs, precision, sizes, self._passes)

    def lay_out_tower(self, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """Patches and rows. Raises BackendError without the tower's engine."""
        self._units[TOWER] = tower_unit(spec, program)
        self._check_files()
        return EngineTowerLayout.of(spec, program, most_tokens)

    def _check_files(self) -> None:
        if missing := sorted(engine_units(self._units).keys() - self._files.keys()):
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
        """Count engines, and the experts beside them."""
        self._count_files(memory)
        self._mixtures.count(memory)

    def _count_files(self, memory: Allocator) -> None:
        """An engine's weights on the device are about its file."""
        for name, path in self._files.items():
            purpose = "drafter weights" if "/drafter-" in name else "target weights"
            memory.count(PURPOSE if name == engine_file(TOWER) else purpose, path.stat().st_size)

    def load(self, memory: Allocator, common: Common) -> dict[str, Frame]:
        """Read all engines, bind a context for each use of one and enqueue each once."""
        units = {key: unit for key, unit in self._units.items() if key != EMBEDDING}
        engines = self._engines
        assert engines is not None
        engines.load(units, {key: self._files[engine_file(key)] for key in units})
        self._count_files(memory)
        engines.share_scratch(memory)
        mixtures = self._mixtures.load(self._gpu, memory)
        passes: dict[str, Frame] = {}
        for name, each in self._passes.items():
            runs: dict[RunEngine, Enqueue] = {}
            for step in each.schedule.steps:
                if isinstance(step, RunEngine) and step.run.key != EMBEDDING:
                    bound = each.bound(step)
                    where = {tensor: p.address for tensor, p in addresses(each, name, step, common).items()}
                    rows = each.rows if bound.rows is None else bound.rows
                    runs[step] = engines.context(bound.key, bound.profile, rows, where)
            for enqueue in runs.values():  # over whatever lies in the arena
                enqueue()
            passes[name] = EngineFrame(common, name, self._pair, runs, mixtures, self._mixtures.steps)
        return passes

    def load_tower(self, memory: Allocator, layout: TowerLayout) -> Tower:
        """Bind a context of the tower's engine."""
        assert self._engines is not None
        return EngineTower(self._gpu, layout, self._weights, self._cubin, memory, self._engines)


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
        if sm < (first := read_as(word).tensorrt):
            raise BackendError(
                f"{name} is {word}, which TensorRT runs on SM {first} and later, not on {arch}; "
                "build it with --backend native, or choose fp8 in the recipe"
            )
    if pair.target.vocab_size % WORD:
        raise BackendError(
            f"the vocabulary has {pair.target.vocab_size} tokens, plans need a multiple of {WORD}; "
            "build it with --backend native"
        )
