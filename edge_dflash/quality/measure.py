"""Weights measured against their source over whole sequences: all variants in lockstep, op by op.

Every weight is read once, and one matrix at a time is in memory. A variant equals the source up to the first op that
changes it and is forked there; state ops see whole sequences, so that each has its memory for one op alone. Activations
are float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_dflash.backends.reference.dense import dense
from edge_dflash.backends.reference.experts import experts
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.bundle.parts import Tensor, tensor_file, write_file
from edge_dflash.checks.footprint import row_weights
from edge_dflash.common.files import is_there
from edge_dflash.common.progress import Progress, Stage, unheard
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import CheckpointError
from edge_dflash.model.ops import Attend, Embed, Experts, GatedDelta, Linear, Op, StateOp
from edge_dflash.quality.compare import Compared, Side, compare
from edge_dflash.quality.stream import HEAD, Passes, Values, Variant, part, same
from edge_dflash.weights.formats import KvFormat, WeightStore
from edge_dflash.weights.safetensors import TensorFiles

ALL, WEIGHTS, KV, PARTS, UNITS = "all", "weights", "kv", "parts/", "units/"  # names of variants, and their beginnings
SOURCE = "source"
LEAST_UNIT_TOKENS = 16
STATE = "state.safetensors"
_REST = 1 << 30  # bytes of libraries, of slices of heads and their logits, and of mapped files
_LAYER = ".input_layernorm"  # what the first op of a layer reads


@dataclass(frozen=True)
class Stores:
    """What is compared, and how their memory is given back after each layer."""

    source: WeightStore
    other: WeightStore
    kv: KvFormat = "float32"  # of the other's KV cache; float32: it is not looked at
    release: Callable[[], None] = lambda: None


def all_variants(passes: Passes, kv: KvFormat, tokens: int) -> dict[str, Variant]:
    """Everything, weights and KV cache alone, each part, on all tokens; each unit on as many as cost the same again."""
    units = {name: names for name, names in passes.units.items() if kv != "float32" or part(name) != KV}
    groups = {ALL: passes.weights, WEIGHTS: passes.weights}
    for name, names in units.items():
        for group in (ALL, KV) if part(name) == KV else (f"{PARTS}{part(name)}",):
            groups[group] = groups.get(group, frozenset()) | names
    whole = {name: Variant(names, tokens) for name, names in groups.items()}
    alone = {f"{UNITS}{name}": Variant(names, tokens) for name, names in units.items()}
    spent, wanted = (sum(demand(passes, found)[0]) for found in (whole, alone))
    rows = min(tokens, max(LEAST_UNIT_TOKENS, tokens * spent // max(1, wanted)))
    return whole | {name: Variant(one.taken, rows) for name, one in alone.items()}


def demand(passes: Passes, variants: Mapping[str, Variant]) -> tuple[list[int], int]:
    """FLOP of each op, about, and bytes of memory, at most.

    Those are rows of all tensors alive, of the source and of the variants that differ by then, those that an op takes
    together, and the values of one matrix of each store.
    """
    program, columns, alive, most, flop = passes.program, passes.program.columns, 0, 0, list[int]()
    waiting, rows = dict(variants), max(one.rows for one in variants.values())
    for op, freed in zip(program.ops, program.freed, strict=True):
        touched = {*op.weights, *([op.state] if isinstance(op, StateOp) else [])}
        for name in [name for name, one in waiting.items() if not one.taken.isdisjoint(touched)]:
            rows += waiting.pop(name).rows
        sizes = [0, *(prod(program.weights[name].shape) for name in op.weights if not isinstance(op, Embed))]
        values = row_weights(program, op) if isinstance(op, Experts) else sum(sizes)
        steps = 8 * op.value_heads * op.key_dim * op.value_dim if isinstance(op, GatedDelta) else 0
        flop.append(rows * (2 * (values + steps) + 64))
        taken = sum(columns[name] for name in (*op.inputs, op.output)) if isinstance(op, Linear | Experts) else 0
        alive += columns[op.output]
        most = max(most, 4 * rows * (alive + taken) + 8 * max(sizes))
        alive -= sum(columns[name] for name in freed)
    return flop, most + _REST


def _on(device: str) -> AbstractContextManager[object]:
    """Where new tensors are; every call costs time inside torch's own context."""
    return nullcontext() if device == "cpu" else torch.device(device)


def _array(rows: torch.Tensor) -> list[Any]:
    return [rows.cpu().numpy()]


