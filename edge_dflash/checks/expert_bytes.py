"""Bytes of a mixture of experts by arithmetic: how many experts the rows of a pass read, and what those take.

A pass reads each expert that one of its rows chose once. Where rows choose uniformly and independently, T rows with k
choices of E read E (1 - (1 - k/E)^T) on average. Rows of one text choose more alike: this is an upper bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from edge_dflash.model.experts import Experts
from edge_dflash.model.program import Program
from edge_dflash.weights.formats import WeightFormat
from edge_dflash.weights.layout import UNIT_ROWS, Layout
from edge_dflash.weights.stacks import STREAMED


def distinct(op: Experts, rows: int) -> float:
    """Experts that ``rows`` uniform and independent rows read."""
    count = len(op.gates)
    return count * (1.0 - (1.0 - op.top_k / count) ** rows)


def expert_layers(program: Program) -> tuple[Experts, ...]:
    """All mixtures of a pass, one a layer."""
    return tuple(op for op in program.ops if isinstance(op, Experts))


def routed(op: Experts) -> tuple[str, ...]:
    """Weights of the experts that rows choose: neither router nor shared expert."""
    return (*op.gates, *op.ups, *op.downs)


def routed_bytes(program: Program, size: Mapping[str, int], rows: int, counted: float | None = None) -> int:
    """Bytes that ``rows`` rows read of routed experts; ``counted``: experts a layer, else as by :func:`distinct`."""
    total = 0.0
    for op in expert_layers(program):
        read = distinct(op, rows) if counted is None else counted
        total += read / len(op.gates) * sum(size[name] for name in routed(op))
    return round(total)


def streamed_bytes(program: Program, formats: Mapping[str, WeightFormat]) -> dict[str, int]:
    """Bytes that the native kernels read of each weight of experts and routers, row scales included."""
    found: dict[str, int] = {}
    for op in expert_layers(program):
        shared = op.shared
        mlps = [*zip(op.gates, op.ups, op.downs, strict=True)]
        for gate, up, down in (*mlps, *([(shared.gate, shared.up, shared.down)] if shared else [])):
            rows, k = program.weights[gate].shape
            both = _streamed(Layout(STREAMED[formats[gate]], (rows, rows), k, swiglu=True))
            found |= {gate: both // 2, up: both // 2}
            found[down] = _streamed(Layout(STREAMED[formats[down]], (k,), rows))
        for name in (op.router, *([shared.judge] if shared else [])):
            found[name] = 2 * prod(program.weights[name].shape)
    return found


def expert_weights(program: Program, op: Experts) -> int:
    """Weights of one expert."""
    return sum(prod(program.weights[name].shape) for name in routed(op)) // len(op.gates)


def row_weights(program: Program, op: Experts) -> int:
    """Weights that each row is multiplied with."""
    weights = program.weights
    always = (op.router, *(op.shared.weights if op.shared else ()))
    return op.top_k * expert_weights(program, op) + sum(prod(weights[name].shape) for name in always)


def scratch_of_row(program: Program, op: Experts) -> int:
    """Bytes of one row between an op's kernels: FP32 outputs of its experts, slices of the shared one among them."""
    hidden, inner = program.weights[op.downs[0]].shape
    shared = program.weights[op.shared.down].shape[1] // inner if op.shared else 0
    return 4 * hidden * (op.top_k + shared)


def _streamed(layout: Layout) -> int:
    return layout.nbytes + 4 * layout.units * UNIT_ROWS
