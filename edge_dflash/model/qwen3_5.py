"""Qwen3.5 / Qwen3.6 text: gated delta layers and, every few layers, full attention with an output gate.

RMSNorm uses 1 + w everywhere but inside the gated delta layer, whose own norm uses w.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from edge_dflash.model.blocks import attention, feed_forward
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import LIBRARY, TARGET, read_target
from edge_dflash.model.fields import Fields, Table, free, inner, integer, names, number, only
from edge_dflash.model.specs import ExpertsSpec, GatedDeltaSpec, LayerType, TargetSpec

NORM_PLUS_ONE = True
NAMES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
_IMAGES = free(
    "no image comes in",
    "image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only",
)
_ALL_FULL = "all layers are full_attention"
TABLE: Table = {
    **TARGET,
    **_IMAGES,
    **only("model_type", *MODEL_TYPES, why="another model"),
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


def nesting(text: Table, classes: tuple[str, ...], model_types: tuple[str, ...]) -> Table:
    """Table of a config.json with ``text_config``, which has the keys of ``text``.

    Tools also write keys of ``text_config`` a second time beside it: those that say the same have no effect.
    """
    another = only("architectures", None, [], *([name] for name in classes), why="another model")
    return {
        **LIBRARY,
        **_IMAGES,
        **free("no image comes in", "vision_config"),
        **{key: TARGET[key] for key in ("tie_word_embeddings", "eos_token_id", "is_causal")},
        **only("model_type", *model_types, why="another model"),
        "text_config": inner({**text, **another}),
    }


NESTED = nesting(TABLE, NAMES, MODEL_TYPES)
"""config.json of a Qwen3.5 target with ``text_config``."""


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See :func:`flat`."""
    return flat(NESTED, config)


def flat(table: Table, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json without the keys beside ``text_config`` that say what it says; ``table`` is a :func:`nesting`."""
    text = config["text_config"]
    return {key: value for key, value in config.items() if key in table or not _same(text, config, key)}


def read(
    config: Fields, architecture: str = "qwen3_5", experts: Callable[[Fields], ExpertsSpec] | None = None
) -> TargetSpec:
    """Spec of a target, by a file of text alone or by one with ``text_config``. Raises CheckpointError."""
    text = config.child("text_config") if config.has("text_config") else config
    layers = text.integer("num_hidden_layers")
    if text.has("layer_types"):
        kinds = text.choices("layer_types", layers)
    else:
        interval = text.integer("full_attention_interval")
        kinds = tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers))
    delta = _read_gated_delta if "linear_attention" in kinds else None
    return read_target(
        *(text, config, architecture, cast("tuple[LayerType, ...]", kinds)),
        gated=True,
        gated_delta=delta,
        experts=experts(text) if experts else None,
    )


def layer(g: GraphBuilder, x: str, spec: TargetSpec, index: int) -> str:
    """One decoder layer; returns its output, which is what a tap with this index reads."""
    prefix = f"target.layers.{index}"
    if spec.layer_types[index] == "linear_attention":
        x = _gated_delta(g, x, prefix, spec)
    else:
        x = attention(g, x, prefix, spec.attention, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)
    return feed_forward(g, x, prefix, spec, plus_one=NORM_PLUS_ONE)


def _gated_delta(g: GraphBuilder, x: str, prefix: str, spec: TargetSpec) -> str:
    """x + W_out delta(W_qkv h, W_z h, W_a h, W_b h) with h = RMS1(x; input_layernorm)."""
    delta = spec.gated_delta
    if delta is None:
        raise ValueError(f"{prefix} is a linear_attention layer but the spec has no gated delta dimensions")
    name = f"{prefix}.linear_attn"
    h = g.rms_norm(x, f"{prefix}.input_layernorm", spec.rms_norm_eps, f"{prefix}.delta_in", plus_one=NORM_PLUS_ONE)
    qkv = g.linear(h, f"{name}.in_proj_qkv", delta.conv_channels, "gated_delta", f"{prefix}.qkv")
    z = g.linear(h, f"{name}.in_proj_z", delta.value_heads * delta.value_dim, "gated_delta", f"{prefix}.z")
    a = g.linear(h, f"{name}.in_proj_a", delta.value_heads, "gates", f"{prefix}.a")
    b = g.linear(h, f"{name}.in_proj_b", delta.value_heads, "gates", f"{prefix}.b")
    o = g.gated_delta(qkv, z, a, b, prefix, delta, spec.rms_norm_eps, f"{prefix}.delta")
    o = g.linear(o, f"{name}.out_proj", g.columns(x), "gated_delta", f"{prefix}.delta_out")
    return g.add(x, o, f"{prefix}.mid")


def _read_gated_delta(fields: Fields) -> GatedDeltaSpec:
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


def _same(text: object, config: Mapping[str, Any], key: str) -> bool:
    """Whether ``text`` is an object with the key and the value that ``config`` has."""
    return isinstance(text, dict) and key in text and json.dumps(text[key]) == json.dumps(config[key])
