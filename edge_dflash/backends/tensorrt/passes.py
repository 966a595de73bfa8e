"""A pass whose dense ops are runs of plans; state kernels, embedding and copied rows are the native backend's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edge_dflash.backends.cuda.memory import NULL, DevicePointer
from edge_dflash.backends.cuda.passes import Common, DeviceLayout, Frame
from edge_dflash.backends.cuda.schedule import Step
from edge_dflash.backends.cuda.states import Sizes
from edge_dflash.backends.tensorrt.dry_run import dry_run
from edge_dflash.backends.tensorrt.schedule import PlanPass, RunPlan, plan_pass
from edge_dflash.backends.tensorrt.units import EMBEDDING, PairUnits
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Embed
from edge_dflash.model.program import PairPrograms

Enqueue = Callable[[], None]


class PlannedPass(Frame):
    """``runs``: for each step that runs a plan, what enqueues it."""

    def __init__(self, common: Common, name: str, pair: PairUnits, runs: Mapping[RunPlan, Enqueue]) -> None:
        super().__init__(common, name)
        self.pair, self.runs = pair, runs

    def _dense(self, step: Step, logits: bool) -> None:
        """Plans always leave logits."""
        if not isinstance(step, RunPlan):
            raise TypeError(f"{type(step).__name__} is no step of a TensorRT pass")
        if step.run.key == EMBEDDING:
            ((_, out),) = step.run.writes
            self._gather(embedding_weight(self.pair), out)
        else:
            self.runs[step]()


def embedding_weight(pair: PairUnits) -> str:
    """The table that both models gather from."""
    (op,) = pair.units[EMBEDDING].ops
    assert isinstance(op, Embed)
    return op.weight


def planned_passes(pair: PairUnits, sizes: Sizes) -> dict[str, PlanPass]:
    """All passes by name, each walked once before it is trusted. Raises BackendError."""
    passes = {
        name: plan_pass(pair, name, sizes.prefill_rows if name == "prefill" else sizes.rows)
        for name in ("prefill", "verify", "propose")
    }
    for each in passes.values():
        dry_run(pair.units, each)
    return passes


def plan_of(programs: PairPrograms, precision: Precision, sizes: Sizes, passes: Mapping[str, PlanPass]) -> DeviceLayout:
    """The native backend's plan with these passes. Raises BackendError for other arithmetic than theirs."""
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


def addresses(each: PlanPass, name: str, step: RunPlan, common: Common) -> dict[str, DevicePointer]:
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
