"""What a pair costs on a board, before anything is loaded: bytes per cycle, resident memory, the bandwidth floor.

All numbers follow from the pair's Programs and a storage format per weight, by the same arithmetic for every
architecture. No weights, no torch. A cycle is one propose pass and one verify pass, each reading every weight once;
the replay of the previous cycle's rows happens in the verify pass, so recurrent state is read and written once.

A joint pass of several lanes reads every weight once, of a mixture the experts that its rows choose, and the state of
each lane. It takes at least its bytes over the board's bandwidth, and its products at the rate that the architecture's
kernel reached with that many rows, whichever is longer: :attr:`LaneCosts.free_rows` says up to how many rows that is
memory. Attention and recurrent state are counted by their bytes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from math import prod
from typing import Any

from edge_dflash.board.archs import MOST_ROWS, Arch, arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, BoardProfile
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks import footprint
from edge_dflash.checks.footprint import CycleBytes, MemoryBytes, TowerCosts, distinct, expert_layers
from edge_dflash.decode.drafts import share_of
from edge_dflash.decode.shape import MOST_LANES
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Experts, Linear
from edge_dflash.model.program import PairPrograms, Program
from edge_dflash.model.specs import DrafterLayerMask, PairSpec
from edge_dflash.weights.formats import TIED, KvFormat, WeightFormat
from edge_dflash.weights.recipe import Recipe

DEFAULT_CONTEXT = 4096  # committed tokens at which a cycle is costed, unless the maximum is smaller
STEPS = (0, 1, 2, 4, 6, 8, 12, 16)  # drafts of the cycles of a mixture that are costed one by one
LANES = (1, 2, 4, 8)  # whose joint cycles are costed
DRAFTS = (0, 3, 7, 15)  # of each lane, up to those of the pair
ACCEPT_LENGTH = 5.0  # that cycles of all drafts are taken to have
JOINT_ROWS = 128  # of a joint pass, at most
_LANE_BYTES = ("walk", "embedding_rows", "delta_state", "tape", "target_kv", "drafter_kv")  # of CycleBytes: per lane
_DERIVED = (  # properties of an Inspection that its JSON has
    *("verify_bytes", "draft_bytes", "cycle_bytes", "total_bytes", "free_bytes", "longest_context"),
    *("plain_floor_ms", "floor_ms", "break_even_accept_length"),
)
_OF_BOARD = ("name", "sm", "memory_bytes", "memory_bandwidth_bytes_per_s", "read_bandwidth_bytes_per_s")


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one model, module and storage format."""

    model: str  # "target" or "drafter"
    module: str  # as in recipes: attention, mlp, ...
    format: WeightFormat
    parameters: int
    bytes: int  # of one read; "tied" is stored with another


@dataclass(frozen=True)
class DraftCost:
    """A cycle that verifies a number of drafts, of a target with experts."""

    drafts: int
    experts: float  # that a layer reads, if rows chose uniformly and independently: an upper bound
    verify_bytes: int  # of weights
    cycle_bytes: int  # drafting included


@dataclass(frozen=True)
class LanePart:
    """Bytes of one kind that lanes hold."""

    what: str
    one: int  # lane
    all: int  # lanes


@dataclass(frozen=True)
class JointCycle:
    """A cycle of some lanes that verify the same number of drafts each."""

    lanes: int
    drafts: int
    rows: int  # of the verify pass
    experts: float | None  # that a layer reads, if rows chose uniformly and independently; None: the target has none
    bytes: int
    memory_ms: float
    product_ms: float | None  # None: the board's rate is not known
    floor_ms: float  # the longer of the two
    tokens_per_second: float  # of all lanes, at the floor
    tokens_per_second_each: float


@dataclass(frozen=True)
class LaneCosts:
    """Lanes of one pair on one board."""

    lanes: int  # of the memory
    most: int  # lanes whose memory the board has; 0: not even one
    accept_length: float
    free_rows: int | None  # most of a verify whose products take no longer than its weights; None: no rate is known
    parts: tuple[LanePart, ...]
    cycles: tuple[JointCycle, ...] = field(repr=False)


