"""Sizes of a loaded pair, and the numbers of lanes and of rows that are worth a graph and a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from edge_dflash.errors import BackendError
from edge_dflash.model.specs import PairSpec, PatchSpec

MOST_LANES = 8


@dataclass(frozen=True)
class PairShape:
    """Sizes of a loaded pair, as the loop needs them."""

    vocab_size: int
    block_size: int  # B: rows of a propose pass; 1 without a drafter
    mask_token_id: int | None  # None without a drafter
    max_context: int  # rows of every KV state
    prefill_chunk: int  # most rows of one prefill pass
    drafts: int  # K: most drafts of a cycle; 0 without a drafter
    lanes: int = 1  # sequences whose state is held at once; each has a lane, counted from 0
    varying: bool = False  # whether a verify's tokens say what it reads, and so what rows cost: a target with experts
    image_token_id: int | None = None  # placeholder of an image's rows in a prompt; None: the target has no tower
    patches: PatchSpec | None = None  # how images become what its tower reads

    @classmethod
    def of(cls, pair: PairSpec, max_context: int, prefill_chunk: int, lanes: int = 1) -> PairShape:
        """Sizes of a pair. Raises BackendError for a number of lanes that no backend has."""
        if not 1 <= lanes <= MOST_LANES:
            raise BackendError(f"lanes is {lanes}; give 1 to {MOST_LANES} sequences at once")
        vocabulary, block = pair.target.vocab_size, pair.block_size
        sizes = (vocabulary, block, pair.mask_token_id, max_context, prefill_chunk, pair.drafts)
        made = cls(*sizes, lanes, varying=pair.target.experts is not None)
        if (vision := pair.target.vision) is None:
            return made
        return replace(made, image_token_id=vision.image_token_id, patches=vision.patches)

    @classmethod
    def told(cls, card: Mapping[str, int]) -> PairShape:
        """Sizes as a server tells them; one that does not tell the drafts has those of DFlash."""
        drafts: dict[str, Any] = {"drafts": card["block_size"] - 1}
        return cls(**drafts | {one.name: card[one.name] for one in fields(cls) if one.name in card})

    @property
    def verify_rows(self) -> int:
        """Most rows of a verify pass: the anchor and K drafts."""
        return self.drafts + 1

    @property
    def usable_context(self) -> int:
        """Most tokens a sequence may hold: the last block and the last verify pass must fit after it."""
        return self.max_context - max(self.block_size, self.verify_rows)


def lane_steps(most: int) -> tuple[int, ...]:
    """Numbers of lanes that are worth a graph and a measurement: powers of two up to ``most``, and that."""
    return (*(lanes for lanes in (1, 2, 4) if lanes < most), most)


ROW_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def row_steps(most: int) -> tuple[int, ...]:
    """Numbers of rows of a verify that are worth a graph and a measurement, up to ``most``: ROW_STEPS and the most."""
    return (*(rows for rows in ROW_STEPS if rows < most), most)


def nearest(known: Iterable[int], wanted: int) -> int:
    """The smallest known number that is not below ``wanted``, else the largest."""
    return min(known, key=lambda one: (one < wanted, abs(one - wanted)))


def check_lane(shape: PairShape, lane: int) -> None:
    """Raise BackendError for a lane that the backend does not have."""
    if not 0 <= lane < shape.lanes:
        raise BackendError(f"lane {lane} is outside the {shape.lanes} of this backend; give one from 0 on")
