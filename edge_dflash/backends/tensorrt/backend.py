"""The TensorRT backend: the native backend with plans in the place of its launches for dense ops."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.memory import Memory
from edge_dflash.backends.cuda.passes import Common, DeviceLayout, Frame
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.tensorrt.api import TENSORRT, TENSORRT_RTX, Flavour, load, version
from edge_dflash.backends.tensorrt.passes import Enqueue, PlannedPass, addresses, plan_of, planned_passes
from edge_dflash.backends.tensorrt.plans import check_plans, plan_name, planned
from edge_dflash.backends.tensorrt.runtime import Engines
from edge_dflash.backends.tensorrt.schedule import RunPlan
from edge_dflash.backends.tensorrt.units import EMBEDDING, pair_units
from edge_dflash.bundle.reader import Bundle
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.program import PairPrograms


class PlannedOps:
    """:class:`~edge_dflash.backends.cuda.loading.Dense` of plans in files, by path in the bundle."""

    def __init__(self, flavour: Flavour, files: Mapping[str, Path]) -> None:
        self._flavour, self._files = flavour, files
        self._engines: Engines | None = None

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Steps and places of all passes, checked. Raises BackendError."""
        self._pair = pair_units(programs, sizes.rows, sizes.prefill_rows)
        if missing := sorted(planned(self._pair.units).keys() - self._files.keys()):
            raise BackendError(f"{missing[0]} is missing; build the bundle again")
        self._passes = planned_passes(self._pair, sizes)
        return plan_of(programs, precision, sizes, self._passes)

    def open(self, gpu: Gpu, layout: DeviceLayout) -> int:
        """Start TensorRT. Passes share no scratch but that of the contexts, which is known when plans are loaded."""
        self._engines = Engines(gpu, self._flavour)
        return 0

    def close(self) -> None:
        """Give the plans' memory back."""
        if self._engines is not None:
            self._engines.close()

    def count(self, memory: Memory) -> None:
        """A plan's weights on the device are about its file."""
        for name, path in self._files.items():
            model = "drafter" if "/drafter-" in name else "target"
            memory.count(f"{model} weights", path.stat().st_size)

    def load(self, memory: Memory, common: Common) -> dict[str, Frame]:
        """Read all plans, bind a context for each use of one and enqueue each once."""
        units = {key: unit for key, unit in self._pair.units.items() if key != EMBEDDING}
        engines = self._engines
        assert engines is not None
        engines.load(units, {key: self._files[plan_name(key)] for key in units})
        self.count(memory)
        engines.share_scratch(memory)
        passes: dict[str, Frame] = {}
        for name, each in self._passes.items():
            runs: dict[RunPlan, Enqueue] = {}
            for step in each.schedule.steps:
                if isinstance(step, RunPlan) and step.run.key != EMBEDDING:
                    bound = each.bound(step)
                    where = {tensor: p.address for tensor, p in addresses(each, name, step, common).items()}
                    rows = each.rows if bound.rows is None else bound.rows
                    runs[step] = engines.context(bound.key, bound.profile, rows, where).enqueue
            for enqueue in runs.values():  # over whatever lies in the arena
                enqueue()
            passes[name] = PlannedPass(common, name, self._pair, runs)
        return passes


def check_plans_here(bundle: Bundle) -> Flavour:
    """The TensorRT that runs the bundle's plans. Raises BackendError unless they are there and it is theirs."""
    plans = bundle.manifest.plans
    command = f"edge-dflash build --finish {bundle.path}"
    if plans is None or plans.deferred:
        count = 0 if plans is None else len(plans.deferred)
        raise BackendError(f"{bundle.path} lacks {count} plans, which its board has to build: {command}")
    flavour = TENSORRT_RTX if plans.flavour == TENSORRT_RTX.module else TENSORRT
    if (found := version(load(flavour))) != plans.version:
        raise BackendError(
            f"{bundle.path} has plans of {flavour.product} {plans.version}, here is {found}: "
            f"build new ones with {command}"
        )
    return flavour


def bundle_ops(bundle: Bundle) -> PlannedOps:
    """The plans of a finished bundle. Raises BackendError when they are not for this TensorRT or not all there."""
    manifest = bundle.manifest
    flavour = check_plans_here(bundle)
    assert manifest.plans is not None
    check_plans(bundle.pair, manifest.weights, manifest.arch)
    return PlannedOps(flavour, {name: bundle.plan(name) for name in manifest.plans.names})
