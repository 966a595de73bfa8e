"""The DFlash block-diffusion drafter: context append from the target's taps, and the block pass.

Paper: DFlash, arXiv 2602.06036. All norms use the plain weight; rotary embedding covers the whole head with the
drafter's own theta; embedding and output head are the target's.
"""

from __future__ import annotations

from edge_dflash.model.blocks import attention, mlp
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.specs import DrafterSpec


def append_context(g: GraphBuilder, taps: str, spec: DrafterSpec) -> None:
    """Every layer's context K/V of the pass's rows, from f = RMS(W_fc taps; hidden_norm)."""
    f = g.linear(taps, "drafter.fc", spec.hidden_size, "fc", "drafter.fc_out")
    f = g.rms_norm(f, "drafter.hidden_norm", spec.rms_norm_eps, "drafter.feature", plus_one=False)
    kv_columns = spec.attention.kv_heads * spec.attention.head_dim
    for index in range(spec.num_layers):
        prefix = f"drafter.layers.{index}"
        k = g.linear(f, f"{prefix}.self_attn.k_proj", kv_columns, "attention", f"{prefix}.ctx_k")
        v = g.linear(f, f"{prefix}.self_attn.v_proj", kv_columns, "attention", f"{prefix}.ctx_v")
        g.kv_append(k, v, prefix, spec.attention, spec.rms_norm_eps, f"{prefix}.ctx")


def block(g: GraphBuilder, x: str, spec: DrafterSpec) -> str:
    """Final hidden rows of the block [anchor, mask, ...]; row r proposes the token at position length + r."""
    for index, mask in enumerate(spec.layers):
        prefix = f"drafter.layers.{index}"
        x = attention(
            g,
            x,
            prefix,
            spec.attention,
            spec.rms_norm_eps,
            plus_one=False,
            bidirectional=mask.bidirectional,
            window=mask.window,
        )
        x = mlp(g, x, prefix, spec.intermediate_size, spec.rms_norm_eps, plus_one=False)
    return g.rms_norm(x, "drafter.norm", spec.rms_norm_eps, "drafter.hidden", plus_one=False)
