"""The FP8 and W4A4 scales of a build: from the checkpoint, from calibration, or 1.0; and calibration.json.

A scale that the checkpoint stores wins. :mod:`edge_dflash.builder.calibrate` measures the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_dflash.backends import SMALL_MODEL
from edge_dflash.builder.calibrate import calibrate
from edge_dflash.builder.calibration_prompts import calibration_ids, read_prompts
from edge_dflash.builder.convert import one_thread
from edge_dflash.bundle.parts import part_of
from edge_dflash.common.files import LARGE, read_bytes
from edge_dflash.common.tables import decode, encode
from edge_dflash.errors import BuildError, RequestError
from edge_dflash.model.program import KvState, PairPrograms
from edge_dflash.model.specs import PairSpec
from edge_dflash.text.tokenizer import Tokenizer
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.formats import Nvfp4Weight, Weight, WeightFormat
from edge_dflash.weights.recipe import Recipe

Progress = Callable[[int, int], None]  # (linear layers done, linear layers in all)

CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class BuildScales:
    """All scales of a bundle, and where they come from: what calibration.json holds."""

    kv: Mapping[str, tuple[float, float]]  # (k, v) by KV state; a state not listed has (1.0, 1.0)
    inputs: Mapping[str, float]  # sx of each W4A4 linear
    stored: tuple[str, ...]  # states and linears whose scale is the checkpoint's
    tokens: int  # tokens that the other scales were measured on; 0: not measured
    prompts: str  # SHA-256 of the prompt file; "" when nothing was measured
    margin: float  # factor on the largest key and value that were seen


@dataclass(frozen=True)
class ScaleDecisions:
    """Scales that are known before the build, and what is to be measured."""

    known: BuildScales
    kv: tuple[str, ...]  # states to measure
    inputs: tuple[str, ...]  # linears to measure
    ids: tuple[int, ...]  # calibration tokens; empty: nothing is measured


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
    inputs = {name: scale for name in linears if (scale := _input_scale(store.stored.get(name))) is not None}
    stored = (*kv, *inputs)
    missing_kv = tuple(state for state in states if state not in kv)
    missing_inputs = tuple(name for name in linears if name not in inputs)
    if tokenizer is not None and allowed and (missing_kv or missing_inputs):
        limit = min(recipe.calibration.tokens, pair.target.max_position_embeddings - pair.rows)
        ids, refused = _prompt_ids(recipe.calibration.path, tokenizer, limit)
        digest = hashlib.sha256(read_bytes(recipe.calibration.path, LARGE)).hexdigest()
        known = BuildScales(kv, inputs, stored, len(ids), digest, recipe.calibration.margin)
        return ScaleDecisions(known, missing_kv, missing_inputs, ids), refused
    why = "the target has no tokenizer.json" if tokenizer is None else "calibration is switched off"
    if missing_inputs:
        raise BuildError(
            f"NVFP4 activations need a measured scale for {missing_inputs[0]} ({len(missing_inputs)} in all), but "
            f"{why}; calibrate, or set activations: bf16 in the recipe"
        )
    warnings = (f"FP8 scale 1.0 for the keys and values of {len(missing_kv)} layers: {why}",) if missing_kv else ()
    return ScaleDecisions(BuildScales(kv, inputs, stored, 0, "", 1.0), (), (), ()), warnings


def measure_scales(decided: ScaleDecisions, pair: PairSpec, store: PairCheckpoint, progress: Progress) -> BuildScales:
    """Run the calibration pass over ``decided.ids``. Raises BuildError."""
    known = decided.known
    layers = _LayerByLayer(store)
    with one_thread() if pair.target.hidden_size <= SMALL_MODEL else nullcontext():
        found = calibrate(pair, layers, decided.ids, margin=known.margin, linears=decided.inputs, progress=progress)
    store.release()
    return replace(
        known,
        kv={**known.kv, **{state: found.kv[state] for state in decided.kv}},
        inputs={**known.inputs, **{name: found.inputs[name] for name in decided.inputs}},
    )


def dump_scales(scales: BuildScales) -> bytes:
    """Text of calibration.json."""
    return (json.dumps(encode(scales), indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def load_scales(text: bytes) -> BuildScales:
    """Undo :func:`dump_scales`. Raises BundleError."""
    return decode(BuildScales, json.loads(text), CALIBRATION)


class _LayerByLayer:
    """A store that gives the memory of a layer back when the next one is asked for."""

    def __init__(self, store: PairCheckpoint) -> None:
        self._store, self._part = store, ""

    def get(self, name: str) -> Weight:
        """Return a weight; arrays of other layers should have been dropped."""
        if (part := part_of(name)) != self._part:
            self._store.release()
            self._part = part
        return self._store.get(name)

    def kv_scale(self, state: str) -> tuple[float, float]:
        """Scales of the underlying store."""
        return self._store.kv_scale(state)


def _prompt_ids(path: Path, tokenizer: Tokenizer, limit: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids of the prompts, and a warning about those that the chat template refuses: they are their text alone."""
    prompts, refused = read_prompts(path), list[str]()

    def encode_chat(messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        if tokenizer.template is not None:
            try:
                return tokenizer.encode_chat(messages)
            except RequestError as error:
                refused.append(str(error))
        return tokenizer.encode_text("\n\n".join(message["content"] for message in messages))

    try:
        ids = calibration_ids(prompts, encode_chat, limit)
    except RequestError as error:
        raise BuildError(f"{path}: {error}; correct the prompts, or build with --no-calibrate") from None
    if not refused:
        return ids, ()
    return ids, (f"{len(refused)} prompts of {path.name} calibrate as plain text, without turns: {refused[0]}",)


def _input_scale(weight: Weight) -> float | None:
    return weight.input_scale if isinstance(weight, Nvfp4Weight) else None
