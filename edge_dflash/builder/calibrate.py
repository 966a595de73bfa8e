"""Scales of FP8 keys and values and of NVFP4 activations, from the largest values that a calibration text produces.

One prefill pass of the reference interpreter over all tokens, then a few propose passes, because a drafter block's own
keys and values share the context's scales. Each weight is converted when its op runs and dropped after it, the
embedding is gathered for the ids in use only and nothing behind the last measured op runs: peak memory is a layer's
weights and activations. Activations stay wide while they are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BuildError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, Embed, KvAppend, Linear, Op
from edge_dflash.model.program import KvState, Program
from edge_dflash.model.specs import PairSpec
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, Weight, WeightStore, WideWeight
from edge_dflash.weights.quantize import E4M3_MAX, GLOBAL_DIVISOR

PROPOSALS = 4  # propose passes, spread over the context
Progress = Callable[[int, int], None]  # (linear layers done, linear layers in all)


@dataclass(frozen=True)
class Scales:
    """Multipliers, exact in float32. KV states that are not listed have (1.0, 1.0)."""

    kv: Mapping[str, tuple[float, float]]  # (k, v) by KV state
    inputs: Mapping[str, float]  # sx by canonical name of a W4A4 linear
    tokens: int  # tokens they were measured on; 0: not measured


def calibrate(
    pair: PairSpec,
    store: WeightStore,
    ids: Sequence[int],
    *,
    margin: float = 1.25,
    linears: Collection[str] = (),
    proposals: int = PROPOSALS,
    activations: Literal["float32", "bfloat16"] = "bfloat16",
    progress: Progress | None = None,
) -> Scales:
    """Measure the scales of every KV state, and of the inputs of ``linears``, on one sequence of ``ids``.

    KV: scale = margin * max|x| / 448 of K after norm and rotation and of V. Linears: sx = max|x| / 2688 (ModelOpt), or
    the scale that the checkpoint stores with the weight. A tensor of zeros gets 1. Raises BuildError when there are no
    ids, an id is outside the vocabulary, or a measured value is not finite.
    """
    vocabulary = pair.target.vocab_size
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        found = f"ids {min(ids)}..{max(ids)}" if ids else "no token ids"
        raise BuildError(
            f"calibration got {found}, wanted ids 0..{vocabulary - 1}: give the checkpoint's own tokenizer"
        )
    programs, block = pair_programs(pair), pair.drafter.block(ids[0]) if pair.drafter else []
    meter = _Meter(frozenset(linears), progress)
    prefill, propose = (_measured_part(p, meter.linears) for p in (programs.prefill, programs.propose))
    starts = sorted({max(0, math.ceil(len(ids) * i / proposals) - 1) for i in range(1, proposals + 1)}, reverse=True)
    starts = starts if block else []
    meter.total = _linears(prefill) + len(starts) * _linears(propose)

    rows = _EmbeddingRows(store, [op.weight for op in prefill.ops if isinstance(op, Embed)], [*ids, *block])
    precision = Precision(activations, kv=activations)
    interpreter = Interpreter(TorchWeights(rows, cache=False), precision, row_tile=None)
    memory = Memory.allocate(programs.states, len(ids) + len(block), precision, rows.kv_scale)
    interpreter.run(prefill, rows.compact(ids), memory, observer=meter)
    for start in starts:  # from the end, since a block overwrites the context rows behind its start
        memory.length = start
        interpreter.run(propose, rows.compact([ids[start], *block[1:]]), memory, observer=meter)

    states = [name for name, state in programs.states.items() if isinstance(state, KvState)]
    kv = {
        name: (meter.scale(name + ".k", margin / E4M3_MAX), meter.scale(name + ".v", margin / E4M3_MAX))
        for name in states
    }
    measured = {name: meter.scale(name, 1 / GLOBAL_DIVISOR) for name in sorted(linears)}
    inputs = {name: _stored_scale(store, name) or scale for name, scale in measured.items()}
    return Scales(kv, inputs, len(ids))


class _Meter:
    """Observer that keeps the largest magnitude of each measured tensor."""

    def __init__(self, linears: frozenset[str], progress: Progress | None) -> None:
        self.linears, self.total = linears, 0
        self._amax: dict[str, float] = {}
        self._done, self._progress = 0, progress

    def __call__(self, op: Op, role: str, values: torch.Tensor) -> None:
        if isinstance(op, Linear):
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self.total)
            if op.weight in self.linears:
                self._measure(op.weight, values)
        elif isinstance(op, Attend | KvAppend):
            self._measure(f"{op.state}.{role}", values)

    def _measure(self, name: str, values: torch.Tensor) -> None:
        amax = float(values.abs().max())
        if not math.isfinite(amax):
            raise BuildError(f"calibration found {amax} in {name}: the checkpoint's weights are damaged or unsuitable")
        self._amax[name] = max(amax, self._amax.get(name, 0.0))

    def scale(self, name: str, factor: float) -> float:
        """amax * factor in float32; 1.0 when only zeros were seen."""
        if name not in self._amax:
            raise BuildError(f"calibration did not reach {name}: it is no tensor of this pair")
        return float(np.float32(self._amax[name] * factor)) or 1.0


class _EmbeddingRows:
    """A store whose embedding holds only the rows in use, by ascending id, and whose activations stay wide."""

    def __init__(self, store: WeightStore, embeddings: Collection[str], ids: Sequence[int]) -> None:
        self._store, self._embeddings = store, embeddings
        self._used = np.unique(np.asarray(ids))

    def compact(self, ids: Sequence[int]) -> list[int]:
        """Rows of the gathered embedding for ``ids``."""
        return [int(row) for row in np.searchsorted(self._used, ids)]

    def get(self, name: str) -> Weight:
        """Return a weight for measuring."""
        weight = self._store.get(name)
        match weight:
            case WideWeight() if name in self._embeddings:
                return WideWeight(weight.data[self._used])
            case Fp8Weight() | Nvfp4Weight():
                return replace(weight, input_scale=None)
            case _:
                return weight

    def kv_scale(self, state: str) -> tuple[float, float]:
        """Scales of the underlying store."""
        return self._store.kv_scale(state)


def _measured_part(program: Program, linears: Collection[str]) -> Program:
    """Return the program up to its last op that is measured."""
    measured = [
        i
        for i, op in enumerate(program.ops)
        if isinstance(op, Attend | KvAppend) or (isinstance(op, Linear) and op.weight in linears)
    ]
    last = max(measured, default=-1)
    return replace(program, ops=program.ops[: last + 1], outputs={})


def _linears(program: Program) -> int:
    return sum(isinstance(op, Linear) for op in program.ops)


def _stored_scale(store: WeightStore, name: str) -> float | None:
    weight = store.get(name)
    return weight.input_scale if isinstance(weight, Nvfp4Weight) else None
