"""Which tensors of a pass lie in the order in which kernels/linear_hopper.cu multiplies them (kernels/blocks.cuh).

Such a tensor is copied to shared memory as it lies. Everybody who writes it knows the order, and nobody but linears of
one window reads it; all others lie in rows. A Matrix in blocks has a row stride below 0: minus the window. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from edge_dflash.backends.cuda.schedule import Schedule
from edge_dflash.backends.cuda.steps import Convolve, Gather, Head, Mix, Multiply, Normalise, PassStep, Project, State
from edge_dflash.model.ops import GatedDelta
from edge_dflash.weights.stacks import Stack

BLOCK_K = 64  # columns of a block


def strides_of_blocks(schedule: Schedule, window: Callable[[Stack], int]) -> dict[str, int]:
    """Row strides of the root tensors in blocks. ``window``: of the order that a stack's kernel reads; 0: rows."""
    ways: dict[str, set[int]] = {}  # windows that readers want; 0 of everybody who knows rows only
    written: set[str] = set()

    def see(name: str, way: int) -> str:
        root, column = schedule.place(name)
        whole = column == 0 and schedule.widths[name] == schedule.columns[root]
        ways.setdefault(root, set()).add(way if whole else 0)
        return root

    for step in schedule.steps:
        x, free = _forms(step, window)
        for i, name in enumerate(step.reads):
            see(name, 0 if i else x)
        for name in step.writes:
            if name == free:
                written.add(see(name, -1))
            else:
                see(name, 0)
    kept = {*schedule.program.outputs.values(), *schedule.single}
    found = {}
    for root in written - {schedule.place(name)[0] for name in kept}:
        windows = ways[root] - {-1}
        if len(windows) == 1 and 0 not in windows and schedule.columns[root] % BLOCK_K == 0:
            found[root] = -windows.pop()
    return found


def _forms(step: PassStep, window: Callable[[Stack], int]) -> tuple[int, str | None]:
    """The window in which a step wants its first tensor, and the tensor that it writes in any order."""
    match step:
        case Multiply() if step.stack.layout.swiglu:
            x = window(step.stack)
            return x, step.writes[0] if x else None
        case Multiply() | Head():
            return window(step.stack), None
        case Project():
            return window(step.stack), step.writes[1] if step.norm else None
        case Mix():
            return 0, step.writes[1] if step.norm else None
        case Gather():
            return 0, step.writes[1] if step.norm else None
        case Convolve():
            return 0, step.writes[1] if step.norm else step.writes[0] if len(step.reads) == 2 else None
        case Normalise():
            return 0, step.writes[0]
        case State() if isinstance(step.op, GatedDelta):
            return 0, step.writes[0] if step.writes else None
        case _:
            return 0, None