@dataclass(frozen=True)
class Inspection:
    """The arithmetic of one pair on one board. Bytes are integers, times are milliseconds."""

    architecture: str
    board: BoardProfile
    block_size: int
    context: int  # committed tokens at which the cycle is costed
    max_context: int  # rows of every KV state
    prefill_chunk: int
    prefill_chunk_ms: float | None  # estimate of a pass: its weights' bytes or its products; None: no rate is known
    kv_format: KvFormat
    drafter_masks: tuple[DrafterLayerMask, ...]  # of each layer of the drafter
    weights: tuple[WeightGroup, ...]
    kv_bytes_per_token: int  # target
    drafter_kv_bytes_per_token: int
    tape_bytes_per_row: int
    state_bytes: int  # one slot: S in FP32 and conv history in BF16
    cycle: CycleBytes
    memory: MemoryBytes
    by_drafts: tuple[DraftCost, ...]  # from none on; () where rows read what one row reads
    by_lanes: LaneCosts
    tower: TowerCosts | None  # None: no image comes in

    @property
    def verify_bytes(self) -> int:
        """Bytes of weights that a verify pass reads of the target."""
        return self.cycle.target_weights + self.cycle.experts

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that drafting reads: the drafter once, the lm_head again, and what its walk reads."""
        return self.cycle.drafter_weights + self.cycle.drafter_lm_head + self.cycle.walk

    @property
    def cycle_bytes(self) -> int:
        """All bytes of a cycle."""
        return sum(asdict(self.cycle).values())

    @property
    def total_bytes(self) -> int:
        """All resident bytes."""
        return sum(asdict(self.memory).values())

    @property
    def free_bytes(self) -> int:
        """Board memory that is left beside the system; negative when the pair does not fit."""
        return self.board.memory_bytes - SYSTEM_BYTES - self.total_bytes

    @property
    def stored_bytes(self) -> int:
        """Weights of both models, embedding and tower included."""
        held = self.memory
        return held.target_weights + held.drafter_weights + held.embedding + held.tower

    @property
    def longest_context(self) -> int:
        """Most tokens of context that fit on the board; 0 when not even a block and a token do."""
        held = self.memory.target_kv + self.memory.drafter_kv
        tokens = (self.free_bytes + held) * self.max_context // held
        return tokens if tokens > self.block_size else 0

    @property
    def floor_ms(self) -> float:
        """Least time of a cycle: all its bytes over the board's bandwidth."""
        return self.board.milliseconds(self.cycle_bytes)

    @property
    def plain_floor_ms(self) -> float:
        """Least time of a token without a drafter: a verify pass and the state it needs, one row."""
        c = self.cycle
        plain = c.target_weights + c.delta_state + c.target_kv
        return self.board.milliseconds(self.by_drafts[0].cycle_bytes if self.by_drafts else plain)

    @property
    def break_even_accept_length(self) -> float:
        """Accept length above which a cycle beats plain decoding, both at their floors."""
        return self.floor_ms / self.plain_floor_ms

    def to_json(self) -> dict[str, Any]:
        """One flat object with stable keys; ``cycle``, ``memory``, ``weights`` and ``board`` are the breakdowns."""
        found: dict[str, Any] = {name: getattr(self, name) for name in _DERIVED} | asdict(self)
        return found | {
            "lanes": found.pop("by_lanes"),
            "drafter_bytes": self.cycle.drafter_weights,
            "lm_head_bytes": self.cycle.drafter_lm_head,
            "cycle_weight_bytes": self.verify_bytes + self.draft_bytes,
            "system_bytes": SYSTEM_BYTES,
            "fits": self.free_bytes >= 0,
            "verify_floor_ms": self.board.milliseconds(self.verify_bytes),
            "draft_floor_ms": self.board.milliseconds(self.draft_bytes),
            "rates": _rates(self.board),
            "board": {name: getattr(self.board, name) for name in _OF_BOARD},
        }


