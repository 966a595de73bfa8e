"""What a native backend refuses before it touches the device. Knows sizes only."""

from __future__ import annotations

from collections.abc import Sequence

from edge_dflash.decode.backend import PairShape
from edge_dflash.errors import BackendError


def check_ids(shape: PairShape, ids: Sequence[int]) -> None:
    """Raise BackendError for an id that no row of the embedding belongs to; ``ids`` has at least one."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= shape.vocab_size:
        odd = low if low < 0 else high
        raise BackendError(f"token id {odd} is outside the vocabulary of {shape.vocab_size}")


def check_prompt(shape: PairShape, length: int, ids: Sequence[int]) -> None:
    """Raise BackendError unless ``ids``, at least one, can be appended behind ``length`` rows."""
    if not ids or length + len(ids) > shape.max_context:
        raise BackendError(
            f"cannot prefill {len(ids)} tokens at {length}: the context holds {shape.max_context} tokens"
        )
    check_ids(shape, ids)


def check_room(shape: PairShape, length: int, rows: int) -> None:
    """Raise BackendError unless ``rows`` rows fit behind ``length``."""
    if length + rows > shape.max_context:
        raise BackendError(f"rows {length}..{length + rows - 1} do not fit the context of {shape.max_context} tokens")
