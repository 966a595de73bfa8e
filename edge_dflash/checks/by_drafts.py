"""What cycles cost by the drafts that they verify, where rows read different experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from edge_dflash.checks import footprint
from edge_dflash.checks.expert_bytes import distinct, expert_layers
from edge_dflash.model.program import PairPrograms
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import KvFormat

STEPS = (0, 1, 2, 4, 6, 8, 12, 16)  # drafts of cycles that are costed one by one


@dataclass(frozen=True)
class DraftCost:
    """A cycle that verifies so many drafts, of a target with experts."""

    drafts: int
    experts: float  # that a layer reads, if rows chose uniformly and independently: an upper bound
    verify_bytes: int  # of weights
    cycle_bytes: int  # drafting included


def by_drafts(
    spec: PairSpec, programs: PairPrograms, read: Mapping[str, int], context: int, kv: KvFormat
) -> tuple[DraftCost, ...]:
    """The costs of some numbers of drafts, from none to all; () without experts."""
    if not (layers := expert_layers(programs.verify)):
        return ()
    found = []
    for drafts in (*(step for step in STEPS if step < spec.drafts), spec.drafts):
        cycle = footprint.cycle_bytes(programs, read, spec, context, kv, drafts)
        plain = cycle.target_weights + cycle.experts + cycle.delta_state + cycle.target_kv
        size = sum(asdict(cycle).values()) if drafts else plain
        found.append(DraftCost(drafts, distinct(layers[0], drafts + 1), cycle.target_weights + cycle.experts, size))
    return tuple(found)
