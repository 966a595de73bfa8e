"""Qwen3.5 / Qwen3.6 text: gated delta layers and, every few layers, full attention with an output gate.

RMSNorm uses 1 + w everywhere but inside the gated delta layer, whose own norm uses w.
"""

from __future__ import annotations

from edge_dflash.model.blocks import attention, mlp
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.specs import TargetSpec

NORM_PLUS_ONE = True


def layer(g: GraphBuilder, x: str, spec: TargetSpec, index: int) -> str:
    """One decoder layer; returns its output, which is what a tap with this index reads."""
    prefix = f"target.layers.{index}"
    if spec.layer_types[index] == "linear_attention":
        x = _gated_delta(g, x, prefix, spec)
    else:
        x = attention(g, x, prefix, spec.attention, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)
    return mlp(g, x, prefix, spec.intermediate_size, spec.rms_norm_eps, plus_one=NORM_PLUS_ONE)


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