class Run:
    """Variants over sequences: the passes, then the distributions."""

    def __init__(
        self,
        passes: Passes,
        stores: Stores,
        sequences: Sequence[Sequence[int]],
        variants: Mapping[str, Variant],
        *,
        device: str = "cpu",
        folder: Path | None = None,
    ) -> None:
        """``folder``: where the state after the last layer is kept, and taken up from; None: nowhere."""
        self._program, self._stores, self._variants = passes.program, stores, variants
        self._device, self._state = device, folder and folder / STATE
        self._values, self._flop = (Values(stores.source), Values(stores.other)), demand(passes, variants)[0]
        self._ids = np.array([one for ids in sequences for one in ids])
        self._ends: list[int] = np.cumsum([len(ids) for ids in sequences]).tolist()
        self.kept = np.setdiff1d(np.arange(len(self._ids)), np.array(self._ends) - 1)  # whose next token is known
        with _on(device):  # tensors by variant and name, [the variant's rows, columns] each
            self._rows = {SOURCE: {"ids": torch.as_tensor(self._ids)}}

    def compared(self, progress: Progress = unheard) -> dict[str, Compared]:
        """Each variant that differs from the source, and ``ALL``, by rows ``kept`` (of them, the first it has).

        Raises CheckpointError for NaN.
        """
        with torch.inference_mode(), _on(self._device):
            self._pass(Stage(progress, "layers", sum(self._flop)))
            heads = [values.get(HEAD) for values in self._values]
            differs = not same(*heads)
            reads = {name: int(differs and HEAD in one.taken) for name, one in self._variants.items()}
            sides = {n: self._side(n, head) for n, head in reads.items() if head or n in (ALL, *self._rows)}
            following = torch.as_tensor(self._ids[self.kept + 1])
            stage = Stage(progress, "head", 1000)
            found = compare(self._side(SOURCE, 0), sides, heads if differs else heads[:1], following, stage.share)
            stage.finish()
            self._stores.release()
        return found

    def backend(self, rows: np.ndarray[Any, Any], logits: torch.Tensor) -> tuple[Compared, Compared]:
        """A backend's logits of some rows against the source, and against everything of the other store.

        After :meth:`compared`.
        """
        with torch.inference_mode(), _on(self._device):
            at, following = torch.as_tensor(rows), torch.as_tensor(self._ids[rows + 1])
            heads, side = [values.get(HEAD) for values in self._values], {"": (logits.to(at.device), None)}
            bases = ((self._hidden(name)[at], head) for head, name in enumerate((SOURCE, ALL)))
            one, other = (compare(base, side, heads, following)[""] for base in bases)
        return one, other

    def _hidden(self, name: str) -> torch.Tensor:
        """What the head reads; the source's where nothing before the head differs."""
        return self._rows.get(name, self._rows[SOURCE])[self._program.outputs["hidden"]]

    def _side(self, name: str, head: int) -> Side:
        """The kept rows of a variant before a head."""
        count = self._variants[name].rows if name in self._variants else len(self._ids)
        return self._hidden(name)[torch.as_tensor(self.kept[self.kept < count])], head

    def _pass(self, stage: Stage) -> None:
        """Run all ops, from the last state that was kept."""
        ops, first = self._program.ops, self._take_up()
        stage.advance(sum(self._flop[:first]))
        for index in range(first, len(ops)):
            if any(name.endswith(_LAYER) for name in ops[index].weights):
                self._keep(index)
                self._stores.release()
            self._step(ops[index])
            for own in self._rows.values():
                for name in self._program.freed[index]:
                    own.pop(name, None)
            stage.advance(self._flop[index])
        stage.finish()

    def _keep(self, count: int) -> None:
        """Write the rows after so many ops."""
        if self._state is None or count < 2:
            return
        every = {f"{name}|{key}": one for name, own in self._rows.items() for key, one in own.items()}
        every["ops|"] = torch.tensor([float(count)])
        made = [Tensor(name, "F32", tuple(one.shape), partial(_array, one)) for name, one in every.items()]
        write_file(part := self._state.with_suffix(".part"), tensor_file(made))
        part.replace(self._state)

    def _take_up(self) -> int:
        """Ops that are done by what was kept; 0: nothing was, or a crash tore it."""
        if self._state is None or not is_there(self._state):
            return 0
        try:
            file = TensorFiles.open([self._state])
            kept = {both: torch.tensor(file.array(both)[1]).to(self._device) for both in file.names()}
        except CheckpointError:
            return 0
        count, self._rows = int(kept.pop("ops|")), {}
        for both, rows in kept.items():
            name, _, key = both.partition("|")
            self._rows.setdefault(name, {})[key] = rows
        return count

    def _step(self, op: Op) -> None:
        taking = [name for name, one in self._variants.items() if not one.taken.isdisjoint(op.weights)]
        if taking and all(same(*(values.get(name) for values in self._values)) for name in op.weights):
            taking = []
        for name, variant in self._variants.items():
            if name not in self._rows and (name in taking or self._kv(op, name) != "float32"):
                self._rows[name] = {key: rows[: variant.rows] for key, rows in self._rows[SOURCE].items()}
        for values, names in zip(self._values, ([n for n in self._rows if n not in taking], taking), strict=True):
            if names:
                self._run(op, values, names)

    def _kv(self, op: Op, name: str) -> KvFormat:
        """Of the KV cache of an op of a variant."""
        own = isinstance(op, Attend) and name != SOURCE and op.state in self._variants[name].taken
        return self._stores.kv if own else "float32"

    def _run(self, op: Op, values: Values, names: Sequence[str]) -> None:
        """One op for the variants that read these values."""
        inputs = [[self._rows[name][key] for key in op.inputs] for name in names]
        if isinstance(op, Linear | Experts):  # each matrix is read once
            x = torch.cat([own[0] for own in inputs])
            y = dense(op, [x], values) if isinstance(op, Linear) else experts(op, x, len(x), values, lambda kept: kept)
            found = list(torch.split(y, [len(own[0]) for own in inputs]))
        elif isinstance(op, Attend | GatedDelta):
            found = [self._state_op(op, values, self._kv(op, n), own) for n, own in zip(names, inputs, strict=True)]
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
            self._rows[name][op.output] = rows

    def _state_op(
        self, op: Attend | GatedDelta, values: Values, kv: KvFormat, inputs: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A state op over each sequence, from an empty state."""
        precision, states = Precision("float32", kv), {op.state: self._program.states[op.state]}
        interpreter, parts = Interpreter(values, precision), list[torch.Tensor]()
        for own in zip(*(rows.tensor_split(self._ends) for rows in inputs), strict=True):
            if rows := len(own[0]):
                memory = Memory.allocate(states, rows, precision, self._stores.other.kv_scale)
                parts.append(interpreter.step(op, own, memory))
        return torch.cat(parts)
