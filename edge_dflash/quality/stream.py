"""What a pass of the target over whole sequences is made of, and weights that are read for it one matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, Experts, Op, SelectRows
from edge_dflash.model.program import Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Weight, WeightStore, WideWeight
from edge_dflash.weights.quantize import dequantize, row_chunks, wide_tensor
from edge_dflash.weights.safetensors import forget_pages

HEAD = "target.lm_head"
_PARTS = {"self_attn": "attention", "linear_attn": "gated_delta", "mlp": "mlp"}


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
        units: dict[str, frozenset[str]] = {}
        for op in self.program.ops:
            for name in op.weights:
                _, _, layer, block, *_ = (*name.split("."), "", "")
                if block in _PARTS:
                    unit = f"layers.{layer}.{'experts' if isinstance(op, Experts) else _PARTS[block]}"
                    units[unit] = units.get(unit, frozenset()) | {name}
            if isinstance(op, Attend):
                units[op.state.removeprefix("target.")] = frozenset([op.state])
        return units | {"lm_head": frozenset([HEAD])}

    @cached_property
    def weights(self) -> frozenset[str]:
        """All weights."""
        return frozenset(name for op in self.program.ops for name in op.weights) | {HEAD}


def part(unit: str) -> str:
    """The kind of a unit: attention, gated_delta, mlp, experts, kv or lm_head."""
    return unit.rpartition(".")[2]


def values_of(weight: Weight) -> torch.Tensor:
    """Float32 values on the device of the context; the mapped pages that they were read from are forgotten."""
    with torch.device("cpu"):
        values = dequantize(weight)
    for array in vars(weight).values():
        if isinstance(array, np.ndarray):
            forget_pages(array)
    return values.to(torch.get_default_device())


def same(one: Weight, other: Weight) -> bool:
    """Whether two weights of one shape have the same values in one format; compared by some rows at a time."""
    chunks = row_chunks(one.shape[0], prod(one.shape[1:]))
    return type(one) is type(other) and all(
        torch.equal(values_of(one.rows(rows)), values_of(other.rows(rows))) for rows in chunks
    )


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
        return wide_tensor(weight)[ids.cpu()].float().to(torch.get_default_device())
