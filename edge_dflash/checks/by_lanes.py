"""What several lanes take and give: memory of each, bytes, operations and floor of a joint cycle. Arithmetic only.

A joint pass reads every weight once, of a mixture the experts that its rows choose, and the state of each lane. It
takes at least its bytes over the board's bandwidth, and its products at the rate that the architecture's kernel reached
with so many rows, whichever is longer: :attr:`LaneCosts.free_rows` says up to how many rows that is memory. Attention
and recurrent state are counted by their bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from edge_dflash.board.archs import arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, BoardProfile
from edge_dflash.checks import expert_bytes, footprint
from edge_dflash.checks.expert_bytes import expert_layers
from edge_dflash.checks.footprint import LOGIT_BYTES, MemoryBytes
from edge_dflash.decode.backend import MOST_LANES
from edge_dflash.decode.drafts import share_of
from edge_dflash.model.experts import Experts
from edge_dflash.model.ops import Linear
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import KvFormat

LANES = (1, 2, 4, 8)  # whose joint cycles are costed
DRAFTS = (0, 3, 7, 15)  # of each lane, up to those of the pair
ACCEPT_LENGTH = 5.0  # that cycles of all drafts are taken to have
MOST_ROWS = 128  # of a joint pass


@dataclass(frozen=True)
class LanePart:
    """Bytes of one kind that lanes hold."""

    what: str
    one: int  # lane
    all: int  # lanes


@dataclass(frozen=True)
class JointCycle:
    """A cycle of some lanes that verify so many drafts each."""

    lanes: int
    drafts: int
    rows: int  # of the verify pass
    experts: float | None  # that a layer reads, if rows chose uniformly and independently; None: the target has none
    bytes: int
    memory_ms: float
    product_ms: float | None  # None: the board's rate is not known
    tokens_per_second: float  # of all lanes, at the floor

    @property
    def floor_ms(self) -> float:
        """Least time."""
        return max(self.memory_ms, self.product_ms or 0.0)


@dataclass(frozen=True)
class LaneCosts:
    """Lanes of one pair on one board."""

    lanes: int  # of the memory
    most: int  # lanes whose memory the board has; 0: not even one
    accept_length: float
    free_rows: int | None  # most of a verify whose products take no longer than its weights; None: no rate is known
    parts: tuple[LanePart, ...]
    cycles: tuple[JointCycle, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        cycles = [
            {**asdict(one), "floor_ms": one.floor_ms, "tokens_per_second_each": one.tokens_per_second / one.lanes}
            for one in self.cycles
        ]
        return {**asdict(self), "parts": [asdict(part) for part in self.parts], "cycles": cycles}


@dataclass(frozen=True)
class Joint:
    """What decides the cost of a joint cycle."""

    spec: PairSpec
    programs: PairPrograms
    read: Mapping[str, int]  # bytes of one read of each weight
    context: int
    kv: KvFormat
    board: BoardProfile

    def bytes(self, lanes: int, drafts: int) -> int:
        """Bytes of a cycle: weights once, state of every lane."""
        one = footprint.cycle_bytes(self.programs, self.read, self.spec, self.context, self.kv, drafts)
        experts = expert_bytes.routed_bytes(self.programs.verify, self.read, lanes * (drafts + 1))
        if not drafts:  # as a token without a drafter is costed
            return one.target_weights + experts + lanes * (one.delta_state + one.target_kv)
        own = lanes * sum(size for name, size in asdict(one).items() if name in _STATE)
        once = asdict(one) | dict.fromkeys(_STATE, 0) | {"experts": experts}
        total: int = sum(once.values()) + own
        return total

    def product_ms(self, lanes: int, drafts: int) -> float | None:
        """Products of a cycle; None: the architecture's rate is not known."""
        passes = [(self.programs.verify, drafts + 1)] + [(self.programs.propose, self.spec.block_size)] * (drafts > 0)
        times = [self.pass_ms(program, rows, lanes) for program, rows in passes]
        return None if None in times else sum(time for time in times if time is not None)

    def pass_ms(self, program: Program, rows: int, lanes: int) -> float | None:
        """Products of a pass of ``rows`` of each lane."""
        if (arch := arch_of_sm(self.board.sm)) is None:
            return None
        chip, joint = self.board.chip, arch.joint
        return 1e3 * sum(joint.seconds(weights, count, chip) for weights, count in products(program, rows, lanes))

    def cycle(self, lanes: int, drafts: int, accept_length: float) -> JointCycle:
        """Its costs, and its tokens where cycles of all drafts commit ``accept_length``."""
        rows, layers, size = lanes * (drafts + 1), expert_layers(self.programs.verify), self.bytes(lanes, drafts)
        experts = expert_bytes.distinct(layers[0], rows) if layers else None
        times = self.board.milliseconds(size), self.product_ms(lanes, drafts)
        found = JointCycle(lanes, drafts, rows, experts, size, *times, tokens_per_second=0.0)
        share = share_of(accept_length, self.spec.drafts) if self.spec.drafts else 0.0
        tokens = sum(share**draft for draft in range(drafts + 1))
        return replace(found, tokens_per_second=1e3 * lanes * tokens / found.floor_ms)

    def free_rows(self) -> int | None:
        """Most rows of a verify up to which products take no longer than reading the weights."""
        program, arch, free = self.programs.verify, arch_of_sm(self.board.sm), 0
        if arch is None:
            return None
        for last in arch.joint.steps(MOST_ROWS):  # the first row of a step has its products and fewest experts
            took = self.pass_ms(program, free + 1, 1) or 0.0
            if took > self.board.milliseconds(footprint.pass_bytes(program, self.read, free + 1)):
                break
            free = last
        return free