def inspect_pair(
    spec: PairSpec,
    formats: Mapping[str, WeightFormat],
    *,
    board: BoardProfile,
    max_context: int,
    context: int | None = None,
    prefill_chunk: int | None = None,
    kv_format: KvFormat = "fp8",
    plans: bool = False,
    lanes: int = 1,
) -> Inspection:
    """Cost a pair, ``lanes`` sequences at once. ``formats``: storage of each weight by canonical name.

    ``context``: committed tokens at which a cycle is costed; None takes DEFAULT_CONTEXT or what ``max_context`` allows.
    ``prefill_chunk``: None takes the default of the board's architecture, with ``plans`` or without.
    Raises RequestError when ``max_context`` or ``context`` leaves no room for a block.
    """
    block, arch, programs = spec.rows, arch_of_sm(board.sm), pair_programs(spec)
    if prefill_chunk is None:
        prefill_chunk = default_chunk(arch, programs, max_context, plans=plans)
    if max_context <= block or prefill_chunk < 1:
        raise RequestError(
            f"maximum context {max_context} and prefill chunk {prefill_chunk} are given; wanted more than the block "
            f"size {block} and at least 1; raise them"
        )
    context = min(DEFAULT_CONTEXT, max_context - block) if context is None else context
    if not 0 <= context <= max_context - block:
        raise RequestError(
            f"context {context} is outside 0..{max_context - block} (maximum - block); "
            "give a smaller --context, or a larger maximum"
        )
    read, stored = footprint.read_bytes(programs, formats), footprint.stored_bytes(programs, formats)
    target, drafter = ([s for n, s in programs.states.items() if n.startswith(m)] for m in ("target.", "drafter."))
    held = partial(footprint.memory_bytes, programs, stored, spec, max_context, prefill_chunk, kv_format)
    costs = _Costs(spec, programs, read, context, kv_format, board)
    return Inspection(
        architecture=spec.target.architecture,
        board=board,
        block_size=spec.block_size,
        context=context,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        prefill_chunk_ms=prefill_ms(programs, read, prefill_chunk, arch, board),
        kv_format=kv_format,
        drafter_masks=spec.drafter.layers if spec.drafter else (),
        weights=_groups(programs, formats, read),
        kv_bytes_per_token=footprint.kv_bytes_per_token(target, kv_format),
        drafter_kv_bytes_per_token=footprint.kv_bytes_per_token(drafter, kv_format),
        tape_bytes_per_row=footprint.tape_bytes_per_row(target),
        state_bytes=footprint.delta_bytes(target),
        cycle=costs.cycle(),
        memory=held(lanes),
        by_drafts=costs.by_drafts(),
        by_lanes=costs.by_lanes(held, lanes),
        tower=footprint.tower_costs(spec, programs, stored, arch, board.chip),
    )


