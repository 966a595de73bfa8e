"""Bytes of Programs by arithmetic: weights in a storage format, keys and values, gated-delta state, scratch.

Pure functions of :mod:`edge_dflash.model.program`; nothing here knows a model, a board or a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from edge_dflash.model.ops import Attend, Linear, SelectRows
from edge_dflash.model.program import DeltaState, KvState, PairPrograms, Program, State, WeightSpec

WeightFormat = Literal["bf16", "f32", "fp8", "nvfp4", "tied"]  # tied: lm_head is read from the wide embedding
KvFormat = Literal["float32", "bfloat16", "fp8"]  # as in backends.base.Precision

KV_BYTES: Mapping[KvFormat, int] = {"fp8": 1, "bfloat16": 2, "float32": 4}
ACTIVATION_BYTES = 2  # BF16
LOGIT_BYTES = 4  # logits leave a pass as FP32


@dataclass(frozen=True)
class CycleBytes:
    """Bytes that one cycle moves between memory and processor, with some number of tokens committed."""

    target_weights: int  # verify: every target weight, lm_head included, embedding excluded
    drafter_weights: int  # fc, context K/V, block: every drafter weight once
    drafter_lm_head: int  # the target's head, read again for the drafts
    drafter_kv_projections: int  # read a second time: once for the context rows, once for the block
    embedding_rows: int  # gather: B rows each for verify and propose
    delta_state: int  # S and conv history of all layers, read and written
    tape: int  # B rows written by verify, B rows read by the next replay
    target_kv: int  # context rows read, B rows written
    drafter_kv: int  # visible context rows read, B rows written


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes resident while a pair is loaded, without operating system, driver context and libraries."""

    target_weights: int
    drafter_weights: int
    embedding: int  # wide rows for the gather
    target_kv: int  # max_context rows
    drafter_kv: int  # max_context rows
    delta_state: int  # one slot
    tape: int  # B rows
    scratch: int  # peak of tensors alive in a prefill chunk or a block


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


def cycle_bytes(programs: PairPrograms, read: Mapping[str, int], block: int, context: int, kv: KvFormat) -> CycleBytes:
    """Cost of a propose and a verify pass of ``block`` rows; ``read`` is the bytes that one read of a weight costs."""
    states = programs.verify.states.values()
    both = programs.verify.weights.keys() & programs.propose.weights.keys()
    shared = sum(read[name] for name in both if name.startswith("drafter."))
    context_rows, block_rows = (_sum(read, p, "drafter.") for p in (programs.verify, programs.propose))
    target_kv, drafter_kv = (
        kv_read_bytes(p, context, kv) + block * kv_bytes_per_token(_attended(p), kv)
        for p in (programs.verify, programs.propose)
    )
    tables = [(w, read[n]) for n, w in programs.verify.weights.items() if w.kind == "embedding"]
    return CycleBytes(
        target_weights=_sum(read, programs.verify, "target."),
        drafter_weights=context_rows + block_rows - shared,
        drafter_lm_head=_sum(read, programs.propose, "target."),
        drafter_kv_projections=shared,
        embedding_rows=2 * block * sum(size // weight.shape[0] for weight, size in tables),
        delta_state=2 * delta_bytes(states),
        tape=2 * block * tape_bytes_per_row(states),
        target_kv=target_kv,
        drafter_kv=drafter_kv,
    )


def memory_bytes(
    programs: PairPrograms, stored: Mapping[str, int], block: int, max_context: int, chunk: int, kv: KvFormat
) -> MemoryBytes:
    """Resident bytes; ``stored`` is the bytes of each weight that has storage of its own."""
    states = programs.states.values()
    target_kv, drafter_kv = (
        max_context * kv_bytes_per_token(_attended(p), kv) for p in (programs.verify, programs.propose)
    )
    passes = ((programs.prefill, min(chunk, max_context)), (programs.verify, block), (programs.propose, block))
    return MemoryBytes(
        target_weights=_sum(stored, programs.verify, "target."),
        drafter_weights=sum(size for name, size in stored.items() if name.startswith("drafter.")),
        embedding=sum(size for name, size in stored.items() if programs.weights[name].kind == "embedding"),
        target_kv=target_kv,
        drafter_kv=drafter_kv,
        delta_state=delta_bytes(states),
        tape=block * tape_bytes_per_row(states),
        scratch=max(scratch_bytes(program, rows) for program, rows in passes),
    )


def _attended(program: Program) -> list[State]:
    """The KV states that a pass attends over: the target's in verify, the drafter's in propose."""
    return [program.states[op.state] for op in program.ops if isinstance(op, Attend)]


def _sum(size: Mapping[str, int], program: Program, prefix: str) -> int:
    """Bytes of a pass's weights under ``prefix``. The embedding is not read as a matrix, only gathered from."""
    weights = program.weights.items()
    return sum(size.get(n, 0) for n, w in weights if n.startswith(prefix) and w.kind != "embedding")


def row_parameters(program: Program) -> int:
    """Weights that each row of a pass is multiplied with: linears, but for those of selected rows (the head)."""
    selected: set[str] = set()
    total = 0
    for op in program.ops:
        if isinstance(op, SelectRows) or selected & set(op.inputs):
            selected.add(op.output)
        elif isinstance(op, Linear):
            total += prod(program.weights[op.weight].shape)
    return total


def scratch_bytes(program: Program, rows: int) -> int:
    """Peak bytes of the tensors alive at once in a pass of ``rows`` rows, each freed after its last use."""
    last_use: dict[str, int] = {}
    for index, op in enumerate(program.ops):
        for tensor in (op.output, *op.inputs):
            last_use[tensor] = index
    for tensor in program.outputs.values():
        last_use[tensor] = len(program.ops)
    size: dict[str, int] = {}
    counts = {"ids": rows}
    live = peak = 0
    for index, op in enumerate(program.ops):
        counts[op.output] = op.rows(counts[op.inputs[0]])
        width = LOGIT_BYTES if op.output == program.outputs.get("logits") else ACTIVATION_BYTES
        size[op.output] = counts[op.output] * program.columns[op.output] * width
        live += size[op.output]
        peak = max(peak, live)
        live -= sum(size.pop(t) for t in {op.output, *op.inputs} if last_use[t] == index and t in size)
    return peak
