"""The drafter that a training begins with, and the one that it leaves: Hugging Face checkpoints, read and written.

A drafter's file keeps its names, its configuration and whatever else it holds; only what was trained is replaced. From
scratch it is a DFlash drafter of the published sizes for its target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from edge_dflash.builder.card import CARD
from edge_dflash.common.files import is_there
from edge_dflash.errors import RequestError
from edge_dflash.model.dflash import DRAFT_IDS, NAMES
from edge_dflash.model.program import WeightSpec
from edge_dflash.model.registry import DRAFTERS, match_pair, read_drafter_spec
from edge_dflash.model.specs import PairSpec, TargetSpec
from edge_dflash.training.drafter import drafter_weights
from edge_dflash.training.taps import whole_file
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import wide_tensor
from edge_dflash.weights.safetensors import INDEX, SINGLE, TensorFiles

BLOCK, LAYERS = 16, 5  # of published drafters
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # theirs, whatever the target's
LARGE_TARGET = 2048  # hidden size from which on a drafter has their heads; below it has the target's
OWN_FILES = (CARD, "training.json")  # what tells of the training that made a drafter
_WRITES = ("o_proj", "down_proj")  # linears that write to the residual stream start small


def make_start(
    target: TargetSpec, init: Path | None, output: Path, *, mask_token_id: int | None = None, seed: int = 0
) -> PairSpec:
    """Write the drafter that a training begins with to ``output``; returns the pair.

    ``init``: a checkpoint, or a directory with a config.json alone, which gets random weights; None: published sizes,
    for which ``mask_token_id`` is needed. Raises CheckpointError for a drafter of another target, RequestError for one
    that cannot be trained.
    """
    if init is not None:
        if mask_token_id is not None:
            raise RequestError(f"--mask-token is {mask_token_id}, and {init} says its own; leave it out")
        read_drafter_spec(init, target.num_layers)  # what is no drafter is said before anything is copied
    output.mkdir(parents=True, exist_ok=True)
    if init is None:
        config = published_config(target, mask_token_id)
        (output / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    else:
        for file in kept_files(init):
            shutil.copy2(file, output / file.name)
    pair = match_pair(target, read_drafter_spec(output, target.num_layers))
    if is_there(output / SINGLE) or is_there(output / INDEX):
        read_weights(output, pair)  # what cannot be trained is said now
    elif pair.drafter is not None and pair.drafter.draft_vocab is not None:
        raise RequestError(f"{init} drafts from a part of the vocabulary and has no weights; give a checkpoint")
    else:
        save_weights(output, pair, random_weights(pair, seed))
    return pair


def kept_files(directory: Path) -> list[Path]:
    """Files of a drafter that one trained from it has too: not those that tell how it was made."""
    return [
        file
        for file in sorted(directory.iterdir())
        if file.suffix in (".json", ".safetensors", ".py") and file.name not in OWN_FILES and file.is_file()
    ]


def same_files(init: Path, start: Path) -> bool:
    """Whether a start has these files as they are now, by size and time; random weights may stand beside them."""
    ours, theirs = (
        {file.name: ((of := file.stat()).st_size, int(of.st_mtime)) for file in kept_files(directory)}
        for directory in (start, init)
    )
    return ours == theirs or (SINGLE not in theirs and ours == {**theirs, SINGLE: ours.get(SINGLE)})


def published_config(target: TargetSpec, mask_token_id: int | None) -> dict[str, Any]:
    """config.json of a DFlash drafter as they are published for targets like this. Raises RequestError."""
    if mask_token_id is None:
        raise RequestError("nothing says which token stands for a draft; give --mask-token, or --drafter")
    large, attention = target.hidden_size >= LARGE_TARGET, target.attention
    heads = (HEADS, KV_HEADS, HEAD_DIM) if large else (attention.heads, attention.kv_heads, attention.head_dim)
    layers = LAYERS if target.num_layers >= 4 * LAYERS else max(1, min(3, target.num_layers // 2))
    last = target.num_layers - 2
    taps = sorted({min(last, round(1 + i * max(0, last - 2) / max(1, LAYERS - 1))) for i in range(LAYERS)})
    return {
        "architectures": [NAMES[0]],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size or 3 * target.hidden_size,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": taps},
        "layer_types": ["full_attention"] * layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": attention.rope.theta,
        "rope_scaling": None,
    }


def random_weights(pair: PairSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights to train from scratch, float32: linears keep the scale of their input; heads begin as if not there."""
    layers = pair.drafter.num_layers if pair.drafter else 1
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, spec, layers, generator) for name, spec in drafter_weights(pair).items()}


