"""Qwen3: RMSNorm with plain weight, full attention with rotary embedding over the whole head; dense, or with experts.

Equations: Qwen3 technical report and the Hugging Face ``qwen3`` modelling code's conventions (hidden_states[L+1] is
the output of layer L). The mixture of experts (30B-A3B, Coder-30B-A3B) is in every layer and has no shared expert.
"""

from __future__ import annotations

from typing import cast

from edge_dflash.model.config import EXPERTS, TARGET, read_experts, read_target
from edge_dflash.model.fields import Fields, Table, flag, free, names, only
from edge_dflash.model.specs import ExpertsSpec, LayerSpec, LayerType, TargetSpec

TABLE: Table = {
    **TARGET,
    **only("model_type", "qwen3", why="another model"),
    **free("no layer of a target slides", "sliding_window max_window_layers"),
    "layer_types": names("full_attention"),
    "use_sliding_window": flag(False, beside="layer_types is given"),
}
"""config.json of a dense target."""

MOE_TABLE: Table = {
    **TABLE,
    **EXPERTS,
    **only("model_type", "qwen3_moe", why="another model"),
    "norm_topk_prob": flag(False),
    **only("shared_expert_intermediate_size", None, 0, why="a shared expert"),
}
"""config.json of a target with experts."""


def read(config: Fields, architecture: str = "qwen3", experts: ExpertsSpec | None = None) -> TargetSpec:
    """Spec of a target. Raises CheckpointError."""
    layers = config["num_hidden_layers"]
    if config.has("layer_types"):
        kinds = config.choices("layer_types", layers)
    elif config["use_sliding_window"]:
        raise config.error("use_sliding_window", True, "false for a Qwen3 target")
    else:
        kinds = ("full_attention",) * layers
    return read_target(config, config, architecture, cast("tuple[LayerType, ...]", kinds), gated=False, experts=experts)


def read_moe(config: Fields) -> TargetSpec:
    """Spec of a target with experts. Raises CheckpointError."""
    return read(config, "qwen3_moe", read_experts(config, renormalised=config["norm_topk_prob"]))


def layers(spec: TargetSpec) -> tuple[LayerSpec, ...]:
    """All layers, of one kind."""
    return (LayerSpec(spec.attention, spec.feed_forward, spec.rms_norm_eps),) * spec.num_layers
