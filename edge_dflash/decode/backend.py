"""The one seam to the hardware: what the loop asks of a backend.

A backend holds one loaded pair and the state of one sequence in each of its lanes. State is optimistic: a pass writes
rows past the committed length, and ``commit(k)`` makes the first k of them real. Rolling back is not committing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from edge_dflash.decode.pictured import Picture, Seen, Sight
from edge_dflash.decode.sampling import GREEDY, Packed, Sampling
from edge_dflash.decode.tree import Parents
from edge_dflash.errors import BackendError
from edge_dflash.model.specs import PairSpec, PatchSpec
from edge_dflash.weights.formats import KvFormat

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


@dataclass(frozen=True)
class Precision:
    """Arithmetic of a loaded pair besides its weights."""

    activations: Literal["float32", "bfloat16"] = "bfloat16"  # rounding of every op's output
    kv: KvFormat = "fp8"  # storage of keys and values


class Rows(Protocol):
    """Logits of the rows of one pass, left on the device until they are asked for."""

    def __len__(self) -> int: ...

    def argmax(self) -> list[int]:
        """Return the id of the largest logit of each row; the lowest id on a tie."""
        ...

    def logits(self) -> npt.NDArray[np.float32]:
        """Return logits [rows, V] as float32."""
        ...


@runtime_checkable
class Confident(Protocol):
    """What a drafter's rows may add: how sure it is of each draft."""

    def confidence(self) -> list[float]:
        """From 0 to 1 for each row, by the tokens chosen last; empty where the drafter does not say."""
        ...


class Steering(Protocol):
    """What the host decides of a cycle between its passes: a grammar's part, or acceptance that is relaxed."""

    @property
    def tolerant(self) -> bool:
        """Whether drafts may stand that differ from the choices (lossy): the target's logits are read for them."""
        ...

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """Tokens to verify, made of the drafter's ``rows``, which draft for ``position``, ...; at most as many."""
        ...

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """Tokens that may be chosen after the anchor and after each draft; None: every one may.

        Fewer than drafts + 1 where the path ends: no draft beyond can be accepted. Asked while the verify pass runs.
        """
        ...

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """For each draft, whether it may stand although the choice is another; empty when none may."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """State of both models after ``length`` committed rows, flushed. Arrays by name; dtypes are the backend's own."""

    length: int
    arrays: Mapping[str, npt.NDArray[Any]]
    delta: int = 0  # position minus index of the token after them; not 0 after an image

    def frozen(self) -> Snapshot:
        """Protect its arrays: the snapshot will be shared."""
        for array in self.arrays.values():
            array.flags.writeable = False
        return self


@dataclass(frozen=True)
class Cycle:
    """What one propose-verify-accept found."""

    tokens: tuple[int, ...]  # accepted drafts and the target's own choice after them
    accepted: int  # drafts among them
    drafts: int  # that were verified
    propose_seconds: float  # 0 in plain decoding; on the device's clock, if it ran there whole
    verify_seconds: float
    relaxed: tuple[bool, ...] = ()  # for each accepted draft, whether only relaxed acceptance let it stand
    path: tuple[int, ...] | None = (
        None  # verified rows, one a token, that commit makes real; None: the chain 0, 1, 2, ...
    )
    # The target's logits [tokens, V], float32: row r is the distribution of token r. Until the next pass, if asked for.
    logits: Callable[[], npt.NDArray[np.float32]] | None = None
    # Natural logarithm of each token's probability by those logits, to 1e-5; None: a backend leaves that to its caller.
    logprobs: Callable[[], list[float]] | None = None


@dataclass(frozen=True)
class Asked:
    """What one cycle is asked: from which token, and how its tokens are chosen."""

    anchor: int  # the last committed token: its row is the first of the verify pass
    sampling: Sampling = GREEDY
    steering: Steering | None = None  # None: logits and sampling alone choose
    drafts: int | None = None  # most drafts that are verified; None: all; 0: one plain token, a verify of one row
    logits: bool = False  # whether the Cycle gives its logits, and the log-probabilities of its tokens
    _: KW_ONLY
    threshold: float = 0.0  # drafts from the first on whose confidence is below are not verified; 0: all are
    lane: int = 0

    @property
    def drafting(self) -> bool:
        """Whether the drafter is asked at all."""
        return self.drafts != 0


