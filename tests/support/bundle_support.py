"""A small pair with random weights, and bundles made of it by hand, for the tests of bundles."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from edge_dflash.bundle.manifest import MANIFEST, FileEntry, Manifest, SourceFile, dump_manifest
from edge_dflash.bundle.parts import hash_file, part_of, tensor_file, uncounted, whole, wide_first, write_file
from edge_dflash.decode.backend import Precision
from edge_dflash.model import pair_programs
from edge_dflash.model.specs import (
    AttentionSpec,
    DrafterLayerMask,
    DrafterSpec,
    GatedDeltaSpec,
    PairSpec,
    RopeSpec,
    TargetSpec,
    YarnScaling,
)
from edge_dflash.weights.formats import FORMATS, Fp8Weight, Nvfp4Weight, Weight, WideWeight
from edge_dflash.weights.quantize import ENCODERS

PAIR = PairSpec(
    TargetSpec(
        architecture="qwen3_5",
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        attention=AttentionSpec(2, 1, 16, RopeSpec(1e7, 8, YarnScaling(4.0, 128)), gated=True),
        gated_delta=GatedDeltaSpec(1, 2, 16, 16, 4),
        layer_types=("linear_attention", "full_attention"),
        tied=True,
        max_position_embeddings=512,
        eos_token_ids=(0, 7),
    ),
    DrafterSpec(
        block_size=4,
        mask_token_id=47,
        target_layer_ids=(0, 1),
        num_target_layers=2,
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        attention=AttentionSpec(2, 1, 16, RopeSpec(1e6, 16), gated=False),
        layers=(DrafterLayerMask(False, 24), DrafterLayerMask(True, None)),
    ),
)


def random_weight(rng: np.random.Generator, shape: tuple[int, ...], form: str, input_scale: float | None) -> Weight:
    scale = np.float32(rng.uniform(1e-6, 1.0))
    if form == "fp8":
        rows = shape[0] if rng.integers(2) else 1
        scales = rng.uniform(1e-6, 1.0, rows).astype(np.float32)
        return Fp8Weight(rng.integers(0, 127, shape, dtype=np.uint8), scales, input_scale)
    if form == "nvfp4":
        packed = rng.integers(0, 256, (shape[0], shape[1] // 2), dtype=np.uint8)
        blocks = rng.integers(0, 127, (shape[0], shape[1] // 16), dtype=np.uint8)
        return Nvfp4Weight(packed, blocks, float(scale), input_scale)
    if form == "bf16":
        return WideWeight(rng.integers(0, 0x7F00, shape, dtype=np.uint16))
    wide = rng.standard_normal(shape).astype(np.float32)
    return WideWeight(wide) if form == "f32" else ENCODERS[form](torch.from_numpy(wide))


def random_weights(pair: PairSpec = PAIR, seed: int = 0) -> dict[str, Weight]:
    """A weight of a random allowed format for each name; a tied lm_head is left out half of the time."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Weight] = {}
    for name, spec in pair_programs(pair).weights.items():
        linear = spec.kind == "linear"
        forms = [
            name
            for name, form in FORMATS.items()
            if not form.quantized or (linear and spec.shape[-1] % (form.block or 1) == 0)
        ]
        input_scale = float(np.float32(rng.uniform(0.1, 1))) if rng.integers(2) else None
        weights[name] = random_weight(rng, spec.shape, forms[rng.integers(len(forms))], input_scale)
    if pair.target.tied and seed % 2:
        del weights["target.lm_head"]
    return weights


def write_part(path: Path, weights: dict[str, Weight], advance=uncounted) -> FileEntry:
    """A weight file of weights that are stored by themselves."""
    tensors = [tensor for name, weight in weights.items() for tensor in whole(name, weight)]
    return write_file(path, tensor_file(sorted(tensors, key=wide_first)), advance)


def write_bundle(path: Path, weights: dict[str, Weight], pair: PairSpec = PAIR, **changes: object) -> Manifest:
    """Write a bundle directory; ``changes`` replace fields of its manifest."""
    (path / "weights").mkdir(parents=True)
    parts: dict[str, dict[str, Weight]] = {}
    for name, weight in weights.items():
        parts.setdefault(part_of(name), {})[name] = weight
    for part, members in parts.items():
        write_part(path / part, members)
    (path / "calibration.json").write_text("{}\n")
    forms = {name: weight.format for name, weight in weights.items()}
    if "target.lm_head" not in weights:
        forms["target.lm_head"] = "tied"
    sources = (SourceFile("target", "model.safetensors", 10, "0" * 64),)
    return write_manifest(path, pair, weights=forms, tools={"numpy": "2"}, sources=sources, **changes)


def write_manifest(path: Path, pair: PairSpec, **changes: object) -> Manifest:
    """The manifest of a bundle whose other files are there; ``changes`` replace its fields."""
    manifest = Manifest(
        created_by="edge-dflash 0.0.0",
        arch="cpu",
        backend="reference",
        pair=pair,
        precision=Precision("bfloat16", "fp8"),
        recipe="test",
        max_context=128,
        prefill_chunk=64,
        kv_scales={"target.layers.1.kv": (0.5, 0.25)},
        tokenizer=False,
        tools={},
        sources=(),
        weights={},
        files={str(f.relative_to(path)): hash_file(f) for f in path.rglob("*") if f.is_file()},
    )
    manifest = replace(manifest, **changes)
    (path / MANIFEST).write_bytes(dump_manifest(manifest))
    return manifest
