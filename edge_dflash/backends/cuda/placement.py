"""Where the tensors of a pass lie in one arena: memory of a tensor is used again when its last reader has run.

Kernels may start early but touch nothing but weights before all earlier ones have ended, so reuse by the order of the
steps is safe.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.backends.cuda.memory import aligned
from edge_dflash.backends.cuda.schedule import Schedule

PADDING = 16  # elements: rows start on 32 bytes, whatever the columns


@dataclass(frozen=True)
class Place:
    """A tensor with memory of its own: bytes from the arena's start, elements between rows."""

    offset: int
    stride: int
    nbytes: int


def place(plan: Schedule, rows: int) -> tuple[dict[str, Place], int]:
    """Places of all tensors with memory of their own, for passes of ``rows`` (as allocated), and the arena's size."""
    lives = _lives(plan)
    places: dict[str, Place] = {}
    size = 0
    for name in sorted(lives, key=lambda n: lives[n]):
        stride = -(-plan.columns[name] // PADDING) * PADDING
        nbytes = aligned(2 * rows * stride)
        taken = sorted(
            (p.offset, p.offset + p.nbytes) for other, p in places.items() if _meet(lives[name], lives[other])
        )
        offset = 0
        for first, stop in taken:
            if offset + nbytes <= first:
                break
            offset = max(offset, stop)
        places[name] = Place(offset, stride, nbytes)
        size = max(size, offset + nbytes)
    return places, size


def _lives(plan: Schedule) -> dict[str, tuple[int, int]]:
    """First and last step that touches each tensor; logits lie elsewhere."""
    lives: dict[str, tuple[int, int]] = {}
    logits = plan.program.outputs.get("logits")
    for index, step in enumerate(plan.steps):
        for name in (*step.reads, *step.writes):
            root, _ = plan.place(name)
            if root != logits:
                first, _ = lives.get(root, (index, index))
                lives[root] = (first, index)
    return lives


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]
