"""Qwen3 with a mixture of experts in every layer (30B-A3B, Coder-30B-A3B): Qwen3 but for the MLP, no shared expert."""

from __future__ import annotations

from edge_dflash.model import qwen3
from edge_dflash.model.config import EXPERTS, read_experts
from edge_dflash.model.fields import Fields, Table, flag, only
from edge_dflash.model.specs import TargetSpec

KIND = "qwen3_moe"
NAMES = ("Qwen3MoeForCausalLM",)
TABLE: Table = {
    **qwen3.TABLE,
    **EXPERTS,
    **only("model_type", "qwen3_moe", why="another model"),
    "norm_topk_prob": flag(False),
    **only("shared_expert_intermediate_size", None, 0, why="a shared expert"),
}
"""config.json."""


def read(config: Fields) -> TargetSpec:
    """Spec of a target. Raises CheckpointError."""
    return qwen3.read(config, KIND, read_experts(config, renormalised=config.flag("norm_topk_prob")))
