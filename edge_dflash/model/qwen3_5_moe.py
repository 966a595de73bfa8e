"""Qwen3.5 / Qwen3.6 with a mixture of experts in every layer (35B-A3B, 122B-A10B, 397B-A17B).

All but the MLP is :mod:`edge_dflash.model.qwen3_5`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_dflash.model import qwen3_5
from edge_dflash.model.config import EXPERTS, read_experts
from edge_dflash.model.fields import Fields, Table, integer, only
from edge_dflash.model.specs import ExpertsSpec, TargetSpec

KIND = "qwen3_5_moe"
NAMES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")
TABLE: Table = {
    **qwen3_5.TABLE,
    **EXPERTS,
    **only("model_type", *MODEL_TYPES, why="another model"),
    "shared_expert_intermediate_size": integer(),
    **only("norm_topk_prob", True, why="weights of experts that do not sum to 1"),
}
"""config.json of text alone."""

NESTED = qwen3_5.nesting(TABLE, NAMES, MODEL_TYPES)
"""config.json of a target with ``text_config``."""


def nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """See :func:`edge_dflash.model.qwen3_5.flat`."""
    return qwen3_5.flat(NESTED, config)


def read(config: Fields) -> TargetSpec:
    """Spec of a target. Raises CheckpointError."""
    return qwen3_5.read(config, KIND, _experts)


def _experts(text: Fields) -> ExpertsSpec:
    return read_experts(text, renormalised=True, shared=text.integer("shared_expert_intermediate_size"))
