"""The target over whole sequences, with some of its weights and KV caches replaced: all variants in lockstep, op by op.

Every weight is read once, and one matrix at a time is in memory. A variant equals the source up to the first op that
changes it and is forked there; state ops see whole sequences, so that each has its memory for one op alone. Activations
are float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from edge_dflash.backends.reference.attention import KvMemory, attend, rope_table, store_context
from edge_dflash.backends.reference.delta import DeltaMemory, DeltaWeights, gated_delta
from edge_dflash.backends.reference.dense import TorchWeights, dense, pad, padded_rows
from edge_dflash.backends.reference.experts import experts
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import CheckpointError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, Embed, Experts, GatedDelta, Linear, Op, SelectRows
from edge_dflash.model.program import KvState, Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import KvFormat, Weight, WeightStore, WideWeight
from edge_dflash.weights.quantize import dequantize, row_chunks
from edge_dflash.weights.safetensors import forget_pages

SOURCE, HEAD = "source", "target.lm_head"
_PARTS = {"self_attn": "attention", "linear_attn": "gated_delta", "mlp": "mlp"}
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """The source with something of another store in its place."""

    taken: frozenset[str]  # weights and KV states
    rows: int  # of the sequences end to end, from the first: those that it is run on


@dataclass(frozen=True)
class Passes:
    """What the target's pass over sequences is made of, up to what its head reads."""

    program: Program

    @classmethod
    def of(cls, pair: PairSpec) -> Passes:
        """The prefill pass of the target alone, in which every row reaches the last norm."""
        program, ops = pair_programs(replace(pair.text_only, drafter=None)).prefill, list[Op]()
        renamed: dict[str, str] = {}
        for op in program.ops[:-1]:  # the last one is the head
            if isinstance(op, SelectRows):
                renamed[op.output] = op.inputs[0]
            else:
                ops.append(replace(op, inputs=tuple(renamed.get(name, name) for name in op.inputs)))
        return cls(replace(program, ops=tuple(ops), outputs={"hidden": ops[-1].output}))

    @cached_property
    def units(self) -> Mapping[str, frozenset[str]]:
        """Weights or KV states of each unit: "layers.3.mlp", "layers.3.kv", "lm_head", ..., in the order of use.

        Norms and the embedding are in none.
        """
        units: dict[str, set[str]] = {}
        for op in self.program.ops:
            for name in op.weights:
                if (unit := _unit(name, op)) is not None:
                    units.setdefault(unit, set()).add(name)
            if isinstance(op, Attend):
                units.setdefault(op.state.removeprefix("target."), set()).add(op.state)
        return {unit: frozenset(names) for unit, names in units.items()} | {"lm_head": frozenset([HEAD])}

    @cached_property
    def weights(self) -> frozenset[str]:
        """All weights."""
        return frozenset(name for op in self.program.ops for name in op.weights) | {HEAD}


def part(unit: str) -> str:
    """The kind of a unit: attention, gated_delta, mlp, experts, kv or lm_head."""
    return unit.rpartition(".")[2]


def _unit(name: str, op: Op) -> str | None:
    words = name.split(".")
    if len(words) < 4 or words[3] not in _PARTS:
        return None
    return f"layers.{words[2]}.{'experts' if isinstance(op, Experts) else _PARTS[words[3]]}"


def values_of(weight: Weight) -> torch.Tensor:
    """Float32 values on the device of the context; the mapped pages that they were read from are forgotten."""
    with torch.device("cpu"):
        values = dequantize(weight)
    for array in vars(weight).values():
        if isinstance(array, np.ndarray):
            forget_pages(array)
    return values.to(torch.get_default_device())


class Values(TorchWeights):
    """Float32 values of a store's weights on the device of the context, read anew each time."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store, cache=False, row_tile=None)
        self.get = store.get

    def tensor(self, name: str) -> torch.Tensor:
        """See TorchWeights."""
        return values_of(self.get(name))

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """See TorchWeights; wide inputs whatever the weight says."""
        return F.linear(x, self.tensor(name))

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows [ids, H] of an embedding."""
        weight = self.get(name)
        assert isinstance(weight, WideWeight), f"{name} is quantized"
        gathered = WideWeight(weight.data[ids.cpu().numpy()]).float32()
        return torch.from_numpy(gathered).to(torch.get_default_device())


