"""Bytes that the passes of a cycle have to move, and operations of a prefill: the other half of every ratio.

Counts what the native kernels read: weights in streaming form with their scales, keys and values, recurrent state and
tape. Activations stay in caches and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from edge_dflash.checks.footprint import kv_bytes_per_token, kv_read_bytes
from edge_dflash.model.ops import Attend, KvAppend, Linear, StateOp
from edge_dflash.model.program import DeltaState, KvState, PairPrograms, Program
from edge_dflash.weights.formats import KvFormat, WeightFormat
from edge_dflash.weights.layout import UNIT_ROWS
from edge_dflash.weights.stacks import program_stacks


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass."""

    weights: Mapping[str, int]  # by format, row scales included
    embedding: int  # gathered rows
    kv: int  # keys and values, read and written
    state: int  # recurrent state and convolution history, read and written
    tape: int  # rows of the replay tape, read and written

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.weights.values()) + self.embedding + self.kv + self.state + self.tape


@dataclass(frozen=True)
class Costs:
    """What decides the bytes of a pair's passes."""

    programs: PairPrograms
    formats: Mapping[str, WeightFormat]
    kv: KvFormat
    block: int

    def propose(self, context: int) -> Traffic:
        """A propose pass at ``context`` committed tokens."""
        return self._pass(self.programs.propose, context, self.block, 0)

    def verify(self, context: int, pending: int, rows: int | None = None) -> Traffic:
        """A verify pass of ``rows`` (a block) that first replays ``pending`` rows; 0 leaves the state unwritten."""
        return self._pass(self.programs.verify, context, rows or self.block, pending)

    def prefill_operations(self, tokens: int) -> int:
        """Multiplications and additions of the linears and of attention for a prompt of ``tokens``.

        The head runs on one row. Attention counts the visible half of the scores and of the weighted sums.
        """
        program, total = self.programs.prefill, 0
        for op in program.ops:
            if isinstance(op, Linear):
                rows = 1 if op.output == program.outputs["logits"] else tokens
                total += 2 * rows * prod(program.weights[op.weight].shape)
            elif isinstance(op, Attend):
                total += 4 * op.heads * op.head_dim * tokens * (tokens + 1) // 2
        return total

    def _pass(self, program: Program, context: int, rows: int, pending: int) -> Traffic:
        written = [program.states[op.state] for op in _state_ops(program) if isinstance(op, Attend | KvAppend)]
        deltas = [state for state in program.states.values() if isinstance(state, DeltaState)]
        tables = [spec.shape[1] for spec in program.weights.values() if spec.kind == "embedding"]
        times = 2 if pending else 1
        return Traffic(
            weights=_weights(program, self.formats),
            embedding=2 * rows * sum(tables),
            kv=kv_read_bytes(program, context, self.kv) + rows * kv_bytes_per_token(_kv(written), self.kv),
            state=sum(times * state.state_bytes + 2 * state.conv_bytes for state in deltas),
            tape=(rows + pending) * sum(state.tape_bytes_per_row for state in deltas),
        )


def _state_ops(program: Program) -> Iterable[StateOp]:
    return (op for op in program.ops if isinstance(op, StateOp))


def _kv(states: Iterable[object]) -> list[KvState]:
    return [state for state in states if isinstance(state, KvState)]


def _weights(program: Program, formats: Mapping[str, WeightFormat]) -> dict[str, int]:
    found: dict[str, int] = {}
    for stack in program_stacks(program, formats):
        layout = stack.layout
        found[layout.format] = found.get(layout.format, 0) + layout.nbytes + 4 * UNIT_ROWS * layout.units
    return found
