"""The vision tower as one engine: our kernel makes patches of a picture's levels, the engine makes rows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.kernels.tower import check_tower, most_patches
from edge_dflash.backends.cuda.memory import Allocator, Placement, aligned
from edge_dflash.backends.cuda.tower import PATCHES, Tower, TowerLayout, TowerSchedule
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.backends.tensorrt.runtime import Engines
from edge_dflash.backends.tensorrt.units import TOWER
from edge_dflash.model.program import Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.weights.formats import WeightFormat


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

    def __init__(
        self,
        gpu: Gpu,
        layout: TowerLayout,
        weights: NativeWeights,
        cubin: Callable[[str], bytes],
        memory: Allocator,
        engines: Engines,
    ) -> None:
        self._engines = engines
        super().__init__(gpu, layout, weights, cubin, memory)

    def _load(self, weights: NativeWeights, cubin: Callable[[str], bytes], memory: Allocator) -> None:
        places = {name: self._matrix(name).pointer for name in self._layout.places} | dict(self._tables)
        where = {name: pointer.address for name, pointer in places.items()}
        self._enqueue = self._engines.resized(TOWER, self._layout.most, where)

    def _compute(self, patches: int) -> None:
        self._enqueue(patches)
