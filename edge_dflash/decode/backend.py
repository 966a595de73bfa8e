"""The one seam to the hardware: what the loop asks of a backend.

A backend holds one loaded pair and the state of one sequence in each of its lanes. State is optimistic: a pass writes
rows past the committed length, and ``commit(k)`` makes the first k of them real. Rolling back is not committing.

Between two cycles the tokens that were delivered are the committed rows and one more: the anchor, the last of them, has
no row yet. It is the first row of the next verify. A commit makes its row real, and those of the tokens that the cycle
delivers, but the last, which is the next anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from edge_dflash.decode.sampling import GREEDY, Packed, Sampling
from edge_dflash.decode.shape import PairShape
from edge_dflash.decode.tree import Parents
from edge_dflash.errors import BackendError
from edge_dflash.pictures.pictured import Picture, Seen, Sight
from edge_dflash.weights.formats import KvFormat


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

    def logits(self) -> npt.NDArray[np.float32]:
        """Return logits [rows, V] as float32."""


@runtime_checkable
class Confident(Protocol):
    """What a drafter's rows may add: how sure it is of each draft."""

    def confidence(self) -> list[float]:
        """From 0 to 1 for each row, by the tokens chosen last; empty where the drafter does not say."""


class Steering(Protocol):
    """What the host decides of a cycle between its passes: a grammar's part, or acceptance that is relaxed."""

    @property
    def tolerant(self) -> bool:
        """Whether drafts may stand that differ from the choices (lossy): the target's logits are read for them."""

    def drafts(self, rows: Rows, position: int) -> list[int]:
        """Tokens to verify, made of the drafter's ``rows``, which draft for ``position``, ...; at most as many."""

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """Tokens that may be chosen after the anchor and after each draft; None: every one may.

        Fewer than drafts + 1 where the path ends: no draft beyond can be accepted. Asked while the verify pass runs.
        """

    def tolerated(self, rows: Rows, drafts: Sequence[int], choices: Sequence[int]) -> list[bool]:
        """For each draft, whether it may stand although the choice is another; empty when none may."""


@dataclass(frozen=True)
class Snapshot:
    """State of both models after ``length`` committed rows, flushed. Arrays by name; dtypes are the backend's own."""

    length: int
    arrays: Mapping[str, npt.NDArray[Any]]
    delta: int = 0  # position minus index of the token after them; not 0 after an image

    def check_like(self, wanted: Mapping[str, npt.NDArray[Any]]) -> None:
        """Raise BackendError unless its arrays have the names, shapes and dtypes of those ``wanted``."""
        if wanted.keys() != self.arrays.keys():
            differing = sorted(wanted.keys() ^ self.arrays.keys())
            raise BackendError(f"the snapshot is of another pair: states differ in {', '.join(differing[:3])}")
        for name, own in wanted.items():
            array = self.arrays[name]
            if (array.shape, array.dtype) != (own.shape, own.dtype):
                raise BackendError(
                    f"the snapshot's {name} is {array.dtype} {array.shape}, this pair stores {own.dtype} {own.shape}"
                )

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

    def on_host(self) -> Cycle:
        """Itself, with logits (and log-probabilities, if it gives them) that stay when another pass follows."""
        if self.logits is None:
            return self
        logits = self.logits()
        if self.logprobs is None:
            return replace(self, logits=lambda: logits)
        logprobs = self.logprobs()
        return replace(self, logits=lambda: logits, logprobs=lambda: logprobs)


