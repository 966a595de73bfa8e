"""What a vision tower costs, by arithmetic: its weights, and one picture of a camera."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from edge_dflash.board.archs import Arch
from edge_dflash.board.rates import Chip
from edge_dflash.model.ops import Linear
from edge_dflash.model.program import Program
from edge_dflash.model.specs import VisionSpec
from edge_dflash.model.vision_ops import FrameAttend
from edge_dflash.pictures.resize import target_size

PICTURE = (600, 800)  # pixels, height by width


@dataclass(frozen=True)
class TowerCosts:
    """A tower, and a picture of PICTURE pixels."""

    parameters: int
    bytes: int  # of its weights
    patches: int  # of the picture
    tokens: int  # rows of the language model
    operations: int  # multiplications and additions of the linears and of attention
    milliseconds: float | None  # at the rate of the tower; None where that is not known

    def to_json(self) -> dict[str, Any]:
        """One object with stable keys."""
        return {"picture": list(PICTURE), **asdict(self)}


def tower_costs(
    spec: VisionSpec, program: Program, stored: Mapping[str, int], arch: Arch | None, chip: Chip
) -> TowerCosts:
    """Cost the tower whose pass is ``program``; ``stored``: bytes of each weight."""
    patches = picture_patches(spec)
    count = operations(program, patches)
    return TowerCosts(
        parameters=sum(prod(weight.shape) for weight in program.weights.values()),
        bytes=sum(stored[name] for name in program.weights),
        patches=patches,
        tokens=patches // spec.patches.merge**2,
        operations=count,
        milliseconds=None if arch is None else 1e3 * count / arch.tower.per_second(chip),
    )


def picture_patches(spec: VisionSpec) -> int:
    """Patches of a picture of PICTURE pixels."""
    height, width = target_size(*PICTURE, spec.patches)
    return height * width // spec.patches.patch**2


def operations(program: Program, patches: int) -> int:
    """Multiplications and additions of one frame: of every weight of a linear with every row, of attention."""
    rows, count = dict.fromkeys(program.inputs, patches), 0
    for op in program.ops:
        rows[op.output] = op.rows(rows[op.inputs[0]])
        if isinstance(op, Linear):
            count += 2 * rows[op.output] * prod(program.weights[op.weight].shape)
        elif isinstance(op, FrameAttend):
            count += 4 * patches**2 * op.heads * op.head_dim
    return count
