"""What the loop asks of a grammar: drafts to go along, which tokens may follow them, and how long to wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
"""One flag for each token id: whether it may come next."""

Packed = npt.NDArray[np.uint32]
"""The same in ceil(V / 32) words: bit t % 32 of word t // 32 is token t, bits past the last token are 0."""

Ask = Callable[[int, Packed | None], int | None]
"""Row and its mask: the token that the row chooses under it; None: no more drafts are wanted."""


class Constraint(Protocol):
    """A grammar standing behind the tokens that were committed. Not thread-safe.

    A mask is a function of the tokens before it alone. Masks are read-only, and stay as they are until the ``advance``
    after the next one. Every method may raise Interrupted, and RequestError when the grammar cannot go on at this
    point: plain decoding fails there, too.
    """

    def walk(self, free: Sequence[int], ask: Ask) -> list[int]:
        """Drafts that the grammar allows, made from the ``free`` ones; fewer where it ends or becomes too complex.

        A draft that is refused is replaced by what is forced there, or else by what ``ask`` gives.
        """
        ...

    def masks(self, drafts: Sequence[int]) -> list[Packed | None]:
        """Tokens that may come next, and behind each draft; None where every one may.

        Fewer than drafts + 1, but at least one, where the grammar becomes too complex on the way. The drafts are those
        that the last ``walk`` gave, the first of them, or none.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Go on behind tokens that were committed. RequestError, here or at the next call, for one not allowed."""
        ...


class Interrupted(Exception):
    """Waiting for a grammar was given up: no answer is wanted any more."""

    def __init__(self, reason: Literal["deadline", "cancelled"]) -> None:
        super().__init__(reason)
        self.reason = reason


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Patience:
    """How long somebody waits for a grammar."""

    deadline: float | None = None  # time.perf_counter()
    cancelled: Callable[[], bool] = _never

    def check(self) -> None:
        """Raise Interrupted when it is over."""
        if self.cancelled():
            raise Interrupted("cancelled")
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise Interrupted("deadline")


ENDLESS = Patience()


def pack(mask: Mask) -> Packed:
    """Words of flags [V]."""
    words = np.zeros((len(mask) + 31) // 32, "<u4")
    little = np.packbits(mask, bitorder="little")
    words.view(np.uint8)[: len(little)] = little
    return words.astype(np.uint32, copy=False)


def unpack(words: Packed, count: int) -> Mask:
    """The first ``count`` flags of words."""
    little = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(little, count=count, bitorder="little").view(np.bool_)
