"""Qwen3 dense: RMSNorm with plain weight, full attention with rotary embedding over the whole head.

Equations: Qwen3 technical report and the Hugging Face ``qwen3`` modelling code's conventions (hidden_states[L+1] is
the output of layer L).
"""

from __future__ import annotations

from edge_dflash.model.blocks import attention, mlp
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.specs import TargetSpec

NORM_PLUS_ONE = False


def layer(g: GraphBuilder, x: str, spec: TargetSpec, index: int) -> str:
    """One decoder layer; returns its output, which is what a tap with this index reads."""
    prefix = f"target.layers.{index}"
    x = attention(g, x, prefix, spec.attention, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)
    return mlp(g, x, prefix, spec.intermediate_size, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)
