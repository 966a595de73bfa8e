"""What the loop asks of a grammar: which tokens may follow, along a path that can be walked forth and back."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
"""One flag for each token id: whether it may come next."""


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
