"""A Program run in torch: one function per op, tensors by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from edge_dflash.backends.reference.attention import KvMemory, attend, rope_table, store_context
from edge_dflash.backends.reference.delta import DeltaMemory, DeltaWeights, gated_delta
from edge_dflash.backends.reference.dense import ROW_TILE, TorchWeights, dense, pad, padded_rows
from edge_dflash.backends.reference.experts import Notes, experts
from edge_dflash.backends.reference.tower import picture_table, with_pictures
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BackendError
from edge_dflash.model.ops import Attend, Concat, Embed, Experts, GatedDelta, KvAppend, Linear, Op, SelectRows
from edge_dflash.model.program import KvState, Program, State
from edge_dflash.model.specs import RopeSpec
from edge_dflash.pictures.pictured import Sight
from edge_dflash.weights.formats import KV_BYTES

Observer = Callable[[Op, str, torch.Tensor], None]
"""Called with (op, role, values): role "x" for the input of a Linear or Experts, "k"/"v" for the rows that a KV state
stores, those of :func:`~edge_dflash.backends.reference.experts.experts` for each tile of rows."""


_MOVES = (Embed, Concat, SelectRows)  # ops that only move values


@dataclass
class Memory:
    """Everything that outlives a pass, for one sequence."""

    kv: dict[str, KvMemory]
    delta: dict[str, DeltaMemory]
    capacity: int
    length: int = 0
    offset: int = 0  # position minus index of the target's text behind the length
    _ropes: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        states: Mapping[str, State],
        capacity: int,
        precision: Precision,
        kv_scale: Callable[[str], tuple[float, float]],
    ) -> Memory:
        """Allocate every state for ``capacity`` rows; ``kv_scale`` gives the FP8 scales (k, v) of a KV state.

        Raises BackendError when this machine cannot hold them.
        """
        width = KV_BYTES[precision.kv]
        row = sum(2 * width * s.kv_heads * s.head_dim for s in states.values() if isinstance(s, KvState))
        if (needed := capacity * row) > (held := os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")):
            raise BackendError(
                f"keys and values of {capacity} tokens need {needed / 1e9:,.1f} GB, this machine has "
                f"{held / 1e9:,.1f} GB; build with a smaller --max-context"
            )
        kv = {n: KvMemory(s, capacity, precision, kv_scale(n)) for n, s in states.items() if isinstance(s, KvState)}
        delta = {n: DeltaMemory(s) for n, s in states.items() if not isinstance(s, KvState)}
        return cls(kv, delta, capacity)

    def clear(self) -> None:
        """Forget the sequence: zeros, as allocated."""
        self.length = self.offset = 0
        for kv in self.kv.values():
            for stored in kv.stored:
                stored.zero_()
        for delta in self.delta.values():
            delta.clear()

    def rope(
        self, spec: RopeSpec, start: int, rows: int, sight: Sight | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cos and sin of ``rows`` rows from index ``start``; positions past the capacity belong to padding rows.

        Only a target that sees has positions that are not the index: those of ``sight``, or ``offset`` from it.
        """
        if spec not in self._ropes:
            self._ropes[spec] = rope_table(spec, self.capacity + ROW_TILE)
        cos, sin = self._ropes[spec]
        if spec.mrope_section is not None:
            if sight is not None:
                cos, sin = (picture_table(spec, table, sight.positions) for table in (cos, sin))
                return pad(cos, rows), pad(sin, rows)
            start += self.offset
        return pad(cos[start : start + rows], rows), pad(sin[start : start + rows], rows)


@dataclass
class _Pass:
    """One run of a Program: its tensors (padded) and how many rows of each are valid."""

    start: int
    commits: bool
    tensors: dict[str, torch.Tensor]
    valid: dict[str, int]
    sight: Sight | None