_STATE = ("walk", "embedding_rows", "delta_state", "tape", "target_kv", "drafter_kv")  # of CycleBytes: each lane's


def products(program: Program, rows: int, lanes: int = 1) -> Iterator[tuple[float, float]]:
    """Weights and rows of each product of a pass of ``rows`` of each lane.

    Of a mixture the experts that the rows choose, each with as many rows as there are on average.
    """
    counts = {"ids": rows}
    for op in program.ops:
        counts[op.output] = op.rows(counts[op.inputs[0]])
        every = lanes * counts[op.output]
        if isinstance(op, Linear):
            yield prod(program.weights[op.weight].shape), every
        elif isinstance(op, Experts):
            read, one = expert_bytes.distinct(op, every), expert_bytes.expert_weights(program, op)
            yield read * one, every * op.top_k / read
            yield expert_bytes.row_weights(program, op) - op.top_k * one, every


def lane_costs(joint: Joint, held: Callable[[int], MemoryBytes], lanes: int) -> LaneCosts:
    """Cost some lanes; ``held``: what a pair with so many lanes holds."""
    spec, room = joint.spec, joint.board.memory_bytes - SYSTEM_BYTES
    fit = [n for n in range(1, MOST_LANES + 1) if sum(asdict(held(n)).values()) <= room]
    accept_length = min(ACCEPT_LENGTH, float(spec.verify_rows))
    steps = (*(step for step in DRAFTS if step < spec.drafts), spec.drafts)
    return LaneCosts(
        lanes=lanes,
        most=max(fit, default=0),
        accept_length=accept_length,
        free_rows=joint.free_rows(),
        parts=_parts(joint, held(1), lanes),
        cycles=tuple(joint.cycle(n, drafts, accept_length) for n in LANES for drafts in steps),
    )


def _parts(joint: Joint, one: MemoryBytes, lanes: int) -> tuple[LanePart, ...]:
    """What lanes hold, by kind: logits and activations are those of a verify, which share the scratch of all passes."""
    spec, verify = joint.spec, joint.programs.verify
    logits = spec.verify_rows * spec.target.vocab_size * LOGIT_BYTES
    sizes = {
        "K/V of the target": one.target_kv,
        "K/V of the drafter: its context": one.drafter_kv,
        "recurrent state": one.delta_state,
        "replay tape": one.tape,
        "logits of a verify": logits,
        "activations of a verify": footprint.scratch_bytes(verify, spec.verify_rows) - logits,
    }
    return tuple(LanePart(what, size, lanes * size) for what, size in sizes.items())
