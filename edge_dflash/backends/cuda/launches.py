"""Dense ops as launches of our kernels over stacks of weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edge_dflash.backends.cuda.common import Common, DeviceLayout
from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.experts import ExpertKernels
from edge_dflash.backends.cuda.linear import Linears
from edge_dflash.backends.cuda.memory import Allocator, place
from edge_dflash.backends.cuda.mixtures import Mixtures, count_mixtures, mixes, shape_of
from edge_dflash.backends.cuda.passes import Frame, Pass
from edge_dflash.backends.cuda.schedule import schedule
from edge_dflash.backends.cuda.splits import ALONE_ROWS, MOST_ROWS, StreamSplits, row_tile
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.steps import Head, PassStep, Project
from edge_dflash.backends.cuda.tower import Tower, TowerLayout
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Precision, lane_steps
from edge_dflash.errors import BackendError
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.weights.stacks import Stack, pair_stacks


class Launches:
    """:class:`~edge_dflash.backends.cuda.loading.Dense` by launches of our kernels.

    ``cubin`` gives a compilation unit's cubin for this device; tensors ``kept`` can be read behind a prefill.
    """

    def __init__(self, weights: NativeWeights, cubin: Callable[[str], bytes], kept: Collection[str] = ()) -> None:
        self._weights, self._cubin, self._kept = weights, cubin, kept

    @property
    def most_rows(self) -> int:
        """Those of the linears."""
        return MOST_ROWS

    def lay_out(self, programs: PairPrograms, precision: Precision, sizes: Sizes) -> DeviceLayout:
        """Stacks, steps and places. Raises BackendError for what has no kernel."""
        if precision.activations != "bfloat16":
            raise BackendError(f"activations are {precision.activations!r}; the native backend computes in bfloat16")
        formats, tile = self._weights.formats, max(row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows))
        self._stacks: Mapping[str, Stack] = pair_stacks(programs, formats)
        schedules = {
            "prefill": schedule(programs.prefill, formats, wide=True),
            "verify": schedule(programs.verify, formats, wide=False),
            "propose": schedule(programs.propose, formats, wide=False),
        }
        self._mixes = mixes(schedules.values())
        for step in self._mixes.values():
            shape_of(step)
        rows = {"prefill": max(sizes.prefill_rows, tile), "verify": tile, "propose": tile}
        kept = {"prefill": self._kept}
        placed = {name: place(steps, rows[name], kept.get(name, ())) for name, steps in schedules.items()}
        places = {name: found for name, (found, _) in placed.items()}
        return DeviceLayout(programs, precision, sizes, schedules, places, max(size for _, size in placed.values()))

    def open(self, gpu: Gpu, layout: DeviceLayout) -> int:
        """Load the kernels of linears."""
        most = 0
        sizes = layout.sizes
        self._most_rows = max(sizes.prefill_rows, sizes.most_rows)
        alone, joint = row_tile(sizes.rows, ALONE_ROWS), row_tile(sizes.most_rows) if sizes.slots > 1 else 0
        self._gpu, self._linears = gpu, Linears(gpu, self._cubin, most_rows=alone, joint=joint)
        for name, each in layout.schedules.items():
            prefill = name == "prefill"
            rows = sizes.rows if prefill else sizes.of_pass(name)
            for slots in (1,) if prefill else lane_steps(sizes.slots):
                most = max(most, *(self._scratch(step, slots * rows) for step in each.steps), 0)
        return most

    def _scratch(self, step: PassStep, rows: int) -> int:
        """Bytes of scratch of a step over so many rows."""
        if isinstance(step, Project):
            splits = self._linears.choose(step.stack.layout, rows, may_split=True)
            return splits.sum_bytes(step.stack.layout) if isinstance(splits, StreamSplits) else 0
        return self._linears.choose(step.stack.layout, rows).rank_bytes if isinstance(step, Head) else 0

    def count(self, memory: Allocator) -> None:
        """Count all stacks."""
        for stack in self._stacks.values():
            memory.count(_purpose(stack), stack.layout.nbytes + 128 * stack.layout.units)
        if self._mixes:
            count_mixtures(memory, self._mixes, self._most_rows)

    def load(self, memory: Allocator, common: Common) -> dict[str, Frame]:
        """Bring the stacks to the device."""
        loaded = {}
        for key, stack in self._stacks.items():
            loaded[key] = self._weights.stack(self._gpu, stack)
            memory.count(_purpose(stack), stack.layout.nbytes + loaded[key].scale.nbytes)
        mixtures = None
        if self._mixes:
            kernels = ExpertKernels(self._gpu, self._cubin)
            mixtures = Mixtures(self._gpu, kernels, self._weights, memory, self._mixes, self._most_rows)
        return {name: Pass(common, name, self._linears, loaded, mixtures) for name in common.layout.schedules}

    def lay_out_tower(self, spec: VisionSpec, program: Program, most_tokens: int) -> TowerLayout:
        """Steps and places. Raises BackendError for what has no kernel."""
        return TowerLayout.of(spec, program, most_tokens)

    def load_tower(self, memory: Allocator, layout: TowerLayout) -> Tower:
        """Bring the tower's weights to the device."""
        return Tower(self._gpu, layout, self._weights, self._cubin, memory)

    def close(self) -> None:
        """All its memory is the device's own."""


def _purpose(stack: Stack) -> str:
    return f"{stack.names[0].partition('.')[0]} weights"
