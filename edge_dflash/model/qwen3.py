"""Qwen3 dense: RMSNorm with plain weight, full attention with rotary embedding over the whole head.

Equations: Qwen3 technical report and the Hugging Face ``qwen3`` modelling code's conventions (hidden_states[L+1] is
the output of layer L).
"""

from __future__ import annotations

from typing import cast

from edge_dflash.model.blocks import attention, feed_forward
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import TARGET, read_target
from edge_dflash.model.fields import Fields, Table, flag, free, names, only
from edge_dflash.model.specs import ExpertsSpec, LayerType, TargetSpec

NORM_PLUS_ONE = False
NAMES = ("Qwen3ForCausalLM",)
TABLE: Table = {
    **TARGET,
    **only("model_type", "qwen3", why="another model"),
    **free("no layer of a target slides", "sliding_window max_window_layers"),
    "layer_types": names("full_attention"),
    "use_sliding_window": flag(False, beside="layer_types is given"),
}
"""config.json."""


def read(config: Fields, architecture: str = "qwen3", experts: ExpertsSpec | None = None) -> TargetSpec:
    """Spec of a target. Raises CheckpointError."""
    layers = config.integer("num_hidden_layers")
    if config.has("layer_types"):
        kinds = config.choices("layer_types", layers)
    elif config.flag("use_sliding_window"):
        raise config.error("use_sliding_window", True, "false for a Qwen3 target")
    else:
        kinds = ("full_attention",) * layers
    return read_target(config, config, architecture, cast("tuple[LayerType, ...]", kinds), gated=False, experts=experts)


def layer(g: GraphBuilder, x: str, spec: TargetSpec, index: int) -> str:
    """One decoder layer; returns its output, which is what a tap with this index reads."""
    prefix = f"target.layers.{index}"
    x = attention(g, x, prefix, spec.attention, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)
    return feed_forward(g, x, prefix, spec, plus_one=NORM_PLUS_ONE)
