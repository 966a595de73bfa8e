"""Qwen3.5 / Qwen3.6 text: gated delta layers and, every few layers, full attention with an output gate.

RMSNorm uses 1 + w everywhere but inside the gated delta layer, whose own norm uses w. Targets with a mixture of experts
(35B-A3B, 122B-A10B, 397B-A17B) have it, with a shared expert, in every layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from edge_dflash.model.config import EXPERTS, LIBRARY, TARGET, read_experts, read_target
from edge_dflash.model.fields import Fields, Table, free, inner, integer, names, number, only
from edge_dflash.model.specs import AttentionSpec, GatedDeltaSpec, LayerSpec, LayerType, TargetSpec

NAMES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MOE_NAMES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
_IMAGES = free(
    "no image comes in",
    "image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only",
)
_ALL_FULL = "all layers are full_attention"
TABLE: Table = {
    **TARGET,
    **_IMAGES,
    **only("model_type", "qwen3_5", "qwen3_5_text", why="another model"),
    "head_dim": integer(256),
    "partial_rotary_factor": number(0.25, beside="rope_parameters or rope_scaling has it"),
    "layer_types": names("full_attention", "linear_attention"),
    "full_attention_interval": integer(4, beside="layer_types is given"),
    "linear_num_key_heads": integer(beside=_ALL_FULL),
    "linear_num_value_heads": integer(beside=_ALL_FULL),
    "linear_key_head_dim": integer(beside=_ALL_FULL),
    "linear_value_head_dim": integer(beside=_ALL_FULL),
    "linear_conv_kernel_dim": integer(4, least=2, beside=_ALL_FULL),
    **only("attn_output_gate", True, why="attention without its gate"),
    **only("output_gate_type", "swish", "silu", why="another gate"),
    **only("mamba_ssm_dtype", "float32", None, why="a rounded state of gated delta layers"),
    **only("use_sliding_window", False, None, why="a target with sliding layers"),
    **only("sliding_window", None, why="a target with sliding layers"),
    **free(
        "the multi-token-prediction head is not used",
        "mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers",
    ),
}
"""config.json of text alone."""

MOE_TABLE: Table = {
    **TABLE,
    **EXPERTS,
    **only("model_type", "qwen3_5_moe", "qwen3_5_moe_text", why="another model"),
    "shared_expert_intermediate_size": integer(),
    **only("norm_topk_prob", True, why="weights of experts that do not sum to 1"),
}
"""The same of a target with experts."""


def nesting(text: Table, classes: tuple[str, ...]) -> Table:
    """Table of a config.json with ``text_config``, which has the keys of ``text``.

    Tools also write keys of ``text_config`` a second time next to it: those that say the same have no effect.
    """
    another = only("architectures", None, [], *([name] for name in classes), why="another model")
    return {
        **LIBRARY,
        **_IMAGES,
        **free("no image comes in", "vision_config"),
        **{key: text[key] for key in ("tie_word_embeddings", "eos_token_id", "is_causal", "model_type")},
        "text_config": inner({**text, **another}),
    }


NESTED, MOE_NESTED = nesting(TABLE, NAMES), nesting(MOE_TABLE, MOE_NAMES)
"""config.json of a target with ``text_config``."""


def flat(table: Table, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json without the keys next to ``text_config`` that say what it says; ``table`` is a :func:`nesting`."""
    text = config["text_config"]
    return {key: value for key, value in config.items() if key in table or not _same(text, config, key)}


def read(config: Fields) -> TargetSpec:
    """Spec of a target, by a file of text alone or by one with ``text_config``. Raises CheckpointError."""
    return _read(config, moe=False)


def read_moe(config: Fields) -> TargetSpec:
    """Spec of a target with experts, by either file. Raises CheckpointError."""
    return _read(config, moe=True)


def _read(config: Fields, *, moe: bool) -> TargetSpec:
    text = config.child("text_config") if config.has("text_config") else config
    layers = text["num_hidden_layers"]
    if text.has("layer_types"):
        kinds = text.choices("layer_types", layers)
    else:
        interval = text["full_attention_interval"]
        kinds = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    experts = None
    if moe:
        experts = read_experts(text, renormalised=True, shared=text["shared_expert_intermediate_size"])
    return read_target(
        text,
        config,
        "qwen3_5_moe" if moe else "qwen3_5",
        cast("tuple[LayerType, ...]", kinds),
        gated=True,
        gated_delta=_read_gated_delta if "linear_attention" in kinds else None,
        experts=experts,
    )


def layers(spec: TargetSpec) -> tuple[LayerSpec, ...]:
    """Every layer by its type. Raises ValueError for a gated delta layer without dimensions."""
    mixers: dict[LayerType, AttentionSpec | GatedDeltaSpec] = {"full_attention": spec.attention}
    if spec.gated_delta is not None:
        mixers["linear_attention"] = spec.gated_delta
    elif "linear_attention" in spec.layer_types:
        index = spec.layer_types.index("linear_attention")
        raise ValueError(
            f"target.layers.{index} is a linear_attention layer but the spec has no gated delta dimensions"
        )
    parts = spec.feed_forward, spec.rms_norm_eps
    return tuple(LayerSpec(mixers[kind], *parts, plus_one=True) for kind in spec.layer_types)


def _read_gated_delta(fields: Fields) -> GatedDeltaSpec:
    spec = GatedDeltaSpec(
        key_heads=fields["linear_num_key_heads"],
        value_heads=fields["linear_num_value_heads"],
        key_dim=fields["linear_key_head_dim"],
        value_dim=fields["linear_value_head_dim"],
        conv_kernel=fields["linear_conv_kernel_dim"],
    )
    if spec.value_heads % spec.key_heads:
        raise fields.error("linear_num_value_heads", spec.value_heads, f"a multiple of {spec.key_heads} key heads")
    return spec


def _same(text: object, config: Mapping[str, Any], key: str) -> bool:
    """Whether ``text`` is an object with the key and the value that ``config`` has."""
    return isinstance(text, dict) and key in text and json.dumps(text[key]) == json.dumps(config[key])