class Stream:
    """All variants over sequences. ``rows``: tensors by variant and name, [the variant's rows, columns] each."""

    def __init__(
        self,
        passes: Passes,
        stores: tuple[WeightStore, WeightStore],
        kv: KvFormat,
        sequences: Sequence[Sequence[int]],
        variants: Mapping[str, Variant],
    ) -> None:
        """``stores``: the source and the other one, whose KV cache is of the format ``kv``."""
        self._program, self._kv, self._variants = passes.program, kv, variants
        self._values = tuple(map(Values, stores))
        self._scales = stores[1].kv_scale
        self._lengths = [len(ids) for ids in sequences]
        self.rows: dict[str, Tensors] = {SOURCE: {"ids": torch.tensor([one for ids in sequences for one in ids])}}

    def run(self, first: int, after: Callable[[int], None]) -> None:
        """Run the ops from ``first`` on; ``after`` is told how many are done. Raises CheckpointError for NaN."""
        ops = self._program.ops
        for index in range(first, len(ops)):
            self._step(ops[index])
            for own in self.rows.values():
                for name in self._program.freed[index]:
                    own.pop(name, None)
            after(index + 1)

    def hidden(self, variant: str) -> torch.Tensor:
        """What the head reads, [the variant's rows, H]; the source's where nothing before the head differs."""
        own = self.rows.get(variant)
        rows = self.rows[SOURCE] if own is None else own
        found = rows[self._program.outputs["hidden"]]
        return found if variant == SOURCE else found[: self._variants[variant].rows]

    def heads(self) -> tuple[Weight, Weight]:
        """The head of the source, and the other one."""
        return self._values[0].get(HEAD), self._values[1].get(HEAD)

    def _step(self, op: Op) -> None:
        differs: bool | None = None
        readers: tuple[list[str], list[str]] = ([SOURCE], [])
        for name, variant in self._variants.items():
            takes = not variant.taken.isdisjoint(op.weights)
            if takes and differs is None:
                differs = self._differs(op)
            takes = takes and bool(differs)
            if name not in self.rows and (takes or self._own_kv(op, variant)):
                self.rows[name] = {key: rows[: variant.rows] for key, rows in self.rows[SOURCE].items()}
            if name in self.rows:
                readers[takes].append(name)
        for values, names in zip(self._values, readers, strict=True):
            if names:
                self._run(op, values, names)

    def _own_kv(self, op: Op, variant: Variant) -> bool:
        return isinstance(op, Attend) and op.state in variant.taken and self._kv != "float32"

    def _differs(self, op: Op) -> bool:
        """Whether a weight of the op has other values in the other store."""
        one, other = self._values
        if isinstance(op, Embed):
            ids = torch.from_numpy(np.unique(self.rows[SOURCE][op.inputs[0]].cpu().numpy()))
            return not torch.equal(one.rows(op.weight, ids), other.rows(op.weight, ids))
        return any(not same(one.get(name), other.get(name)) for name in op.weights)

    def _run(self, op: Op, values: Values, names: Sequence[str]) -> None:
        """One op for the variants that read these values."""
        inputs = [[self.rows[name][key] for key in op.inputs] for name in names]
        if isinstance(op, Attend | GatedDelta):
            found = [self._state_op(op, values, name, own) for name, own in zip(names, inputs, strict=True)]
        elif isinstance(op, Linear | Experts):  # each matrix is read once
            sizes = [len(own[0]) for own in inputs]
            x = torch.cat([own[0] for own in inputs])
            found = list(torch.split(self._matrices(op, values, x), sizes))
        elif isinstance(op, Embed):
            found = [values.rows(op.weight, own[0]) for own in inputs]
        else:
            found = [dense(op, own, values) for own in inputs]
        for name, rows in zip(names, found, strict=True):
            if not bool(torch.isfinite(rows.sum())):
                raise CheckpointError(
                    f"{op.output} is not finite with the weights of "
                    f"{'the source' if values is self._values[0] else 'the bundle'}: NaN, infinity or too large values "
                    "in them or before; download the checkpoint again, or build the bundle again"
                )
            self.rows[name][op.output] = rows

    @staticmethod
    def _matrices(op: Linear | Experts, values: Values, x: torch.Tensor) -> torch.Tensor:
        if isinstance(op, Linear):
            return values.linear(x, op.weight)
        return experts(op, x, len(x), values, lambda rounded: rounded)

    def _state_op(
        self, op: Attend | GatedDelta, values: Values, name: str, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A state op over each sequence, from an empty state."""
        kv: KvFormat = self._kv if name != SOURCE and self._own_kv(op, self._variants[name]) else "float32"
        state, parts, first = self._program.states[op.state], list[torch.Tensor](), 0
        weights = {name: values.tensor(name) for name in op.weights}
        for length in self._lengths:
            part = [rows[first : first + length] for rows in inputs]
            first += length
            if not (rows := len(part[0])):
                break
            padded = tuple(pad(one, padded_rows(rows)) for one in part)
            if isinstance(op, GatedDelta):
                assert not isinstance(state, KvState)
                delta = DeltaWeights(
                    weights[op.conv].flatten(1), weights[op.a_log], weights[op.dt_bias], weights[op.norm]
                )
                found = gated_delta(op, delta, DeltaMemory(state), padded, rows, commits=True)
            else:
                assert isinstance(state, KvState)
                memory = KvMemory(state, rows, Precision("float32", kv), self._scales(op.state))
                table = rope_table(op.rope, padded_rows(rows))
                store_context(op, padded[1], padded[2], weights[op.k_norm], table, memory, 0, rows)
                found = attend(op, padded[0], weights[op.q_norm], table, memory, 0, rows)
            parts.append(found[:rows])
        return torch.cat(parts)


def same(one: Weight, other: Weight) -> bool:
    """Whether two weights of one shape have the same codes and scales, or the same wide values."""
    if type(one) is not type(other):
        return False
    columns = one.shape[-1] if len(one.shape) == 2 else 1
    return all(
        np.array_equal(mine, its)
        for rows in row_chunks(one.shape[0], columns)
        for mine, its in zip(_arrays(one.rows(rows)), _arrays(other.rows(rows)), strict=True)
    )


def _arrays(weight: Weight) -> list[Any]:
    if isinstance(weight, WideWeight):
        return [weight.float32()]
    return [array for _, array in weight.parts().values()]
