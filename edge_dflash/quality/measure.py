"""A bundle, or any other weights, measured against their source: what is run, forecast, resumed, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_dflash.bundle.parts import Tensor, tensor_file, write_file
from edge_dflash.common.progress import Progress, Stage, unheard
from edge_dflash.model.ops import Experts, GatedDelta, Linear, Op, StateOp
from edge_dflash.model.specs import PairSpec
from edge_dflash.quality.compare import Compared, Side, compare
from edge_dflash.quality.report import Figures
from edge_dflash.quality.stream import HEAD, SOURCE, Passes, Stream, Tensors, Variant, part, same
from edge_dflash.weights.formats import KvFormat, WeightStore
from edge_dflash.weights.safetensors import TensorFiles

ALL, WEIGHTS, KV, PARTS, UNITS = "all", "weights", "kv", "parts/", "units/"  # names of variants, and their beginnings
LEAST_UNIT_TOKENS = 16
_REST = 1 << 30  # bytes of libraries, of slices of heads and their logits, and of mapped files
LAYER = ".input_layernorm"  # what the first op of a layer reads


@dataclass(frozen=True)
class Stores:
    """What is compared, and how their memory is given back after each layer."""

    source: WeightStore
    other: WeightStore
    kv: KvFormat = "float32"  # of the other's KV cache; float32: it is not looked at
    release: Callable[[], None] = lambda: None


def sensitivities(
    stores: Stores,
    pair: PairSpec,
    sequences: Sequence[Sequence[int]],
    units: Mapping[str, Collection[str]] | None = None,
    *,
    device: str = "cpu",
    progress: Progress = unheard,
) -> dict[str, Figures]:
    """What each unit of the other store costs alone, the rest being the source's; units that cost nothing are missing.

    ``units``: names of weights (or KV states) by the name of a unit; None: those of :attr:`Passes.units`. All
    sequences of ids are run for every unit. Raises CheckpointError for weights that give NaN.
    """
    passes, rows = Passes.of(pair), sum(map(len, sequences))
    wanted = passes.units if units is None else units
    variants = {name: Variant(frozenset(taken), rows) for name, taken in wanted.items()}
    run = Run(passes, stores, sequences, variants, device=device)
    return {name: found.figures() for name, found in run.compared(progress).items()}


def all_variants(passes: Passes, kv: KvFormat, tokens: int) -> dict[str, Variant]:
    """Everything, weights and KV cache alone, each part, on all tokens; each unit on as many as cost the same again."""
    units = {name: names for name, names in passes.units.items() if kv != "float32" or part(name) != KV}
    groups = {ALL: passes.weights, WEIGHTS: passes.weights}
    for name, names in units.items():
        for group in (ALL, KV) if part(name) == KV else (f"{PARTS}{part(name)}",):
            groups[group] = groups.get(group, frozenset()) | names
    whole = {name: Variant(names, tokens) for name, names in groups.items()}
    alone = {f"{UNITS}{name}": Variant(names, tokens) for name, names in units.items()}
    spent, wanted = (sum(costs(passes, found)) for found in (whole, alone))
    rows = min(tokens, max(LEAST_UNIT_TOKENS, tokens * spent // max(1, wanted)))
    return whole | {name: Variant(one.taken, rows) for name, one in alone.items()}


def _by_then(passes: Passes, variants: Mapping[str, Variant]) -> Iterator[tuple[Op, int]]:
    """Each op, and rows of the source and of the variants that differ by then."""
    waiting, rows = dict(variants), max(one.rows for one in variants.values())
    for op in passes.program.ops:
        touched = {*op.weights, *([op.state] if isinstance(op, StateOp) else [])}
        for name in [name for name, one in waiting.items() if not one.taken.isdisjoint(touched)]:
            rows += waiting.pop(name).rows
        yield op, rows


def costs(passes: Passes, variants: Mapping[str, Variant]) -> list[int]:
    """FLOP of each op."""
    return [rows * _flop(op, passes) for op, rows in _by_then(passes, variants)]


def memory(passes: Passes, variants: Mapping[str, Variant]) -> int:
    """Bytes at most: rows of all tensors alive, those that an op takes together, and the values of one matrix."""
    columns, alive, most = passes.program.columns, 0, 0
    for (op, rows), freed in zip(_by_then(passes, variants), passes.program.freed, strict=True):
        alive += columns[op.output]
        taken = sum(columns[name] for name in (*op.inputs, op.output)) if isinstance(op, Linear | Experts) else 0
        matrix = max((prod(passes.program.weights[n].shape) for n in op.weights if "embed" not in n), default=0)
        most = max(most, 4 * rows * (alive + taken) + 8 * matrix)
        alive -= sum(columns[name] for name in freed)
    return most + _REST


def _flop(op: Op, passes: Passes) -> int:
    """Of a row, about."""
    values = sum(prod(passes.program.weights[name].shape) for name in op.weights if "embed" not in name)
    if isinstance(op, Experts):
        values = values * op.top_k // len(op.gates)
    if isinstance(op, GatedDelta):
        values += 8 * op.value_heads * op.key_dim * op.value_dim
    return 2 * values + 64


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
        self._stores, self._variants, self._device, self._folder = stores, variants, device, folder
        self._ids = np.array([one for ids in sequences for one in ids])
        last = np.cumsum([len(ids) for ids in sequences]) - 1
        self.kept = np.setdiff1d(np.arange(len(self._ids)), last)  # rows whose next token is known
        with _on(device):
            self._stream = Stream(passes, (stores.source, stores.other), stores.kv, sequences, variants)
        self._ops, self._costs = passes.program.ops, costs(passes, variants)

    def compared(self, progress: Progress = unheard) -> dict[str, Compared]:
        """Each variant that differs from the source, and ``ALL``, by rows ``kept`` (of them, the first it has)."""
        stream = self._stream
        with torch.inference_mode(), _on(self._device):
            self._passed(progress)
            heads = stream.heads()
            differs = not same(*heads)
            reads = {name: int(differs and HEAD in one.taken) for name, one in self._variants.items()}
            sides = {n: self.side(n, head) for n, head in reads.items() if head or n in (ALL, *stream.rows)}
            following = torch.as_tensor(self._ids[self.kept + 1])
            stage = Stage(progress, "head", 1000)
            found = compare(self.side(SOURCE, 0), sides, heads if differs else heads[:1], following, stage.share)
            stage.finish()
            self._stores.release()
        return found

    def backend(self, rows: np.ndarray[Any, Any], logits: torch.Tensor) -> tuple[Compared, Compared]:
        """A backend's logits of some kept rows against the source, and against everything of the other store.

        After :meth:`compared`.
        """
        with torch.inference_mode(), _on(self._device):
            at, following = torch.as_tensor(rows), torch.as_tensor(self._ids[rows + 1])
            side, heads = {"": Side(logits.to(at.device), None)}, self._stream.heads()
            bases = (Side(self._stream.hidden(name)[at], head) for head, name in enumerate((SOURCE, ALL)))
            one, other = (compare(base, side, heads, following)[""] for base in bases)
        return one, other

    def side(self, name: str, head: int) -> Side:
        """The kept rows of a variant before a head."""
        hidden = self._stream.hidden(name)
        kept = torch.as_tensor(self.kept[self.kept < len(hidden)])
        return Side(hidden[kept], head)

    def _passed(self, progress: Progress) -> None:
        """Run all ops, from the last state that was kept."""
        stage, done, first = Stage(progress, "layers", sum(self._costs)), np.cumsum([0, *self._costs]), self._take_up()

        def after(count: int) -> None:
            stage.share(int(done[count]), int(done[-1]))
            if count < len(self._ops) and any(name.endswith(LAYER) for name in self._ops[count].weights):
                self._keep(count)
                self._stores.release()

        self._stream.run(first, after)
        stage.finish()

    def _keep(self, count: int) -> None:
        """Write the rows after so many ops, then remove the older file."""
        if self._folder is None or count < 2:
            return
        tensors = [
            Tensor(f"{variant}|{name}", "F32", tuple(rows.shape), partial(_array, rows))
            for variant, own in self._stream.rows.items()
            for name, rows in own.items()
        ]
        path = self._folder / f"{count:06}.safetensors"
        write_file(path.with_suffix(".part"), tensor_file(tensors))
        path.with_suffix(".part").replace(path)
        for other in self._folder.glob("*.safetensors"):
            if other != path:
                other.unlink()

    def _take_up(self) -> int:
        """Ops that are done by what was kept; 0: nothing was."""
        files = sorted(self._folder.glob("*.safetensors")) if self._folder else []
        if not files:
            return 0
        kept = TensorFiles.open([files[-1]])
        rows: dict[str, Tensors] = {}
        for key in kept.names():
            variant, _, name = key.partition("|")
            rows.setdefault(variant, {})[name] = torch.tensor(kept.array(key)[1]).to(self._device)
        self._stream.rows = rows
        return int(files[-1].stem)
