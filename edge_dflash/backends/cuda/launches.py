"""The dense ops of a pair as launches of our kernels over stacks of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge_dflash.backends.cuda.driver import Gpu
from edge_dflash.backends.cuda.linear import Linears
from edge_dflash.backends.cuda.linear_plan import row_tile
from edge_dflash.backends.cuda.loading import Common, Plan
from edge_dflash.backends.cuda.memory import Memory
from edge_dflash.backends.cuda.passes import Frame, Pass
from edge_dflash.backends.cuda.placement import place
from edge_dflash.backends.cuda.schedule import Head, Project, schedule
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.cuda.weights import NativeWeights
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.program import PairPrograms
from edge_dflash.weights.stacks import Stack, pair_stacks


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
                    most = max(most, linears.plan(layout, rows, may_split=True).sum_bytes(layout, rows))
                elif isinstance(step, Head):
                    most = max(most, linears.plan(step.stack.layout, rows).rank_bytes(rows))
        return most


def _purpose(stack: Stack) -> str:
    return f"{stack.names[0].partition('.')[0]} weights"
