"""config.json to frozen specs, by our own parsing: library config classes drop or default fields that matter here.

Knows the field variants of published Qwen3, Qwen3.5/3.6 and DFlash checkpoints. Reads config files only, no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, cast

from edge_dflash.checkpoint.fields import Fields
from edge_dflash.checkpoint.files import read_json
from edge_dflash.checkpoint.specs import (
    AttentionSpec,
    DrafterLayerMask,
    DrafterSpec,
    GatedDeltaSpec,
    LayerType,
    PairSpec,
    RopeSpec,
    TargetSpec,
    YarnScaling,
)
from edge_dflash.errors import CheckpointError, UnsupportedModelError

_TARGETS: dict[str, Literal["qwen3", "qwen3_5"]] = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
}
_DRAFTER = "DFlashDraftModel"


def read_target_spec(directory: Path) -> TargetSpec:
    """Spec of the target in ``directory``. Raises CheckpointError, UnsupportedModelError for another architecture."""
    outer = Fields(directory / "config.json", read_json(directory / "config.json"))
    name = _architecture(outer)
    if name == _DRAFTER:
        raise UnsupportedModelError(f"{outer.file} is a DFlash drafter; give it as the drafter, not as the target")
    if name not in _TARGETS:
        raise _unsupported(outer, name, tuple(_TARGETS))
    architecture = _TARGETS[name]
    text = outer.child("text_config") if outer.has("text_config") else outer
    _refuse_variants(text)
    layers = text.integer("num_hidden_layers")
    layer_types = _layer_types(text, architecture, layers)
    return TargetSpec(
        architecture=architecture,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        attention=_attention(text, gated=architecture == "qwen3_5"),
        gated_delta=_gated_delta(text) if "linear_attention" in layer_types else None,
        layer_types=layer_types,
        tied=text.flag("tie_word_embeddings", False) or outer.flag("tie_word_embeddings", False),
        max_position_embeddings=text.integer("max_position_embeddings"),
        eos_token_ids=_eos(directory, text, outer),
    )


def read_drafter_spec(directory: Path) -> DrafterSpec:
    """Spec of the DFlash drafter in ``directory``. Raises CheckpointError, UnsupportedModelError."""
    fields = Fields(directory / "config.json", read_json(directory / "config.json"))
    name = _architecture(fields)
    if name != _DRAFTER:
        raise _unsupported(fields, name, (_DRAFTER,))
    dflash = fields.child("dflash_config")
    for key in ("sample_from_anchor", "shift_labels", "shifted"):
        if fields.values.get(key) or dflash.values.get(key):
            raise UnsupportedModelError(
                f"{fields.file}: {key} is set, which is a DSpark/DeepSpec drafter; this version runs DFlash drafters"
            )
    _refuse_variants(fields)
    layers = fields.integer("num_hidden_layers")
    target_layers = fields.integer("num_target_layers")
    source = dflash if dflash.has("target_layer_ids") else fields
    taps = source.integers("target_layer_ids") if source.has("target_layer_ids") else _taps(layers, target_layers)
    if not taps:
        raise source.error("target_layer_ids", [], "at least one layer id")
    mask = dflash if dflash.has("mask_token_id") else fields
    block = fields if fields.has("block_size") else dflash
    return DrafterSpec(
        block_size=block.integer("block_size", least=2),
        mask_token_id=mask.integer("mask_token_id", least=0),
        target_layer_ids=taps,
        num_target_layers=target_layers,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention=_attention(fields, gated=False),
        layers=_drafter_layers(fields, dflash, layers),
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


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", names, "a list with one name")
    return names[0]


def _unsupported(fields: Fields, name: str, accepted: tuple[str, ...]) -> UnsupportedModelError:
    kind = ""
    if "Moe" in name or "moe" in str(fields.values.get("model_type", "")):
        kind = " (a mixture-of-experts model)"
    elif name == "DFlash2DraftModel":
        kind = " (DFlash2, another drafter design)"
    elif "DSpark" in name or "DeepSpec" in name:
        kind = " (DSpark/DeepSpec, another drafter design)"
    return UnsupportedModelError(
        f"{fields.file}: architecture {name}{kind} is not supported, wanted {' or '.join(accepted)}"
    )


def _refuse_variants(fields: Fields) -> None:
    """Options of the model family that change the maths and that no supported checkpoint uses."""
    if "moe" in str(fields.values.get("model_type", "")) or fields.has("num_experts"):
        raise UnsupportedModelError(f"{fields.file}: this is a mixture-of-experts model, wanted a dense one")
    if fields.flag("attention_bias", False):
        raise UnsupportedModelError(f"{fields.file}: attention_bias is true, wanted false (no biases)")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{fields.file}: hidden_act is {activation!r}, wanted 'silu'")
    if (gate := fields.text("output_gate_type", "swish")) not in ("swish", "silu"):
        raise UnsupportedModelError(f"{fields.file}: output_gate_type is {gate!r}, wanted 'swish'")


def _attention(fields: Fields, *, gated: bool) -> AttentionSpec:
    heads, kv_heads = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim = fields.integer("head_dim", 256 if gated else 128)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return AttentionSpec(heads, kv_heads, dim, _rope(fields, dim, partial=gated), gated)


def _rope(fields: Fields, dim: int, *, partial: bool) -> RopeSpec:
    """Rotary embedding; ``rope_parameters`` (transformers 5) wins over ``rope_theta`` and ``rope_scaling``."""
    rope = fields.child("rope_parameters")
    theta = rope.number("rope_theta") if rope.has("rope_theta") else fields.number("rope_theta")
    source = rope if rope.has("partial_rotary_factor") else fields
    factor = source.number("partial_rotary_factor", 0.25) if partial else 1.0
    dims = round(dim * factor)
    if dims % 2 or not 0 < dims <= dim or abs(dims - dim * factor) > 1e-6:
        raise source.error("partial_rotary_factor", factor, f"a share of head_dim {dim} that is an even number")
    return RopeSpec(theta, dims, _scaling(rope) or _scaling(fields.child("rope_scaling")))


def _scaling(rope: Fields) -> YarnScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise rope.error("rope_type", kind, "'default' or 'yarn'")
    return YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
    )


def _layer_types(fields: Fields, architecture: str, layers: int) -> tuple[LayerType, ...]:
    accepted = ("full_attention", "linear_attention") if architecture == "qwen3_5" else ("full_attention",)
    if fields.has("layer_types"):
        return cast("tuple[LayerType, ...]", fields.choices("layer_types", accepted, layers))
    if architecture == "qwen3":
        if fields.flag("use_sliding_window", False):
            raise fields.error("use_sliding_window", True, "false for a Qwen3 target")
        return ("full_attention",) * layers
    interval = fields.integer("full_attention_interval", 4)
    kinds: list[LayerType] = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    return tuple(kinds)


def _gated_delta(fields: Fields) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", 4, least=2),
    )
    if spec.value_heads % spec.key_heads:
        raise fields.error("linear_num_value_heads", spec.value_heads, f"a multiple of {spec.key_heads} key heads")
    return spec


def _eos(directory: Path, text: Fields, outer: Fields) -> tuple[int, ...]:
    """Stop tokens of config.json and generation_config.json, in that order, without repeats."""
    sources = [text, outer]
    if (directory / "generation_config.json").is_file():
        sources.append(Fields(directory / "generation_config.json", read_json(directory / "generation_config.json")))
    found: dict[int, None] = {}
    for fields in sources:
        value = fields.values.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or token < 0:
                raise fields.error("eos_token_id", value, "a token id or a list of them")
            found[token] = None
    return tuple(found)


def _drafter_layers(fields: Fields, dflash: Fields, layers: int) -> tuple[DrafterLayerMask, ...]:
    """A sliding layer is causal inside the block unless is_causal says otherwise; a full layer is bidirectional.

    ``use_sliding_window`` is not asked: published drafters set it or leave it out beside sliding ``layer_types``.
    """
    if not fields.has("layer_types"):
        return (DrafterLayerMask(bidirectional=True, window=None),) * layers
    types = fields.choices("layer_types", ("full_attention", "sliding_attention"), layers)
    causal = fields.flag("is_causal", dflash.flag("causal", dflash.flag("is_causal", True)))
    masks = {"full_attention": DrafterLayerMask(bidirectional=True, window=None)}
    if "sliding_attention" in types:
        masks["sliding_attention"] = DrafterLayerMask(not causal, fields.integer("sliding_window"))
    return tuple(masks[kind] for kind in types)


def _taps(drafter_layers: int, target_layers: int) -> tuple[int, ...]:
    """The published default of target_layer_ids: the middle layer, or evenly from 1 to L - 3."""
    if drafter_layers == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (drafter_layers - 1)) for i in range(drafter_layers))
