"""What Qwen3, Qwen3.5 and the drafters share: SwiGLU MLP, attention projections, the output head."""

from __future__ import annotations

from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.experts import experts
from edge_dflash.model.specs import AttentionSpec, DrafterSpec, TargetSpec


def mlp(g: GraphBuilder, x: str, prefix: str, intermediate: int, eps: float, *, plus_one: bool) -> str:
    """x + W_down(silu(W_gate m) * W_up m) with m = RMS(x; post_attention_layernorm). Returns the layer's output."""
    m = g.rms_norm(x, f"{prefix}.post_attention_layernorm", eps, f"{prefix}.mlp_in", plus_one=plus_one)
    return g.add(x, gated_linear(g, m, prefix, intermediate), f"{prefix}.out")


def feed_forward(g: GraphBuilder, x: str, prefix: str, spec: TargetSpec, *, plus_one: bool) -> str:
    """What follows attention in a layer of a target: an MLP, or experts. Returns the layer's output."""
    if spec.experts is not None:
        return experts(g, x, prefix, spec.experts, spec.rms_norm_eps, plus_one=plus_one)
    return mlp(g, x, prefix, spec.intermediate_size, spec.rms_norm_eps, plus_one=plus_one)


def gated_linear(g: GraphBuilder, m: str, prefix: str, intermediate: int) -> str:
    """The MLP of the normed rows m, without the residual."""
    gate = g.linear(m, f"{prefix}.mlp.gate_proj", intermediate, "mlp", f"{prefix}.gate")
    up = g.linear(m, f"{prefix}.mlp.up_proj", intermediate, "mlp", f"{prefix}.up")
    act = g.swiglu(gate, up, f"{prefix}.swiglu")
    return g.linear(act, f"{prefix}.mlp.down_proj", g.columns(m), "mlp", f"{prefix}.down")


def attention(
    g: GraphBuilder,
    x: str,
    prefix: str,
    spec: AttentionSpec,
    eps: float,
    *,
    plus_one: bool,
    bidirectional: bool = False,
    window: int | None = None,
) -> str:
    """x + W_o attend(W_q h, W_k h, W_v h) with h = RMS(x; input_layernorm)."""
    h = g.rms_norm(x, f"{prefix}.input_layernorm", eps, f"{prefix}.attn_in", plus_one=plus_one)
    o = attend(g, h, prefix, spec, eps, plus_one=plus_one, bidirectional=bidirectional, window=window)
    return g.add(x, o, f"{prefix}.mid")


def attend(
    g: GraphBuilder,
    h: str,
    prefix: str,
    spec: AttentionSpec,
    eps: float,
    *,
    plus_one: bool,
    bidirectional: bool = False,
    window: int | None = None,
) -> str:
    """Attention of the normed rows h, without the residual."""
    name, kv_columns = f"{prefix}.self_attn", spec.kv_heads * spec.head_dim
    q_columns = spec.heads * spec.head_dim * (2 if spec.gated else 1)
    q = g.linear(h, f"{name}.q_proj", q_columns, "attention", f"{prefix}.q")
    k = g.linear(h, f"{name}.k_proj", kv_columns, "attention", f"{prefix}.k")
    v = g.linear(h, f"{name}.v_proj", kv_columns, "attention", f"{prefix}.v")
    o = g.attend(
        q, k, v, prefix, spec, eps, f"{prefix}.attn", plus_one=plus_one, bidirectional=bidirectional, window=window
    )
    return g.linear(o, f"{name}.o_proj", g.columns(h), "attention", f"{prefix}.o")


def draft_rows(g: GraphBuilder, x: str, spec: DrafterSpec) -> str:
    """The rows of a block that draft: all but the anchor's (invariant I4), or all."""
    return x if spec.anchor_drafts else g.select_rows(x, "drafts", "draft_rows")


def logits(g: GraphBuilder, x: str, spec: TargetSpec) -> str:
    """The target's output head; the drafter borrows it."""
    return g.linear(x, "target.lm_head", spec.vocab_size, "lm_head", "logits")


def embed(g: GraphBuilder, spec: TargetSpec) -> str:
    """Rows of the target's embedding for the pass's ids; the drafter borrows it."""
    return g.embed("ids", "target.embed_tokens", spec.vocab_size, spec.hidden_size, "embedding")
