"""A pass as runs of plans, state kernels and a copied row, over one arena: the native backend's schedule with plans.

Placement by liveness is the native backend's. TensorRT reads and writes rows without gaps, so the stride of a tensor
is its columns. Ids, logits and choices lie in buffers of their own, because they come from outside or outlive the
pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.backends.cuda.memory import Place, place
from edge_dflash.backends.cuda.schedule import Last, Schedule, State, Step
from edge_dflash.backends.tensorrt.units import CHOICES, EMBEDDING, HEAD, LOGITS, PairUnits, Run
from edge_dflash.model.ops import SelectRows

Buffer = Literal["arena", "ids", "logits", "choices"]


@dataclass(frozen=True)
class RunPlan(Step):
    """A plan on its tensors. ``reads`` and ``writes`` are those in the arena, and the logits."""

    run: Run

    @property
    def label(self) -> str:
        """The plan; the embedding is none in a bundle."""
        return self.run.key if self.run.key == EMBEDDING else f"plan {self.run.key}"


@dataclass(frozen=True)
class Address:
    """Where a tensor lies: bytes from a buffer's start."""

    buffer: Buffer
    offset: int


@dataclass(frozen=True)
class Bound:
    """What to set before a plan is enqueued: profile, and the address of each input and output."""

    key: str
    profile: int
    rows: int | None  # None: as many as the pass has
    addresses: tuple[tuple[str, Address], ...]


@dataclass(frozen=True)
class PlanPass:
    """One pass, ready to be given addresses: steps in order, where tensors lie, the arena's size, most rows.

    Every tensor has room for ``rows`` or a block's rows, whichever is more.
    """

    schedule: Schedule
    places: Mapping[str, Place]
    arena: int
    rows: int
    block: int  # rows of the head
    profile: int

    def bound(self, step: RunPlan) -> Bound:
        """Bindings of a step."""
        tensors = (*step.run.reads, *step.run.writes)
        addresses = tuple((name, self.address(tensor)) for name, tensor in tensors)
        if step.run.key == HEAD:
            return Bound(HEAD, 0, self.block, addresses)
        return Bound(step.run.key, self.profile, None, addresses)

    def address(self, tensor: str) -> Address:
        """Where a tensor of the pass lies."""
        if tensor in ("ids", CHOICES):
            return Address("ids" if tensor == "ids" else "choices", 0)
        root, column = self.schedule.place(tensor)
        if root == self.schedule.program.outputs[LOGITS]:
            return Address("logits", 0)
        return Address("arena", self.places[root].offset + 2 * column)


def plan_pass(pair: PairUnits, which: str, rows: int) -> PlanPass:
    """Schedule and place one pass; ``rows``: of a block, or most of a prefill chunk."""
    steps = schedule(pair, which)
    block = pair.units[HEAD].profiles[0].high
    places, size = place(steps, max(rows, block))
    dense = {name: replace(where, stride=steps.columns[name]) for name, where in places.items()}
    return PlanPass(steps, dense, size, rows, block, profile=1 if steps.program.commits else 0)


def schedule(pair: PairUnits, which: str) -> Schedule:
    """Steps of a pass in order."""
    program = pair.programs[which]
    made = Schedule(program, widths=dict(program.columns))
    for step in pair.passes[which]:
        if isinstance(step, Run):
            reads = tuple(tensor for _, tensor in step.reads if tensor != "ids")
            writes = tuple(tensor for _, tensor in step.writes if tensor != CHOICES)
            made.steps.append(RunPlan(reads, writes, step))
        elif isinstance(step, SelectRows):
            if step.which == "drafts":  # the head runs on every row; row 0 is left out when its result is read
                made.slices[step.output] = (step.inputs[0], 0)
                continue
            writes = (step.output,)
            made.single.add(step.output)
            made.steps.append(Last(step.inputs, writes))
        else:
            writes = (step.output,) if program.columns[step.output] else ()
            made.steps.append(State(step.inputs, writes, step))
        made.columns |= {name: made.widths[name] for name in writes}
    return made
