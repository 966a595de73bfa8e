"""Cuts a Program at its state ops: segments of dense ops, each followed by the state ops that wait for it.

An op's level is the number of state ops on the longest path to it. Dense ops of one level form a segment; they depend
on nothing but earlier levels and each other, so a segment may become one TensorRT plan or any sequence of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_dflash.model.ops import DenseOp, Op, StateOp
from edge_dflash.model.program import Program


@dataclass(frozen=True)
class Segment:
    """Dense ops of one level, then the state ops of that level, each in the Program's order."""

    dense: tuple[DenseOp, ...]
    state: tuple[StateOp, ...]

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, in an order in which they may run."""
        return (*self.dense, *self.state)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Tensors that the dense ops read and do not make, in order of first use."""
        made = {op.output for op in self.dense}
        read = dict.fromkeys(name for op in self.dense for name in op.inputs)
        return tuple(name for name in read if name not in made)


def segments(program: Program) -> tuple[Segment, ...]:
    """Segments of a pass in the order in which they run. Every op of the Program is in exactly one."""
    after = {"ids": 0}  # level at which a tensor is there
    dense: dict[int, list[DenseOp]] = {}
    state: dict[int, list[StateOp]] = {}
    for op in program.ops:
        level = max(after[name] for name in op.inputs)
        if isinstance(op, StateOp):
            state.setdefault(level, []).append(op)
            after[op.output] = level + 1
        elif isinstance(op, DenseOp):
            dense.setdefault(level, []).append(op)
            after[op.output] = level
        else:
            raise TypeError(f"{program.name}: {type(op).__name__} is neither a dense nor a state op")
    levels = sorted(dense.keys() | state.keys())
    return tuple(Segment(tuple(dense.get(level, ())), tuple(state.get(level, ()))) for level in levels)


def outputs(program: Program) -> tuple[tuple[str, ...], ...]:
    """For each of the :func:`segments`, tensors of its dense ops that something else reads or that are results."""
    parts = segments(program)
    results = set(program.outputs.values())
    wanted = []
    for index, segment in enumerate(parts):
        outside = {name for other in (*parts[:index], *parts[index + 1 :]) for op in other.dense for name in op.inputs}
        outside |= {name for other in parts for op in other.state for name in op.inputs} | results
        wanted.append(tuple(op.output for op in segment.dense if op.output in outside))
    return tuple(wanted)