@dataclass(frozen=True)
class _Costs:
    """What decides the cost of a cycle."""

    spec: PairSpec
    programs: PairPrograms
    read: Mapping[str, int]  # bytes of one read of each weight
    context: int
    kv: KvFormat
    board: BoardProfile

    def cycle(self, drafts: int | None = None) -> CycleBytes:
        """Bytes of a cycle of one lane; None: of all drafts."""
        return footprint.cycle_bytes(self.programs, self.read, self.spec, self.context, self.kv, drafts)

    def experts(self, rows: int) -> float | None:
        """Experts that a layer reads of ``rows``; None: the target has none."""
        layers = expert_layers(self.programs.verify)
        return distinct(layers[0], rows) if layers else None

    def by_drafts(self) -> tuple[DraftCost, ...]:
        """The costs of some numbers of drafts, from none to all; () without experts."""
        found = []
        for drafts in _steps(STEPS, self.spec.drafts):
            if (experts := self.experts(drafts + 1)) is not None:
                cycle = self.cycle(drafts)
                verify = cycle.target_weights + cycle.experts
                found.append(DraftCost(drafts, experts, verify, self.bytes(1, drafts)))
        return tuple(found)

    def bytes(self, lanes: int, drafts: int) -> int:
        """Bytes of a joint cycle: weights once, state of every lane; without drafts those of a verify alone."""
        one = self.cycle(drafts)
        experts = footprint.routed_bytes(self.programs.verify, self.read, lanes * (drafts + 1))
        if not drafts:
            return one.target_weights + experts + lanes * (one.delta_state + one.target_kv)
        parts = {name: size * (lanes if name in _LANE_BYTES else 1) for name, size in asdict(one).items()}
        return sum((parts | {"experts": experts}).values())

    def pass_ms(self, program: Program, rows: int, lanes: int) -> float | None:
        """Products of a pass of ``rows`` of each lane; None: the architecture's rate is not known."""
        if (arch := arch_of_sm(self.board.sm)) is None:
            return None
        chip = self.board.chip
        return 1e3 * sum(arch.joint.seconds(weights, count, chip) for weights, count in products(program, rows, lanes))

    def joint(self, lanes: int, drafts: int, accept_length: float) -> JointCycle:
        """A joint cycle, where cycles of all drafts commit ``accept_length`` tokens a lane."""
        rows, size = lanes * (drafts + 1), self.bytes(lanes, drafts)
        products_ms = self.pass_ms(self.programs.verify, drafts + 1, lanes)
        if products_ms is not None and drafts:
            products_ms += self.pass_ms(self.programs.propose, self.spec.block_size, lanes) or 0.0
        memory_ms = self.board.milliseconds(size)
        floor_ms = max(memory_ms, products_ms or 0.0)
        share = share_of(accept_length, self.spec.drafts) if self.spec.drafts else 0.0
        each = 1e3 * sum(share**draft for draft in range(drafts + 1)) / floor_ms
        times = memory_ms, products_ms, floor_ms
        return JointCycle(lanes, drafts, rows, self.experts(rows), size, *times, lanes * each, each)

    def free_rows(self) -> int | None:
        """Most rows of a verify up to which products take no longer than reading the weights."""
        program, arch, free = self.programs.verify, arch_of_sm(self.board.sm), 0
        if arch is None:
            return None
        for last in arch.joint.steps(JOINT_ROWS):  # the first row of a step has its products and fewest experts
            took = self.pass_ms(program, free + 1, 1) or 0.0
            if took > self.board.milliseconds(footprint.pass_bytes(program, self.read, free + 1)):
                break
            free = last
        return free

    def by_lanes(self, held: Callable[[int], MemoryBytes], lanes: int) -> LaneCosts:
        """Cost some lanes; ``held``: what a pair with a number of lanes holds."""
        room = self.board.memory_bytes - SYSTEM_BYTES
        fit = [n for n in range(1, MOST_LANES + 1) if sum(asdict(held(n)).values()) <= room]
        accept_length = min(ACCEPT_LENGTH, float(self.spec.verify_rows))
        return LaneCosts(
            lanes=lanes,
            most=max(fit, default=0),
            accept_length=accept_length,
            free_rows=self.free_rows(),
            parts=self.parts(held(1), lanes),
            cycles=tuple(
                self.joint(n, drafts, accept_length) for n in LANES for drafts in _steps(DRAFTS, self.spec.drafts)
            ),
        )

    def parts(self, one: MemoryBytes, lanes: int) -> tuple[LanePart, ...]:
        """What lanes hold: logits and activations are those of a verify, which share the scratch of all passes."""
        rows = self.spec.verify_rows
        logits = rows * self.spec.target.vocab_size * footprint.LOGIT_BYTES
        sizes = {
            "K/V of the target": one.target_kv,
            "K/V of the drafter: its context": one.drafter_kv,
            "recurrent state": one.delta_state,
            "replay tape": one.tape,
            "logits of a verify": logits,
            "activations of a verify": footprint.scratch_bytes(self.programs.verify, rows) - logits,
        }
        return tuple(LanePart(what, size, lanes * size) for what, size in sizes.items())


def _steps(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)


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
            read, one = distinct(op, every), footprint.expert_weights(program, op)
            yield read * one, every * op.top_k / read
            yield footprint.row_weights(program, op) - op.top_k * one, every


