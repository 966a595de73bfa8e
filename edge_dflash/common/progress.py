"""How work that takes seconds or minutes tells how far it is. How that is shown is the caller's affair."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[str, int, int], None]  # (stage, done, total); total 0: begun, its length is not known

# Stages of a bundle that is opened; those of a build are named where they begin.
CHECKING, LOADING, SELF_TEST = "checking files", "loading", "self-test"
IN_BYTES = frozenset(
    {"weights", "checking", CHECKING}
)  # stages that count bytes; of others only the share has a meaning


def unheard(stage: str, done: int, total: int) -> None:
    """The progress when nobody listens."""
