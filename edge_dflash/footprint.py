"""Bytes of a Program by arithmetic: weights in a storage format, keys and values, gated-delta state, scratch.

Pure functions of :mod:`edge_dflash.graph.program`; nothing here knows a model, a board or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal

from edge_dflash.graph.ops import Attend, Concat, Embed, GatedDelta, KvAppend, Linear, Op, SelectRows
from edge_dflash.graph.program import DeltaState, KvState, Program, State, WeightSpec

WeightFormat = Literal["bf16", "f32", "fp8", "nvfp4", "tied"]  # tied: lm_head is read from the wide embedding
KvFormat = Literal["bf16", "fp8"]

KV_BYTES: Mapping[KvFormat, int] = {"fp8": 1, "bf16": 2}
ACTIVATION_BYTES = 2  # BF16
LOGIT_BYTES = 4  # logits leave a pass as FP32


def weight_bytes(spec: WeightSpec, form: WeightFormat) -> int:
    """Bytes that one read of a weight [out, in] costs.

    bf16, tied: 2 a value. f32: 4. fp8: 1 a value and one FP32 scale per output channel. nvfp4: half a byte a value, one
    E4M3 scale per 16 values of a row, one FP32 scale per tensor.
    """
    values = prod(spec.shape)
    if form == "nvfp4":
        return values // 2 + values // 16 + 4
    if form == "fp8":
        return values + 4 * spec.shape[0]
    return values * (4 if form == "f32" else 2)


def kv_bytes_per_token(states: Iterable[State], kv: KvFormat) -> int:
    """Bytes of keys and values that one committed token adds to the KV states among ``states``."""
    return KV_BYTES[kv] * sum(state.values_per_token for state in states if isinstance(state, KvState))


def kv_read_bytes(program: Program, context: int, kv: KvFormat) -> int:
    """Bytes of committed keys and values that one pass at ``context`` committed tokens must read.

    A layer with a window S reads the S - 1 rows that its first row sees; every other layer reads all rows.
    """
    total = 0
    for op in program.ops:
        if isinstance(op, Attend):
            rows = context if op.window is None else min(context, op.window - 1)
            total += rows * kv_bytes_per_token((program.states[op.state],), kv)
    return total


def delta_bytes(states: Iterable[State]) -> int:
    """Bytes of one copy of the recurrent state: S in FP32 and the conv history in BF16, over all layers."""
    return sum(state.state_bytes + state.conv_bytes for state in states if isinstance(state, DeltaState))


def tape_bytes_per_row(states: Iterable[State]) -> int:
    """Bytes of one row of the replay tape over all layers."""
    return sum(state.tape_bytes_per_row for state in states if isinstance(state, DeltaState))


def scratch_bytes(program: Program, rows: int) -> int:
    """Peak bytes of the tensors alive at once in a pass of ``rows`` rows, each freed after its last use."""
    last_use: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for tensor in (op.output, *op.inputs):
            last_use[tensor] = index
    for tensor in program.outputs.values():
        last_use[tensor] = len(program.ops)
    size: dict[str, int] = {}
    shape: dict[str, tuple[int, int]] = {"ids": (rows, 1)}
    live = peak = 0
    for index, op in enumerate(program.ops):
        shape[op.output] = _shape(op, shape, program)
        size[op.output] = prod(shape[op.output]) * (
            LOGIT_BYTES if op.output == program.outputs.get("logits") else ACTIVATION_BYTES
        )
        live += size[op.output]
        peak = max(peak, live)
        live -= sum(size.pop(t) for t in {op.output, *op.inputs} if last_use[t] == index and t in size)
    return peak


def _shape(op: Op, shape: Mapping[str, tuple[int, int]], program: Program) -> tuple[int, int]:
    """(rows, columns) of an op's output."""
    rows, columns = shape[op.inputs[0]]
    if isinstance(op, Linear):
        return rows, program.weights[op.weight].shape[0]
    if isinstance(op, Embed):
        return rows, program.weights[op.weight].shape[1]
    if isinstance(op, Concat):
        return rows, sum(shape[t][1] for t in op.inputs)
    if isinstance(op, SelectRows):
        return (1 if op.which == "last" else rows - 1), columns
    if isinstance(op, KvAppend):
        return rows, 0
    if isinstance(op, Attend):
        return rows, op.heads * op.head_dim
    if isinstance(op, GatedDelta):
        return rows, op.value_heads * op.value_dim
    return rows, columns
