"""What a pair costs on a board, before anything is loaded: bytes per cycle, resident memory, the bandwidth floor.

All numbers follow from the pair's Programs and a storage format per weight, by the same arithmetic for every
architecture. No weights, no torch. A cycle is one propose pass and one verify pass, each reading every weight once;
the replay of the previous cycle's rows happens in the verify pass, so recurrent state is read and written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

from edge_dflash.board.archs import MOST_ROWS, Arch, arch_of_sm
from edge_dflash.board.profiles import SYSTEM_BYTES, BoardProfile
from edge_dflash.bundle.manifest import Manifest
from edge_dflash.checks import footprint
from edge_dflash.checks.by_drafts import DraftCost, by_drafts
from edge_dflash.checks.by_lanes import Joint, LaneCosts, lane_costs
from edge_dflash.checks.footprint import CycleBytes, MemoryBytes
from edge_dflash.checks.tower_costs import TowerCosts, tower_costs
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.specs import DrafterLayerMask, PairSpec
from edge_dflash.weights.formats import TIED, KvFormat, WeightFormat
from edge_dflash.weights.recipe import Recipe

DEFAULT_CONTEXT = 4096  # committed tokens at which a cycle is costed, unless the maximum is smaller


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one model, module and storage format."""

    model: str  # "target" or "drafter"
    module: str  # as in recipes: attention, mlp, ...
    format: WeightFormat
    parameters: int
    bytes: int  # of one read; "tied" is stored with another


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
        of_board = ("name", "sm", "memory_bytes", "memory_bandwidth_bytes_per_s", "read_bandwidth_bytes_per_s")
        return {
            "verify_bytes": self.verify_bytes,
            "draft_bytes": self.draft_bytes,
            "drafter_bytes": self.cycle.drafter_weights,
            "lm_head_bytes": self.cycle.drafter_lm_head,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "drafter_kv_bytes_per_token": self.drafter_kv_bytes_per_token,
            "tape_bytes_per_row": self.tape_bytes_per_row,
            "state_bytes": self.state_bytes,
            "cycle_weight_bytes": self.verify_bytes + self.draft_bytes,
            "cycle_bytes": self.cycle_bytes,
            "total_bytes": self.total_bytes,
            "system_bytes": SYSTEM_BYTES,
            "free_bytes": self.free_bytes,
            "fits": self.free_bytes >= 0,
            "longest_context": self.longest_context,
            "verify_floor_ms": self.board.milliseconds(self.verify_bytes),
            "draft_floor_ms": self.board.milliseconds(self.draft_bytes),
            "plain_floor_ms": self.plain_floor_ms,
            "floor_ms": self.floor_ms,
            "break_even_accept_length": self.break_even_accept_length,
            "architecture": self.architecture,
            "block_size": self.block_size,
            "context": self.context,
            "max_context": self.max_context,
            "prefill_chunk": self.prefill_chunk,
            "prefill_chunk_ms": self.prefill_chunk_ms,
            "kv_format": self.kv_format,
            "drafter_masks": [asdict(mask) for mask in self.drafter_masks],
            "by_drafts": [asdict(each) for each in self.by_drafts],
            "lanes": self.by_lanes.to_json(),
            "tower": None if self.tower is None else self.tower.to_json(),
            "cycle": asdict(self.cycle),
            "memory": asdict(self.memory),
            "weights": [asdict(group) for group in self.weights],
            "rates": _rates(self.board),
            "board": {name: getattr(self.board, name) for name in of_board},
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
    block, arch, vision = spec.rows, arch_of_sm(board.sm), spec.target.vision
    programs = pair_programs(spec)
    if prefill_chunk is None:
        prefill_chunk = default_chunk(arch, programs, max_context, plans=plans)
    if max_context <= block or prefill_chunk < 1:
        raise RequestError(
            f"maximum context {max_context} and prefill chunk {prefill_chunk} are given; wanted more than the block "
            f"size {block} and at least 1; raise them"
        )
    if context is None:
        context = min(DEFAULT_CONTEXT, max_context - block)
    if not 0 <= context <= max_context - block:
        raise RequestError(
            f"context {context} is outside 0..{max_context - block} (maximum - block); "
            "give a smaller --context, or a larger maximum"
        )
    read, stored = footprint.read_bytes(programs, formats), footprint.stored_bytes(programs, formats)
    target, drafter = ([s for n, s in programs.states.items() if n.startswith(m)] for m in ("target.", "drafter."))
    held = partial(footprint.memory_bytes, programs, stored, spec, max_context, prefill_chunk, kv_format)
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
        cycle=footprint.cycle_bytes(programs, read, spec, context, kv_format),
        memory=held(lanes),
        by_drafts=by_drafts(spec, programs, read, context, kv_format),
        by_lanes=lane_costs(Joint(spec, programs, read, context, kv_format, board), held, lanes),
        tower=tower_costs(vision, programs.see, stored, arch, board.chip) if vision and programs.see else None,
    )


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
