"""Taps of a bundle's target over prompts and answers: what a drafter sees of it, by the backend that will run it.

The native backend on its GPU, the reference otherwise, from the bundle's weights as they are, quantized. Shards are
made one after the other, each whole or not at all, so that a run that was killed goes on where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.bundle.manifest import fingerprint
from edge_dflash.bundle.reader import Bundle
from edge_dflash.common.progress import Progress, unheard
from edge_dflash.errors import RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import RmsNorm, SelectRows, StateOp
from edge_dflash.model.program import Program
from edge_dflash.model.specs import DrafterSpec, PairSpec
from edge_dflash.training.drafter import drafter_spec
from edge_dflash.training.shards import Sample, is_whole, read_sums, shard_path, write_shard

Bits = npt.NDArray[np.uint16]


Rows = dict[str, Bits]
"""Of one sequence: "taps" [rows, n * H], and perhaps "last" [rows, H], what the target's head reads."""
STAGE, CHECKING = "taps", "checking taps"
SHARD_BYTES = 256 << 20  # of a shard, about


class Tapper(Protocol):
    """Runs the target over whole sequences."""

    def rows(self, ids: Sequence[int]) -> Rows:
        """The taps of a sequence of token ids."""

    def close(self) -> None:
        """Let go of the device."""


def tap_rows(drafter: DrafterSpec) -> int:
    """Rows of the target's width that are kept of a token: its taps, and what the head reads where DSpark learns it."""
    return len(drafter.target_layer_ids) + drafter.anchor_drafts


def shard_bytes(pair: PairSpec, tokens: int) -> int:
    """Bytes on the disk of ``tokens``: an id (4 bytes) and BF16 rows."""
    return tokens * (4 + tap_rows(drafter_spec(pair)) * pair.target.hidden_size * 2)


def tap_program(pair: PairSpec, *, last: bool) -> Program:
    """The part of the prefill pass that makes the taps and, if wanted, every row of what the head reads."""
    program = pair_programs(pair).prefill
    ops = [op for op in program.ops if not (isinstance(op, StateOp) and op.state.startswith("drafter."))]
    outputs = {"taps": program.outputs["taps"]}
    if last:
        select = next(op for op in ops if isinstance(op, SelectRows))
        norm = next(op for op in ops if isinstance(op, RmsNorm) and op.inputs == (select.output,))
        ops.append(replace(norm, inputs=select.inputs, output="last"))
        outputs["last"] = "last"
    needed, kept = set(outputs.values()), []
    for op in reversed(ops):
        if op.output in needed:
            kept.append(op)
            needed.update(op.inputs)
    return replace(program, ops=tuple(reversed(kept)), outputs=outputs)


class ReferenceTapper:
    """In torch on the CPU."""

    def __init__(self, bundle: Bundle, *, last: bool) -> None:
        self._bundle, self._program = bundle, tap_program(bundle.pair, last=last)
        self._precision = bundle.manifest.precision
        self._interpreter = Interpreter(TorchWeights(bundle, row_tile=None), self._precision)
        states = pair_programs(bundle.pair).prefill.states
        self._states = {name: state for name, state in states.items() if not name.startswith("drafter.")}

    def rows(self, ids: Sequence[int]) -> Rows:
        """See :class:`Tapper`."""
        memory = Memory.allocate(self._states, len(ids), self._precision, self._bundle.kv_scale)
        found = self._interpreter.run(self._program, ids, memory)
        return {name: _bits(rows) for name, rows in found.items()}

    def close(self) -> None:
        """Nothing to let go of."""


def open_tapper(bundle: Bundle, *, last: bool) -> Tapper:
    """The tapper of the bundle's own backend. Raises BackendError where that cannot run here."""
    if bundle.manifest.backend == "reference":
        return ReferenceTapper(bundle, last=last)
    from edge_dflash.backends.cuda.taps import NativeTapper  # needs CUDA's bindings

    return NativeTapper(bundle, last=last)


def write_taps(
    bundle: Bundle,
    samples: Sequence[Sample],
    folder: Path,
    *,
    progress: Progress = unheard,
    say: Callable[[str], None] = lambda line: None,
    tapper: Callable[..., Tapper] = open_tapper,
) -> list[Path]:
    """Write the shards of ``samples`` that are missing in ``folder``, and remove others; where they lie.

    A damaged shard is said, and made again. Raises RequestError for a sample that does not fit the context.
    """
    most, last = bundle.manifest.max_context, drafter_spec(bundle.pair).anchor_drafts
    if (longest := max((len(one.ids) for one in samples), default=0)) > most:
        raise RequestError(f"a prompt and its answer have {longest} tokens, the bundle holds {most}")
    folder.mkdir(parents=True, exist_ok=True)
    of = fingerprint(bundle.manifest), str(last)
    parts = {shard_path(folder, i, part, *of): part for i, part in enumerate(_parts(samples, bundle.pair))}
    for path in set(folder.glob("*.safetensors")) - parts.keys():  # of other answers, or another target
        path.unlink()
    missing, sums = list[Path](), read_sums(folder)
    for i, path in enumerate(parts):
        progress(CHECKING, i, len(parts))
        if path.exists():
            if is_whole(path, sums.get(path.name)):
                continue
            say(f"{path} is damaged: it does not have the hash that it was written with; its taps are made again")
        missing.append(path)
    made, total = 0, sum(len(one.ids) for path in missing for one in parts[path])
    progress(STAGE, 0, total)
    if not missing:
        return list(parts)
    with closing(tapper(bundle, last=last)) as source:
        for path in missing:
            rows: dict[str, list[Bits]] = {}
            for one in parts[path]:
                for name, found in source.rows(one.ids).items():
                    rows.setdefault(name, []).append(found)
                made += len(one.ids)
                progress(STAGE, made, total)
            write_shard(path, parts[path], rows)
    return list(parts)


def _parts(samples: Sequence[Sample], pair: PairSpec) -> list[list[Sample]]:
    """The samples of each shard."""
    most, parts, size = max(1, SHARD_BYTES // shard_bytes(pair, 1)), list[list[Sample]](), 0
    for one in samples:
        if not parts or size + len(one.ids) > most:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += len(one.ids)
    return parts


def _bits(rows: torch.Tensor) -> Bits:
    return rows.bfloat16().view(torch.int16).numpy().view(np.uint16)