Outcome: TypeAlias = Cycle | BaseException
"""What became of one lane's cycle: what it found, or what ended it; then nothing is to be committed."""


class Backend(Protocol):
    """One target and drafter, loaded, with the state of a sequence in each lane. Not thread-safe.

    Every method raises BackendError for a lane that is not one of ``shape.lanes``.
    """

    @property
    def shape(self) -> PairShape:
        """Sizes of the loaded pair."""
        ...

    def length(self, lane: int = 0) -> int:
        """Number of committed rows."""
        ...

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence: length 0."""
        ...

    def see(self, picture: Picture) -> Seen:
        """Run the vision tower over one picture, the same rows bit for bit each time. Touches no lane.

        Raises BackendError when the target has no tower.
        """
        ...

    def prefill(self, ids: Sequence[int], lane: int = 0, sight: Sight | None = None) -> Rows:
        """Append ids (at least one) at ``length``, commit them and return the last row's logits (one row).

        ``sight``: the rows' positions on the target's axes, and those whose embeddings images replace; None: text,
        at the lane's delta (0 until an image came). The delta is part of a lane's state, and verify passes use it; the
        drafter's positions are the index. Raises BackendError when ``length + len(ids)`` exceeds ``max_context``.
        """
        ...

    def cycle(self, asked: Asked) -> Cycle:
        """Propose from the anchor, verify, accept; ``commit`` follows, of as many rows as there are tokens, or fewer.

        Accepted are the drafts that equal the target's choices. Steering replaces drafts and masks choices on the way.
        :func:`~edge_dflash.decode.cycle.host_cycle` is this for a backend that has the passes alone.
        """
        ...

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """A cycle of each of several lanes, all different: every pass runs once, over the rows of all.

        A lane finds what :meth:`cycle` finds, whoever else is there. Interrupted or RequestError of a lane's steering
        stand in its place and touch no other; any other error is raised, and ends the cycles of all.
        """
        ...

    def copy(self, source: int, target: int) -> None:
        """Give lane ``target`` the state of ``source``, which is flushed."""
        ...

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """Draft: one drafter pass over [anchor, mask x (B-1)]; row i of K is the draft for position length + 1 + i.

        Its scratch lies where a verify has put the drafter's context, so an open verify is dropped: it cannot be
        committed any more. Raises BackendError without a drafter.
        """
        ...

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> Rows:
        """Run 1..K + 1 rows at positions length, length + 1, ...; row r is the choice for position length + r + 1.

        ``parents``: the row that each row follows, -1 for row 0; then a row's position is length + its depth. None: the
        chain, in which row r follows row r - 1. Replaces the rows of an earlier verify that were not committed. Raises
        BackendError for another tree where the backend verifies chains alone.
        """
        ...

    def commit(self, rows: int, lane: int = 0, path: Sequence[int] | None = None) -> None:
        """Make ``rows`` rows of the last verify real (0 <= rows <= rows verified); at most once a verify.

        They are the first ones of ``path``: row 0, one that follows it, one that follows that one, ...; None: of the
        chain 0, 1, 2, ... Raises BackendError for rows that do not follow each other.
        """
        ...

    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state, so that state bytes are those after ``length`` tokens."""
        ...

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Flush, then copy the state of both models."""
        ...

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state. Raises BackendError when the snapshot is of another pair."""
        ...

    def close(self) -> None:
        """Release the device."""
        ...


def no_tower() -> BackendError:
    """What seeing raises without a tower."""
    return BackendError("this target has no vision tower; leave images out, or build it from a checkpoint with one")


def no_drafter() -> BackendError:
    """What a propose pass of a pair without a drafter raises."""
    return BackendError("the bundle has no drafter and proposes nothing; decode plainly, or build it with a drafter")


def check_lane(shape: PairShape, lane: int) -> None:
    """Raise BackendError for a lane that the backend does not have."""
    if not 0 <= lane < shape.lanes:
        raise BackendError(f"lane {lane} is outside the {shape.lanes} of this backend; give one from 0 on")
