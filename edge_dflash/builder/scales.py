"""The FP8 and W4A4 scales of a build: from the checkpoint, from calibration, or 1.0; and calibration.json.

A scale that the checkpoint stores wins. The others are measured.

One prefill pass of the reference interpreter over all tokens, then a few propose passes, because a drafter block's own
keys and values share the context's scales. Each weight is converted when its op runs and dropped after it, the
embedding is gathered for the ids in use only and nothing behind the last measured op runs: peak memory is a layer's
weights and activations. Activations stay wide while they are measured.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from edge_dflash.backends import SMALL_MODEL
from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.builder.convert import one_thread
from edge_dflash.builder.importance import Keep, Moments, shared_inputs
from edge_dflash.bundle.parts import part_of
from edge_dflash.common.files import LARGE, parse_json, read_bytes, read_text
from edge_dflash.common.tables import decode, encode
from edge_dflash.decode.backend import Precision
from edge_dflash.errors import BuildError, BundleError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.ops import Attend, Embed, KvAppend, Linear, Op, SelectRows
from edge_dflash.model.program import KvState, PairPrograms, Program, WeightSpec
from edge_dflash.model.specs import PairSpec
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.compensate import peak_bytes
from edge_dflash.weights.e4m3 import E4M3_MAX
from edge_dflash.weights.formats import Array, Nvfp4Weight, Weight, WeightFormat, WeightStore, WideWeight
from edge_dflash.weights.quantize import GLOBAL_DIVISOR
from edge_dflash.weights.recipe import Recipe

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class CalibrationPrompt:
    """One conversation of a calibration set."""

    id: str
    source: str
    licence: str
    messages: tuple[Mapping[str, str], ...]  # {"role": system | user | assistant, "content": text}

    @property
    def text(self) -> str:
        """The messages without their turns."""
        return "\n\n".join(message["content"] for message in self.messages)


def read_prompts(path: Path) -> tuple[CalibrationPrompt, ...]:
    """Read every line of a prompt file. Raises BuildError naming file, line, what was found and what is wanted."""
    try:
        lines = read_text(path, LARGE).splitlines()
        prompts = tuple(_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(
            f"{path}: not a readable text file ({getattr(error, 'strerror', error)}); see calib/README.md"
        ) from error
    if not prompts:
        raise BuildError(f"{path} holds no prompt; wanted one JSON object a line, see calib/README.md")
    return prompts


def _prompt(line: str, where: str) -> CalibrationPrompt:
    try:
        prompt = decode(CalibrationPrompt, parse_json(line.encode()), where)
    except BundleError as error:
        raise BuildError(f"{error}; see calib/README.md") from None
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{where}: not JSON ({error}); see calib/README.md") from None
    said = [one.keys() == {"role", "content"} and one["role"] in ROLES and one["content"] for one in prompt.messages]
    if not (prompt.id and prompt.source and prompt.licence and said and all(said)):
        roles = " | ".join(ROLES)
        raise BuildError(
            f"{where} lacks a text, or its messages are not {{role: {roles}, content: text}}; see calib/README.md"
        )
    return prompt


PROPOSALS = 4  # propose passes, spread over the context
Progress = Callable[[int, int], None]  # (linear layers done, linear layers in all)


CALIBRATION = "calibration.json"
HEAD = "target.lm_head"


@dataclass(frozen=True)
class Scales:
    """Multipliers, exact in float32, and where they come from: what calibration.json holds."""

    kv: Mapping[str, tuple[float, float]]  # (k, v) by KV state; a state not listed has (1.0, 1.0)
    inputs: Mapping[str, float]  # sx by canonical name of a W4A4 linear
    stored: tuple[str, ...] = ()  # states and linears whose scale is the checkpoint's
    tokens: int = 0  # tokens that the other scales were measured on; 0: not measured
    prompts: str = ""  # SHA-256 of the prompt file; "" when nothing was measured
    margin: float = 1.0  # factor on the largest key and value that were seen


def calibrate(
    pair: PairSpec,
    store: WeightStore,
    ids: Sequence[int],
    *,
    margin: float = 1.0,
    linears: Collection[str] = (),
    proposals: int = PROPOSALS,
    activations: Literal["float32", "bfloat16"] = "bfloat16",
    progress: Progress | None = None,
    moments: Moments | None = None,
) -> Scales:
    """Measure the scales of every KV state, and of the inputs of ``linears``, on one sequence of ``ids``.

    ``moments`` of inputs are collected on the way: of every row for the head, which computes no logits.

    KV: scale = margin * max|x| / 448 of K after norm and rotation and of V. Linears: sx = max|x| / 2688 (ModelOpt),
    whatever the checkpoint stores. A tensor of zeros gets 1. Raises BuildError when there are no ids, an id is outside
    the vocabulary, or a measured value is not finite.
    """
    vocabulary = pair.target.vocab_size
    if not ids or not 0 <= min(ids) <= max(ids) < vocabulary:
        found = f"ids {min(ids)}..{max(ids)}" if ids else "no token ids"
        raise BuildError(
            f"calibration got {found}, wanted ids 0..{vocabulary - 1}: give the checkpoint's own tokenizer"
        )
    programs, block = pair_programs(pair), pair.drafter.block(ids[0]) if pair.drafter else []
    meter = _Meter(frozenset(linears), progress, moments or Moments())
    prefill = _measured_part(_headless(programs.prefill) if HEAD in meter.moments.wanted else programs.prefill, meter)
    propose = _measured_part(programs.propose, meter)
    starts = sorted({max(0, math.ceil(len(ids) * i / proposals) - 1) for i in range(1, proposals + 1)}, reverse=True)
    starts = starts if block else []
    meter.total = _linears(prefill) + len(starts) * _linears(propose)

    rows = _EmbeddingRows(store, [op.weight for op in prefill.ops if isinstance(op, Embed)], [*ids, *block])
    precision = Precision(activations, kv=activations)
    interpreter = Interpreter(TorchWeights(rows, cache=False, row_tile=None), precision)
    memory = Memory.allocate(programs.states, len(ids) + len(block), precision, rows.kv_scale)
    for name, hidden in interpreter.run(prefill, rows.compact(ids), memory, observer=meter).items():
        meter.moments.add(name, hidden)
    for start in starts:  # from the end, since a block overwrites the context rows behind its start
        memory.length = start
        interpreter.run(propose, rows.compact([ids[start], *block[1:]]), memory, observer=meter)

    states = [name for name, state in programs.states.items() if isinstance(state, KvState)]
    kv = {
        name: (meter.scale(name + ".k", margin / E4M3_MAX), meter.scale(name + ".v", margin / E4M3_MAX))
        for name in states
    }
    inputs = {name: meter.scale(name, 1 / GLOBAL_DIVISOR) for name in sorted(linears)}
    return Scales(kv, inputs, tokens=len(ids), margin=margin)


class _Meter:
    """Observer that keeps the largest magnitude of each measured tensor, and moments."""

    def __init__(self, linears: frozenset[str], progress: Progress | None, moments: Moments) -> None:
        self.linears, self.moments, self.total = linears, moments, 0
        self._amax: dict[str, float] = {}
        self._done, self._progress = 0, progress

    def reads(self, op: Op) -> bool:
        """Whether the op is measured. Moments of the head are not: what it reads is a result of :func:`_headless`."""
        scaled = isinstance(op, Attend | KvAppend) or (isinstance(op, Linear) and op.weight in self.linears)
        return scaled or (HEAD not in op.weights and self.moments.reads(op))

    def __call__(self, op: Op, role: str, values: torch.Tensor) -> None:
        self.moments.observe(op, role, values)
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
    """A store whose embedding holds only the rows in use, by ascending id, and whose activations stay wide.

    It gives the memory of a checkpoint's layer back when the next one is asked for.
    """

    def __init__(self, store: WeightStore, embeddings: Collection[str], ids: Sequence[int]) -> None:
        self._store, self._embeddings, self._part = store, embeddings, ""
        self._used = np.unique(np.asarray(ids))
        self.kv_scale = store.kv_scale

    def compact(self, ids: Sequence[int]) -> list[int]:
        """Rows of the gathered embedding for ``ids``."""
        return [int(row) for row in np.searchsorted(self._used, ids)]

    def get(self, name: str) -> Weight:
        """Return a weight for measuring; arrays of other layers should have been dropped."""
        if (part := part_of(name)) != self._part:
            self._part = part
            if isinstance(self._store, PairCheckpoint):
                self._store.release()
        weight = self._store.get(name)
        if isinstance(weight, WideWeight) and name in self._embeddings:
            return WideWeight(weight.data[self._used])
        return replace(weight, input_scale=None) if isinstance(weight, Nvfp4Weight) else weight


def _headless(program: Program) -> Program:
    """The prefill pass without logits, every row of what the head would read as its result ``HEAD``."""
    select = next(op for op in program.ops if isinstance(op, SelectRows))
    head = next(op for op in program.ops if HEAD in op.weights)
    ops = (op for op in program.ops if op not in (select, head))
    every = (replace(op, inputs=select.inputs) if op.inputs == (select.output,) else op for op in ops)
    return replace(program, ops=tuple(every), outputs={HEAD: head.inputs[0]})


def _measured_part(program: Program, meter: _Meter) -> Program:
    """Return the program up to its last op that is measured, or makes the result ``HEAD``."""
    outputs = {name: tensor for name, tensor in program.outputs.items() if name == HEAD}
    measured = [i for i, op in enumerate(program.ops) if meter.reads(op) or op.output in outputs.values()]
    last = max(measured, default=-1)
    return replace(program, ops=program.ops[: last + 1], outputs=outputs)


def _linears(program: Program) -> int:
    return sum(isinstance(op, Linear) for op in program.ops)


@dataclass(frozen=True)
class ScaleDecisions:
    """Scales that are known before the build, and what is to be measured."""

    known: Scales
    kv: tuple[str, ...]  # states to measure
    inputs: tuple[str, ...]  # linears to measure
    moments: tuple[str, ...]  # linears that are rounded by the moments of their inputs
    ids: tuple[int, ...]  # calibration tokens; empty: nothing is measured
    compensated: Mapping[str, str]  # linears whose errors are compensated, and the one that their input is kept for

    def kept_bytes(self, weights: Mapping[str, WeightSpec]) -> int:
        """Of inputs that lie in the working directory until the build ends."""
        return sum(2 * len(self.ids) * weights[name].shape[1] for name in set(self.compensated.values()))


def decide_scales(
    recipe: Recipe,
    pair: PairSpec,
    programs: PairPrograms,
    store: PairCheckpoint,
    formats: Mapping[str, WeightFormat],
    tokenizer: Tokenizer | None,
    *,
    allowed: bool,
) -> tuple[ScaleDecisions, tuple[str, ...]]:
    """Decide which scales are measured; return them and warnings. ``allowed`` False: measure none.

    Raises BuildError when NVFP4 activations cannot be calibrated or the prompt file is bad.
    """
    states = [name for name, state in programs.states.items() if isinstance(state, KvState) and recipe.kv == "fp8"]
    kv = {state: scales for state in states if (scales := store.stored_kv_scale(state)) is not None}
    linears = [
        name
        for name, spec in programs.weights.items()
        if (form := formats[name]) != "tied" and recipe.nvfp4_activations(spec, form)
    ]
    inputs = {name: scale for name in linears if (scale := _input_scale(store.get(name))) is not None}
    stored = (*kv, *inputs)
    missing_kv = tuple(state for state in states if state not in kv)
    missing_inputs = tuple(name for name in linears if name not in inputs)
    moments = rounded_weights(formats, store) if recipe.rounding != "max" else ()
    if tokenizer is not None and allowed and (missing_kv or missing_inputs or moments):
        limit = min(recipe.calibration.tokens, pair.target.max_position_embeddings - pair.rows)
        ids, refused = _prompt_ids(recipe.calibration.path, tokenizer, limit)
        digest = hashlib.sha256(read_bytes(recipe.calibration.path, LARGE)).hexdigest()
        known = Scales(kv, inputs, stored, len(ids), digest, recipe.calibration.margin)
        compensated = shared_inputs(programs.prefill, moments) if recipe.rounding == "compensated" else {}
        _check_memory(len(ids), {name: programs.weights[name].shape[1] for name in compensated})
        return ScaleDecisions(known, missing_kv, missing_inputs, moments, ids, compensated), refused
    why = "the target has no tokenizer.json" if tokenizer is None else "calibration is switched off"
    if missing_inputs:
        raise BuildError(
            f"NVFP4 activations need a measured scale for {missing_inputs[0]} ({len(missing_inputs)} in all), but "
            f"{why}; calibrate, or set activations: bf16 in the recipe"
        )
    warnings = (f"FP8 scale 1.0 for the keys and values of {len(missing_kv)} layers: {why}",) if missing_kv else ()
    return ScaleDecisions(Scales(kv, inputs, stored), (), (), (), (), {}), warnings


def _check_memory(rows: int, columns: Mapping[str, int]) -> None:
    widest = max(columns, key=columns.__getitem__, default="")
    needed, held = peak_bytes(rows, columns.get(widest, 0)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > held:
        raise BuildError(
            f"compensation of {widest} ({columns[widest]} inputs, {rows} calibration tokens) needs {needed / 1e9:,.1f} "
            f"GB of memory, this machine has {held / 1e9:,.1f}; build with --rounding search, or fewer tokens"
        )


def rounded_weights(formats: Mapping[str, WeightFormat], store: WeightStore) -> tuple[str, ...]:
    """Names of the weights that a build rounds to NVFP4."""
    return tuple(name for name, form in formats.items() if form == "nvfp4" and store.get(name).format != form)


def measure_scales(
    decided: ScaleDecisions, pair: PairSpec, store: PairCheckpoint, progress: Progress, keep: Keep
) -> tuple[Scales, dict[str, Array]]:
    """Run the calibration pass over ``decided.ids``: scales, and importance of inputs, which ``keep`` is told.

    Raises BuildError.
    """
    known, moments = decided.known, Moments(decided.moments, keep)
    with one_thread() if pair.target.hidden_size <= SMALL_MODEL else nullcontext():
        found = calibrate(
            pair,
            store,
            decided.ids,
            margin=known.margin,
            linears=decided.inputs,
            progress=progress,
            moments=moments,
        )
    store.release()
    scales = replace(
        known,
        kv={**known.kv, **{state: found.kv[state] for state in decided.kv}},
        inputs={**known.inputs, **found.inputs},
    )
    return scales, moments.result()


def dump_scales(scales: Scales) -> bytes:
    """Text of calibration.json."""
    return (json.dumps(encode(scales), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def load_scales(text: bytes) -> Scales:
    """Undo :func:`dump_scales`. Raises BundleError."""
    return decode(Scales, json.loads(text), CALIBRATION)


def _prompt_ids(path: Path, tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Up to ``limit`` ids of the prompts, in file order, and a warning about those that the chat template refuses.

    Such a prompt, and each one without a template, is its text alone. Raises BuildError.
    """
    ids: list[int] = []
    refused: list[str] = []
    try:
        for prompt in read_prompts(path):
            if len(ids) >= limit:
                break
            found = None
            if tokenizer.template is not None:
                try:
                    found = tokenizer.encode_chat(prompt.messages)
                except RequestError as error:
                    refused.append(str(error))
            ids += tokenizer.encode_text(prompt.text) if found is None else found
    except RequestError as error:
        raise BuildError(f"{path}: {error}; correct the prompts, or build with --no-calibrate") from None
    warned = f"{len(refused)} prompts of {path.name} calibrate as plain text, without turns: "
    return tuple(ids[:limit]), (warned + refused[0],) if refused else ()


def _input_scale(weight: Weight) -> float | None:
    return weight.input_scale if isinstance(weight, Nvfp4Weight) else None
