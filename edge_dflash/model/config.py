"""config.json to frozen specs, by our own parsing: library config classes drop or default fields that matter here.

Knows the field variants of published Qwen3, Qwen3.5/3.6 and DFlash checkpoints. Reads config files only, no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from edge_dflash.common.files import is_there
from edge_dflash.errors import CheckpointError
from edge_dflash.model.fields import Fields
from edge_dflash.model.keys import GENERATION
from edge_dflash.model.masks import drafter_masks
from edge_dflash.model.rope import read_rope
from edge_dflash.model.specs import AttentionSpec, DrafterSpec, GatedDeltaSpec, LayerType, PairSpec, TargetSpec
from edge_dflash.model.support import drafter_fields, target_fields
from edge_dflash.weights.safetensors import read_json


def read_target_spec(directory: Path) -> TargetSpec:
    """Spec of the target in ``directory``. Raises CheckpointError, UnsupportedModelError for another architecture."""
    file = directory / "config.json"
    architecture, outer, text = target_fields(file, read_json(file))
    layers = text.integer("num_hidden_layers")
    layer_types = _layer_types(text, architecture, layers)
    return TargetSpec(
        architecture=architecture,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        attention=_attention(text, gated=architecture == "qwen3_5"),
        gated_delta=_gated_delta(text) if "linear_attention" in layer_types else None,
        layer_types=layer_types,
        tied=text.flag("tie_word_embeddings") or outer.flag("tie_word_embeddings"),
        max_position_embeddings=text.integer("max_position_embeddings"),
        eos_token_ids=_eos(directory, text, outer),
    )


def read_drafter_spec(directory: Path) -> DrafterSpec:
    """Spec of the DFlash drafter in ``directory``. Raises CheckpointError, UnsupportedModelError."""
    file = directory / "config.json"
    fields = drafter_fields(file, read_json(file))
    dflash = fields.child("dflash_config")
    layers = fields.integer("num_hidden_layers")
    target_layers = fields.integer("num_target_layers")
    source = _place("target_layer_ids", dflash, fields)
    taps = source.integers("target_layer_ids") if source.has("target_layer_ids") else _taps(layers, target_layers)
    if not taps:
        raise source.error("target_layer_ids", [], "at least one layer id")
    vocab = fields.integer("vocab_size")
    if fields.has("draft_vocab_size") and (drafted := fields.integer("draft_vocab_size")) != vocab:
        raise fields.error("draft_vocab_size", drafted, f"vocab_size ({vocab}): drafts come from the whole vocabulary")
    return DrafterSpec(
        block_size=_place("block_size", fields, dflash).integer("block_size"),
        mask_token_id=_place("mask_token_id", dflash, fields).integer("mask_token_id"),
        target_layer_ids=taps,
        num_target_layers=target_layers,
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        attention=_attention(fields, gated=False),
        layers=drafter_masks(fields, dflash, layers),
    )


def match_pair(target: TargetSpec, drafter: DrafterSpec) -> PairSpec:
    """Check that a drafter was made for a target of these dimensions. Raises CheckpointError naming the field."""
    for field, found, wanted in (
        ("num_target_layers", drafter.num_target_layers, target.num_layers),
        ("hidden_size", drafter.hidden_size, target.hidden_size),
        ("vocab_size", drafter.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(
                f"the drafter's {field} is {found}, the target's is {wanted}; use the drafter trained for this target"
            )
    for tap in drafter.target_layer_ids:
        if not 0 <= tap <= target.num_layers - 2:  # the last layer's output is only seen after the final norm
            raise CheckpointError(
                f"the drafter's target_layer_ids hold {tap}, wanted 0 to {target.num_layers - 2} for this target"
            )
    if drafter.mask_token_id >= target.vocab_size:
        raise CheckpointError(
            f"the drafter's mask_token_id is {drafter.mask_token_id}, outside the vocabulary of {target.vocab_size}"
        )
    return PairSpec(target, drafter)


def _attention(fields: Fields, *, gated: bool) -> AttentionSpec:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim = fields.integer("head_dim")
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return AttentionSpec(heads, kv_heads, dim, read_rope(fields, dim, whole=not gated), gated)


def _layer_types(fields: Fields, architecture: str, layers: int) -> tuple[LayerType, ...]:
    if fields.has("layer_types"):
        return cast("tuple[LayerType, ...]", fields.choices("layer_types", layers))
    if architecture == "qwen3":
        if fields.flag("use_sliding_window"):
            raise fields.error("use_sliding_window", True, "false for a Qwen3 target")
        return tuple("full_attention" for _ in range(layers))
    interval = fields.integer("full_attention_interval")
    kinds: list[LayerType] = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return tuple(kinds)


def _gated_delta(fields: Fields) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.error("linear_num_value_heads", spec.value_heads, f"a multiple of {spec.key_heads} key heads")
    return spec


def _eos(directory: Path, text: Fields, outer: Fields) -> tuple[int, ...]:
    """Stop tokens of config.json and generation_config.json, in that order, without repeats."""
    sources = [text, outer]
    if is_there(file := directory / "generation_config.json"):
        sources.append(Fields(file, read_json(file), GENERATION))
    vocab, found = text.integer("vocab_size"), dict[int, None]()
    for fields in sources:
        for token in fields.tokens("eos_token_id"):
            if type(token) is not int or not 0 <= token < vocab:
                value = fields.values["eos_token_id"]
                raise fields.error("eos_token_id", value, f"a token id below vocab_size {vocab}, or a list of them")
            found[token] = None
    return tuple(found)


def _place(name: str, first: Fields, second: Fields) -> Fields:
    """Which of two objects holds a field that files keep in either; where both do, they must agree."""
    if not first.has(name):
        return second
    if second.has(name) and first.values[name] != second.values[name]:
        raise first.error(name, first.values[name], f"the same as elsewhere in the file ({second.values[name]!r})")
    return first


def _taps(drafter_layers: int, target_layers: int) -> tuple[int, ...]:
    """The published default of target_layer_ids: the middle layer, or evenly from 1 to L - 3."""
    if drafter_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (drafter_layers - 1)) for i in range(drafter_layers))
