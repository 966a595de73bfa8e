"""What Qwen3, Qwen3.5 and the drafters share: a decoder layer and its parts, the embedding, the output head."""

from __future__ import annotations

from typing import Literal

from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.ops import GATED, Elementwise, Experts, SharedExpert
from edge_dflash.model.specs import (
    AttentionSpec,
    DrafterSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    GroupedConvSpec,
    LayerSpec,
    TargetSpec,
)


def decoder_layer(g: GraphBuilder, x: str, prefix: str, layer: LayerSpec) -> str:
    """x + mixer(RMS(x)), then y + feed_forward(RMS(y)), convolved before and after where the layer has convolutions.

    Returns the layer's output, which is what a tap with its index reads.
    """
    delta = isinstance(layer.mixer, GatedDeltaSpec)
    name, conv = f"{prefix}.attention_conv", layer.conv
    h = _norm(g, x, f"{prefix}.input_layernorm", layer, f"{prefix}.{'delta' if delta else 'attn'}_in")
    c = _coefficients(g, h, name, conv)
    h = _convolved(g, h, c, name, conv, 0)
    if isinstance(layer.mixer, GatedDeltaSpec):
        o = gated_delta(g, h, prefix, layer.mixer, layer)
    else:
        o = attend(g, h, prefix, layer.mixer, layer)
    x = g.add(x, _convolved(g, o, c, name, conv, 1), f"{prefix}.mid")
    name = f"{prefix}.mlp_conv"
    m = _norm(g, x, f"{prefix}.post_attention_layernorm", layer, f"{prefix}.mlp_in")
    c = _coefficients(g, m, name, conv)
    m = _convolved(g, m, c, name, conv, 0)
    if isinstance(layer.feed_forward, ExpertsSpec):
        y = experts(g, m, prefix, layer.feed_forward)
    else:
        y = gated_linear(g, m, prefix, layer.feed_forward, GATED[layer.activation])
    return g.add(x, _convolved(g, y, c, name, conv, 1), f"{prefix}.out")


def _norm(g: GraphBuilder, x: str, weight: str, layer: LayerSpec, out: str) -> str:
    return g.rms_norm(x, weight, layer.eps, out, plus_one=layer.plus_one)


