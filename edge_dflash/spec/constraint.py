"""What the loop asks of a grammar: which tokens may follow, along a path that can be walked forth and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
"""One flag for each token id: whether it may come next."""

Packed = npt.NDArray[np.uint32]
"""The same in ceil(V / 32) words: bit t % 32 of word t // 32 is token t, bits past the last token are 0."""


class Constraint(Protocol):
    """A grammar standing behind the tokens that were pushed so far. Not thread-safe."""

    def allowed(self) -> Mask | None:
        """Tokens that may come next, [V]; None when every token may. At least one is allowed."""
        ...

    def push(self, token: int) -> bool:
        """Step over a token. False, and no step, when it is not allowed."""
        ...

    def pop(self, count: int) -> None:
        """Step back over the last ``count`` tokens."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Tokens that must come next, in order; empty when there is a choice."""
        ...


def packed(constraint: Constraint) -> Packed | None:
    """Tokens that may come next, as words; None when every token may. Not written to later.

    A constraint may have them as such: its ``packed()``.
    """
    if (own := getattr(constraint, "packed", None)) is not None:
        words: Packed | None = own()
        return words
    mask = constraint.allowed()
    return None if mask is None else pack(mask)


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