@dataclass(frozen=True)
class Asked:
    """What one cycle is asked: from which token, and how its tokens are chosen."""

    anchor: int  # the token delivered last: its row is the first of the verify pass
    sampling: Sampling = GREEDY
    steering: Steering | None = None  # None: logits and sampling alone choose
    drafts: int | None = None  # most drafts that are verified; None: all; 0: one plain token, a verify of one row
    logits: bool = False  # whether the Cycle gives its logits, and the log-probabilities of its tokens
    _: KW_ONLY
    threshold: float = 0.0  # drafts from the first on whose confidence is below are not verified; 0: all are
    known: Sequence[int] = ()  # verified in place of drafts where ``drafts`` is 0; steering says that they stand
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

    def length(self, lane: int = 0) -> int:
        """Number of committed rows: of all delivered tokens but the anchor."""

    def reset(self, lane: int = 0) -> None:
        """Forget the sequence: length 0."""

    def see(self, picture: Picture) -> Seen:
        """Run the vision tower over one picture, the same rows bit for bit each time. Touches no lane.

        Raises BackendError when the target has no tower.
        """

    def prefill(self, ids: Sequence[int], lane: int = 0, sight: Sight | None = None) -> Rows:
        """Append ids (at least one) at ``length``, commit them and return the last row's logits (one row).

        ``sight``: the rows' positions on the target's axes, and those whose embeddings images replace; None: text,
        at the lane's delta (0 until an image came). The delta is part of a lane's state, and verify passes use it; the
        drafter's positions are the index. Raises BackendError when ``length + len(ids)`` exceeds ``max_context``.
        """

    def cycle(self, asked: Asked) -> Cycle:
        """Propose from the anchor, verify, accept; ``commit`` follows, of as many rows as there are tokens, or fewer.

        Accepted are the drafts that equal the target's choices. Steering replaces drafts and masks choices on the way.
        :func:`~edge_dflash.decode.cycle.host_cycle` is this for a backend that has the passes alone.
        """

    def cycles(self, asked: Sequence[Asked]) -> list[Outcome]:
        """A cycle of each of several lanes, all different: every pass runs once, over the rows of all.

        A lane finds what :meth:`cycle` finds, whoever else is there. Interrupted or RequestError of a lane's steering
        stand in its place and touch no other; any other error is raised, and ends the cycles of all.
        """

    def copy(self, source: int, target: int) -> None:
        """Give lane ``target`` the state of ``source``, which is flushed."""

    def propose(self, anchor: int, lane: int = 0) -> Rows:
        """Draft: one drafter pass over [anchor, mask x (B-1)]; row i of K is the draft for position length + 1 + i.

        Its scratch lies where a verify has put the drafter's context, so an open verify is dropped: it cannot be
        committed any more. Raises BackendError without a drafter.
        """

    def verify(self, ids: Sequence[int], lane: int = 0, parents: Parents | None = None) -> Rows:
        """Run 1..K + 1 rows at positions length, length + 1, ...; row r is the choice for position length + r + 1.

        ``parents``: the row that each row follows, -1 for row 0; then a row's position is length + its depth. None: the
        chain, in which row r follows row r - 1. Replaces the rows of an earlier verify that were not committed. Raises
        BackendError for another tree where the backend verifies chains alone.
        """

    def commit(self, rows: int, lane: int = 0, path: Sequence[int] | None = None) -> None:
        """Make ``rows`` rows of the last verify real (0 <= rows <= rows verified); at most once a verify.

        They are the first ones of ``path``: row 0, one that follows it, one that follows that one, ...; None: of the
        chain 0, 1, 2, ... Raises BackendError for rows that do not follow each other.
        """

    def flush(self, lane: int = 0) -> None:
        """Replay pending rows into the recurrent state, so that state bytes are those after ``length`` tokens."""

    def snapshot(self, lane: int = 0) -> Snapshot:
        """Flush, then copy the state of both models."""

    def restore(self, snapshot: Snapshot, lane: int = 0) -> None:
        """Replace the state. Raises BackendError when the snapshot is of another pair."""

    def close(self) -> None:
        """Release the device."""


def no_tower() -> BackendError:
    """What seeing raises without a tower."""
    return BackendError("this target has no vision tower; leave images out, or build it from a checkpoint with one")


def replaced() -> BackendError:
    """What rows raise when a later pass has taken their place."""
    return BackendError("these rows were replaced by a later pass; read them before it")


def no_drafter() -> BackendError:
    """What a propose pass of a pair without a drafter raises."""
    return BackendError("the bundle has no drafter and proposes nothing; decode plainly, or build it with a drafter")