class Interpreter:
    """Runs Programs over one set of weights."""

    def __init__(self, weights: TorchWeights, precision: Precision) -> None:
        self._weights = weights
        self._round = precision.activations == "bfloat16"

    @torch.inference_mode()
    def run(
        self,
        program: Program,
        ids: Sequence[int],
        memory: Memory,
        want: Collection[str] = (),
        observer: Observer | None = None,
        sight: Sight | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run ``program`` on ids at memory.length, ... and return its outputs by role, plus ``want`` by name.

        ``sight``: positions of the rows, and rows of pictures in the place of their embeddings. Tensors are float32
        [valid rows, columns]. State is written as the Program says; the length is the caller's.
        """
        rows = len(ids)
        padded = pad(torch.tensor(ids, dtype=torch.int64), padded_rows(rows))
        run = _Pass(memory.length, program.commits, {"ids": padded}, {"ids": rows}, sight)
        for op, freed in zip(program.ops, program.freed, strict=True):
            if observer is not None and isinstance(op, Linear | Experts):
                observer(op, "x", run.tensors[op.inputs[0]][: run.valid[op.inputs[0]]])
            value, valid = self._execute(op, run, memory, observer)
            run.tensors[op.output] = value if isinstance(op, _MOVES) else self._kept(value)
            run.valid[op.output] = valid
            for name in freed:
                if name not in want:
                    del run.tensors[name]
        found = {role: run.tensors[name][: run.valid[name]] for role, name in program.outputs.items()}
        return found | {name: run.tensors[name][: run.valid[name]] for name in want}

    def step(self, op: Op, inputs: Sequence[torch.Tensor], memory: Memory) -> torch.Tensor:
        """One op alone, unrounded, on tensors [rows, columns] of the next rows of a sequence, which it commits."""
        rows = len(inputs[0])
        tensors = {name: pad(one, padded_rows(rows)) for name, one in zip(op.inputs, inputs, strict=True)}
        run = _Pass(memory.length, True, tensors, dict.fromkeys(op.inputs, rows), None)
        return self._execute(op, run, memory, None)[0][:rows]

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        """What is left of values where activations are kept."""
        return value.bfloat16().float() if self._round else value

    def _execute(self, op: Op, run: _Pass, memory: Memory, observer: Observer | None) -> tuple[torch.Tensor, int]:
        """Result and number of valid rows of one op."""
        inputs = tuple(run.tensors[name] for name in op.inputs)
        rows = run.valid[op.inputs[0]]
        weights = self._weights
        match op:
            case Embed():
                x = dense(op, inputs, weights)
                return x if run.sight is None else with_pictures(x, run.sight), rows
            case SelectRows():
                first, last = (rows - 1, rows) if op.which == "last" else (1, rows)
                return pad(inputs[0][first:last], padded_rows(last - first)), last - first
            case Experts():
                notes: Notes = partial(observer, op) if observer else lambda role, values: None
                return experts(op, inputs[0], rows, weights, self._kept, notes), rows
            case KvAppend() | Attend():
                return self._attention(op, inputs, rows, run, memory, observer), rows
            case GatedDelta():
                held = memory.delta[op.state]
                return gated_delta(op, self.delta_weights(op), held, inputs, rows, commits=run.commits), rows
            case _:
                return dense(op, inputs, weights), rows

    def _attention(
        self,
        op: KvAppend | Attend,
        inputs: tuple[torch.Tensor, ...],
        rows: int,
        run: _Pass,
        memory: Memory,
        observer: Observer | None,
    ) -> torch.Tensor:
        kv, tensor = memory.kv[op.state], self._weights.tensor
        table = memory.rope(op.rope, run.start, inputs[0].shape[0], run.sight)
        k, v = store_context(op, inputs[-2], inputs[-1], tensor(op.k_norm), table, kv, run.start, rows)
        if observer is not None:
            observer(op, "k", k)
            observer(op, "v", v)
        if isinstance(op, KvAppend):
            return inputs[0].new_zeros(inputs[0].shape[0], 0)
        return attend(op, inputs[0], tensor(op.q_norm), table, kv, run.start, rows)

    def delta_weights(self, op: GatedDelta) -> DeltaWeights:
        """Parameters of a gated delta op."""
        tensor = self._weights.tensor
        return DeltaWeights(tensor(op.conv).flatten(1), tensor(op.a_log), tensor(op.dt_bias), tensor(op.norm))
