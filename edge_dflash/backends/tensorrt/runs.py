"""A pass as runs of engines, state kernels and a copied row, over one arena.

Placement by liveness is the native backend's. TensorRT reads and writes rows without gaps, so the stride of a tensor
is its columns. Ids, logits and choices lie in separate buffers: they come from outside or outlive the pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from edge_dflash.backends.cuda.memory import Placement
from edge_dflash.backends.cuda.schedule import Schedule, place
from edge_dflash.backends.cuda.steps import Convolve, Draft, Last, PassStep, State
from edge_dflash.backends.tensorrt.units import CHOICES, EMBEDDING, HEAD, LOGITS, PairUnits, Run
from edge_dflash.model.ops import Experts, GroupedConv, SelectRows, Walk

Buffer = Literal["arena", "ids", "logits", "choices"]


@dataclass(frozen=True)
class RunEngine(PassStep):
    """An engine on its tensors. ``reads`` and ``writes`` are those in the arena, and the logits."""

    run: Run

    @property
    def label(self) -> str:
        """The engine; the embedding is none in a bundle."""
        return self.run.key if self.run.key == EMBEDDING else f"plan {self.run.key}"


@dataclass(frozen=True)
class RunExperts(PassStep):
    """A mixture of experts. Its residual and the next norm are those of the engine behind it."""

    op: Experts


@dataclass(frozen=True)
class Address:
    """Where a tensor lies: bytes from a buffer's start."""

    buffer: Buffer
    offset: int


@dataclass(frozen=True)
class Bound:
    """What to set before an engine is enqueued: profile, and the address of each input and output."""

    key: str
    profile: int
    rows: int | None  # None: as many as the pass has
    addresses: tuple[tuple[str, Address], ...]


@dataclass(frozen=True)
class EnginePass:
    """One pass, ready to be given addresses: steps in order, where tensors lie, the arena's size, most rows.

    Every tensor has room for ``rows`` or the head's rows, whichever is more.
    """

    schedule: Schedule
    places: Mapping[str, Placement]
    arena: int
    rows: int
    block: int  # rows of the head
    profile: int

    def bound(self, step: RunEngine) -> Bound:
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


def engine_pass(pair: PairUnits, which: str, rows: int) -> EnginePass:
    """Schedule and place one pass; ``rows``: of a verify or propose pass, or most of a prefill chunk."""
    steps = schedule(pair, which)
    block = pair.units[HEAD].profiles[0].high
    places, size = place(steps, max(rows, block))
    dense = {name: replace(where, stride=steps.columns[name]) for name, where in places.items()}
    return EnginePass(steps, dense, size, rows, block, profile=1 if steps.program.commits else 0)


def schedule(pair: PairUnits, which: str) -> Schedule:
    """Steps of a pass in order."""
    program = pair.programs[which]
    made = Schedule(program, widths=dict(program.columns))
    for step in pair.passes[which]:
        if isinstance(step, Run):
            reads = tuple(tensor for _, tensor in step.reads if tensor != "ids")
            writes = tuple(tensor for _, tensor in step.writes if tensor != CHOICES)
            made.steps.append(RunEngine(reads, writes, step))
        elif isinstance(step, SelectRows):
            if step.which == "drafts":  # the head runs on every row; row 0 is left out when its result is read
                made.slices[step.output] = (step.inputs[0], 0)
                continue
            writes = (step.output,)
            made.single.add(step.output)
            made.steps.append(Last(step.inputs, writes))
        elif isinstance(step, GroupedConv):
            writes = (step.output,)
            made.steps.append(Convolve(step.inputs, writes, step))
        elif isinstance(step, Experts):
            writes = (step.output,)
            made.steps.append(RunExperts(step.inputs, writes, step))
        elif isinstance(step, Walk):
            hidden, writes = step.inputs[0], ()
            made.steps.append(Draft((hidden,), writes, step, int(hidden in made.slices)))
        else:
            writes = (step.output,) if program.columns[step.output] else ()
            made.steps.append(State(step.inputs, writes, step))
        made.columns |= {name: made.widths[name] for name in writes}
    return made