def _coefficients(g: GraphBuilder, h: str, name: str, conv: GroupedConvSpec | None) -> str | None:
    """Dynamic coefficients of both sides of a sublayer, from its normed input."""
    if conv is None:
        return None
    columns = 2 * conv.taps * (g.columns(h) // conv.group_size)
    return g.linear(h, f"{name}.kernel_projection", columns, "conv", f"{name}.coefficients")


def _convolved(
    g: GraphBuilder, rows: str, c: str | None, name: str, conv: GroupedConvSpec | None, side: Literal[0, 1]
) -> str:
    """Rows before (side 0) or after (1) a sublayer, convolved with coefficients c."""
    if conv is None or c is None:
        return rows
    return g.grouped_conv(rows, c, f"{name}.base_kernel", conv, side, f"{name}.{('before', 'after')[side]}")


def attend(g: GraphBuilder, h: str, prefix: str, spec: AttentionSpec, layer: LayerSpec) -> str:
    """Attention of the normed rows h between its projections, without the residual."""
    name, kv_columns = f"{prefix}.self_attn", spec.kv_heads * spec.head_dim
    q_columns = spec.heads * spec.head_dim * (2 if spec.gated else 1)
    q = g.linear(h, f"{name}.q_proj", q_columns, "attention", f"{prefix}.q")
    k = g.linear(h, f"{name}.k_proj", kv_columns, "attention", f"{prefix}.k")
    v = g.linear(h, f"{name}.v_proj", kv_columns, "attention", f"{prefix}.v")
    o = g.attend(q, k, v, prefix, spec, layer)
    return g.linear(o, f"{name}.o_proj", g.columns(h), "attention", f"{prefix}.o")


def gated_delta(g: GraphBuilder, h: str, prefix: str, spec: GatedDeltaSpec, layer: LayerSpec) -> str:
    """W_out delta(W_qkv h, W_z h, W_a h, W_b h) of the normed rows h, without the residual."""
    name = f"{prefix}.linear_attn"
    qkv = g.linear(h, f"{name}.in_proj_qkv", spec.conv_channels, "gated_delta", f"{prefix}.qkv")
    z = g.linear(h, f"{name}.in_proj_z", spec.value_heads * spec.value_dim, "gated_delta", f"{prefix}.z")
    a = g.linear(h, f"{name}.in_proj_a", spec.value_heads, "gates", f"{prefix}.a")
    b = g.linear(h, f"{name}.in_proj_b", spec.value_heads, "gates", f"{prefix}.b")
    o = g.gated_delta(qkv, z, a, b, prefix, spec, layer.eps)
    return g.linear(o, f"{name}.out_proj", g.columns(h), "gated_delta", f"{prefix}.delta_out")


def gated_linear(g: GraphBuilder, m: str, prefix: str, intermediate: int, gated: type[Elementwise]) -> str:
    """The MLP W_down(gated(W_gate m, W_up m)), without the residual."""
    gate = g.linear(m, f"{prefix}.mlp.gate_proj", intermediate, "mlp", f"{prefix}.gate")
    up = g.linear(m, f"{prefix}.mlp.up_proj", intermediate, "mlp", f"{prefix}.up")
    act = g.elementwise(gated, (gate, up), f"{prefix}.swiglu")
    return g.linear(act, f"{prefix}.mlp.down_proj", g.columns(m), "mlp", f"{prefix}.down")


def experts(g: GraphBuilder, m: str, prefix: str, spec: ExpertsSpec) -> str:
    """A mixture of experts over the normed rows m, without the residual.

    Formulas: the configuration and modelling code of transformers' ``qwen3_5_moe``; what that leaves open (ties,
    precision, the order of a sum) is fixed by the op, so that a row never depends on the rows next to it.
    """
    name, hidden = f"{prefix}.mlp", g.columns(m)

    def mlp(module: str, columns: int) -> tuple[str, str, str]:
        shapes = {"gate_proj": (columns, hidden), "up_proj": (columns, hidden), "down_proj": (hidden, columns)}
        gate, up, down = (
            g.weight(f"{name}.{module}.{part}", shape, "linear", "experts") for part, shape in shapes.items()
        )
        return gate, up, down

    gates, ups, downs = zip(*(mlp(f"experts.{index}", spec.intermediate) for index in range(spec.count)), strict=True)
    shared = None
    if spec.shared_intermediate is not None:
        judge = g.weight(f"{name}.shared_expert_gate", (1, hidden), "linear", "router")
        shared = SharedExpert(*mlp("shared_expert", spec.shared_intermediate), judge)
    op = Experts(
        inputs=(m,),
        output=f"{prefix}.experts",
        router=g.weight(f"{name}.gate", (spec.count, hidden), "linear", "router"),
        gates=gates,
        ups=ups,
        downs=downs,
        top_k=spec.chosen,
        renormalised=spec.renormalised,
        shared=shared,
    )
    return g.emit(op, hidden)


def draft_rows(g: GraphBuilder, x: str, spec: DrafterSpec) -> str:
    """The rows of a block that draft: all but the anchor's, or all."""
    return x if spec.anchor_drafts else g.select_rows(x, "drafts", "draft_rows")


def logits(g: GraphBuilder, x: str, spec: TargetSpec) -> str:
    """The target's output head; the drafter borrows it."""
    return g.linear(x, "target.lm_head", spec.vocab_size, "lm_head", "logits")


def embed(g: GraphBuilder, spec: TargetSpec) -> str:
    """Rows of the target's embedding for the pass's ids; the drafter borrows it."""
    return g.embed("ids", "target.embed_tokens", spec.vocab_size, spec.hidden_size, "embedding")