def _random(name: str, spec: WeightSpec, layers: int, generator: torch.Generator) -> torch.Tensor:
    if spec.kind == "vector":
        return torch.zeros(spec.shape) if name.endswith(".bias") else torch.ones(spec.shape)
    if spec.kind == "conv":  # a row as it is
        base = torch.zeros(spec.shape)
        base[:, 0] = 1.0
        return base
    if name.endswith(("kernel_projection", "successor_codebook", "markov_w2")):
        return torch.zeros(spec.shape)
    if name.endswith(("predecessor_codebook", "markov_w1")):
        return torch.randn(spec.shape, generator=generator)
    writes = 2 * layers if name.endswith(_WRITES) else 1
    scale = float((spec.shape[-1] * writes) ** -0.5)
    return torch.randn(spec.shape, generator=generator) * scale


def read_weights(directory: Path, pair: PairSpec) -> dict[str, torch.Tensor]:
    """Weights of a drafter checkpoint by canonical name, float32; ids of a draft vocabulary are left out.

    Raises CheckpointError for damaged files, RequestError for weights that are quantized.
    """
    files, found = TensorFiles.open(directory), {}
    for name, tensor in _file_names(files, pair).items():
        if name != DRAFT_IDS:
            kind, array = files.array(tensor)
            if kind not in ("BF16", "F32", "F16"):
                raise RequestError(f"{directory}: {tensor} is {kind}; give a drafter whose weights are not quantized")
            wide = WideWeight(np.asarray(array, np.float32) if kind == "F16" else array)
            found[name] = wide_tensor(wide).float().clone()
    return found


def save_weights(
    directory: Path, pair: PairSpec, weights: Mapping[str, torch.Tensor], start: Path | None = None
) -> None:
    """Write a drafter's weights in BF16, in one file; ``start``: the checkpoint whose other files and tensors it keeps.

    Raises RequestError where they cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    names = {name: _file_name(name, pair) for name in weights}
    if start is not None:
        files = TensorFiles.open(start)
        names |= {name: tensor for name, tensor in _file_names(files, pair).items() if name in weights}
        for tensor in files.names():
            kind, array = files.array(tensor)
            values = torch.from_numpy(np.array(array.view(np.int16) if kind == "BF16" else array))
            tensors[tensor] = values.view(torch.bfloat16) if kind == "BF16" else values
        for file in start.iterdir():
            if file.suffix != ".safetensors" and file.name != INDEX:
                shutil.copyfile(file, directory / file.name)
    for name, values in weights.items():
        if name != DRAFT_IDS:
            tensors[names[name]] = values.detach().to("cpu", torch.bfloat16).contiguous()
    with whole_file(directory / SINGLE) as half:
        save_file(dict(sorted(tensors.items())), str(half), metadata={"format": "pt"})


def _file_name(name: str, pair: PairSpec) -> str:
    """How a file of no prefix calls a weight."""
    bare = DRAFTERS[pair.drafter.kind].names.bare if pair.drafter else ()
    module = name.removeprefix("drafter.")
    return module if module.endswith(bare) else f"{module}.weight"


def _file_names(files: TensorFiles, pair: PairSpec) -> dict[str, str]:
    """How a file calls each weight. Raises RequestError for one that it lacks: quantized ones are called otherwise."""
    prefixes = DRAFTERS[pair.drafter.kind].names.prefixes if pair.drafter else ("",)
    found = {}
    for name in drafter_weights(pair):
        module = _file_name(name, pair)
        place = next((prefix + module for prefix in prefixes if prefix + module in files), None)
        if place is None:
            raise RequestError(f"the drafter has no tensor {module}: it is incomplete or quantized; give one in BF16")
        found[name] = place
    return found