def default_chunk(arch: Arch | None, programs: PairPrograms, max_context: int, *, plans: bool = False) -> int:
    """Rows of a prefill pass when nobody says how many: no more than ``arch`` needs about a tenth of a second for.

    ``plans``: TensorRT may run it, whose passes are always whole chunks: no more than MOST_ROWS then.
    """
    rows, program = MOST_ROWS, programs.prefill
    if arch is not None:
        rows = arch.prefill_rows(footprint.row_parameters(program), experts=footprint.expert_parameters(program))
    return min(rows, max_context, MOST_ROWS if plans else rows)


def prefill_ms(
    programs: PairPrograms, read: Mapping[str, int], rows: int, arch: Arch | None, board: BoardProfile | None
) -> float | None:
    """Estimate of a prefill pass: products at the rates of ``arch`` (None: there is no estimate).

    ``board``: its GPU is counted, and a pass takes no less than the bytes of its weights there. ``read``: the bytes of
    one read of each weight.
    """
    if arch is None:
        return None
    program, chip = programs.prefill, board.chip if board else arch.chip
    sizes = footprint.row_parameters(program), footprint.expert_parameters(program)
    took = 1e3 * arch.prefill_seconds(sizes[0], rows, experts=sizes[1], chip=chip)
    return max(took, board.milliseconds(footprint.pass_bytes(program, read, rows)) if board else 0.0)


def inspect_recipe(
    spec: PairSpec,
    recipe: Recipe,
    *,
    board: BoardProfile,
    max_context: int | None = None,
    context: int | None = None,
    lanes: int | None = None,
) -> Inspection:
    """Cost a pair that is to be built with ``recipe`` from wide checkpoints; sizes default to the recipe's.

    Raises RecipeError when the recipe does not fit the pair, RequestError as :func:`inspect_pair`.
    """
    spec = recipe.masked(spec)
    formats: dict[str, WeightFormat] = {**recipe.formats(pair_programs(spec).weights)}
    if spec.target.tied and formats["target.lm_head"] == "bf16":
        formats["target.lm_head"] = TIED
    return inspect_pair(
        spec,
        formats,
        board=board,
        max_context=recipe.context.max_context if max_context is None else max_context,
        context=context,
        prefill_chunk=recipe.context.prefill_chunk,
        kv_format="fp8" if recipe.kv == "fp8" else "bfloat16",
        plans=recipe.activations == "nvfp4",  # which only TensorRT computes
        lanes=recipe.context.lanes if lanes is None else lanes,
    )


def inspect_manifest(
    manifest: Manifest, *, board: BoardProfile, context: int | None = None, lanes: int | None = None
) -> Inspection:
    """Cost a built bundle. Raises RequestError when ``context`` leaves no room for a block."""
    return inspect_pair(
        manifest.pair,
        manifest.weights,
        board=board,
        max_context=manifest.max_context,
        context=context,
        prefill_chunk=manifest.prefill_chunk,
        kv_format=manifest.precision.kv,
        lanes=manifest.lanes if lanes is None else lanes,
    )


def _rates(board: BoardProfile) -> list[dict[str, Any]]:
    """What estimates stand on, FLOP/s by rows of a pass (0: any)."""
    if (arch := arch_of_sm(board.sm)) is None:
        return []
    return [
        {"use": use, "kernel": rate.kernel, "how": rate.how, "where": rate.where, "by_rows": rate.by_rows(board.chip)}
        for use, rate in arch.rates.items()
    ]


def _groups(
    programs: PairPrograms, formats: Mapping[str, WeightFormat], read: Mapping[str, int]
) -> tuple[WeightGroup, ...]:
    """Weights by model, module and format, in order of first use."""
    groups: dict[tuple[str, str, WeightFormat], list[str]] = {}
    for name, weight in programs.weights.items():
        groups.setdefault((name.split(".")[0], weight.module, formats[name]), []).append(name)
    return tuple(
        WeightGroup(*key, sum(prod(programs.weights[name].shape) for name in names), sum(read[name] for name in names))
        for key, names in groups.items()
    )
