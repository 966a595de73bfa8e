"""The DFlash block-diffusion drafter: context append from the target's taps, and the block pass.

Paper: DFlash, arXiv 2602.06036. All norms use the plain weight; rotary embedding covers the whole head with the
drafter's own theta; embedding and output head are the target's.

What a block row of each drafter layer sees of its block and of the context, by the drafter's config.json.

    inside the block   is_causal, else dflash_config.causal: one answer for all layers, full ones included
                       neither: layers that layer_types calls sliding are causal, the others bidirectional
    window             layers that layer_types calls sliding; all layers with dflash_config.use_swa
    its size           dflash_config.swa_window_size, else sliding_window

That is vLLM's order (qwen3_dflash.py at 036a00d, pull request 52816; a window over a bidirectional layer is symmetric,
46104), and z-lab's since commit 10129599; their older releases lost or mirrored the window. SGLang (models/dflash.py at
003b23d) reads layer_types alone, which gives the same where no flag is set. One row differs, which no published drafter
has: with use_swa next to layer_types that name full layers, vLLM leaves these without a window; here use_swa means
every layer. A recipe's ``masks`` sets any layer's otherwise.
"""

from __future__ import annotations

from edge_dflash.model.blocks import decoder_layer, draft_rows, embed, logits
from edge_dflash.model.builder import GraphBuilder
from edge_dflash.model.config import DECODER, either, read_attention, trained
from edge_dflash.model.fields import Fields, Table, flag, free, inner, integer, integers, names, only
from edge_dflash.model.ops import KvAppend, Remap
from edge_dflash.model.program import Program
from edge_dflash.model.specs import MAX_BLOCK, MAX_LAYERS, DrafterLayerMask, DrafterSpec, LayerSpec, TargetSpec

NAMES = ("DFlashDraftModel",)
FULL, SLIDING = "full_attention", "sliding_attention"
COPIES = {
    "embed_tokens.weight": "target.embed_tokens",
    "lm_head.weight": "target.lm_head",
    "verifier_lm_head.weight": "target.lm_head",
}
"""Tensors of the target that a drafter's files may repeat."""
DRAFT_IDS, DRAFTED = "drafter.d2t", "t2d"
"""Ids of a draft vocabulary, in files as distances from its own; and a tensor that marks them."""
TRAINED_WITH = ("verifier_norm.",)  # beginnings of tensors that only training reads
BLOCK: Table = {
    "block_size": integer(least=2, most=MAX_BLOCK, null=True),
    "mask_token_id": integer(least=0, null=True),
    "target_layer_ids": integers(least=-1, null=True),
    # vLLM and SGLang read the style of the drafter's own rotation; all targets here rotate halves, and so do drafters.
    **only("is_neox_style rope_is_neox_style", None, True, why="rotary pairs that are neighbours, not halves"),
    **only("attention_sink_bias add_swa_attention_sink_bias", None, False, why="a learned sink in every softmax"),
    **only("input_embedding_scale output_multiplier logit_scale", None, 1, 1.0, why="scaled embeddings or logits"),
    **only("final_logit_softcapping", None, why="capped logits"),
    **only("projector_type", None, "dflash", why="another drafter design"),
    **only("attention_mode", None, "gqa", why="another attention"),
    **only("use_aux_hidden_state", None, True, why="a drafter that sees no hidden states of the target"),
    **only("mask_embedding", None, False, why="a mask row of the drafter's, not the target's"),
}
"""Keys of all drafters, outside or in the object ``dflash_config``."""
ROWS: Table = {
    **only("sample_from_anchor shift_labels shifted", None, False, why="a DSpark/DeepSpec drafter: shifted rows"),
    **only("markov_rank markov_head_type enable_confidence_head", None, why="a DSpark/DeepSpec drafter: shifted rows"),
    **only("confidence_head_with_markov dspark_draft_topk", None, why="a DSpark/DeepSpec drafter: shifted rows"),
}
"""Keys of DSpark drafters."""


def table(block: Table) -> Table:
    """config.json of a kind that has the keys ``block`` besides those of all drafters."""
    block = {**BLOCK, "num_target_layers": integer(most=MAX_LAYERS, null=True), **block}
    return {
        **DECODER,
        **block,
        **only("model_type", "qwen3", why="another model"),
        **only("speculators_model_type transformer_layer_config", None, why="the speculators format, not z-lab's"),
        **free("embedding and head are the target's", "tie_word_embeddings"),
        **free("the target's stop tokens count", "eos_token_id"),
        "max_position_embeddings": integer(beside="YaRN has original_max_position_embeddings, or there is no YaRN"),
        "draft_vocab_size": integer(null=True),
        "layer_types": names("full_attention", "sliding_attention"),
        "use_sliding_window": flag(False, null=True, beside="layer_types is given"),
        "sliding_window": integer(null=True, beside="no layer slides, or swa_window_size is given"),
        "max_window_layers": integer(least=0, null=True, beside="layer_types is given, or no layer slides"),
        "is_causal": flag(null=True, beside="it says what layer_types say"),
        "dflash_config": inner(
            {
                **block,
                "causal": flag(null=True, beside="is_causal is given, or says what layer_types say"),
                "is_causal": flag(
                    null=True, beside="causal or the outer is_causal is given, or says what layer_types say"
                ),
                "use_swa": flag(False, null=True, beside="all layers slide"),
                "swa_window_size": integer(null=True, beside="no layer slides"),
            }
        ),
    }


TABLE = table(
    {**ROWS, **only("conv_kernel_size conv_group_size selector_rank selector_top_k", None, why="a DFlash2 drafter")}
)


def read(fields: Fields, target_layers: int | None) -> DrafterSpec:
    """Spec of a drafter. Raises CheckpointError, also for a value that is missing and that only its training knows.

    ``target_layers``: of its target, where the file does not say it; None: the fewest for its taps.
    """
    dflash = fields.child("dflash_config")
    if not (taps := trained("target_layer_ids", dflash, fields)):
        raise fields.error("target_layer_ids", [], "at least one layer id")
    if (depth := either("num_target_layers", fields, dflash)).has("num_target_layers"):
        target_layers = depth["num_target_layers"]
    vocab = fields["vocab_size"]
    drafted = fields["draft_vocab_size"] if fields.has("draft_vocab_size") else vocab
    if drafted > vocab:
        raise fields.error("draft_vocab_size", drafted, f"at most vocab_size ({vocab})")
    return DrafterSpec(
        block_size=trained("block_size", fields, dflash),
        mask_token_id=trained("mask_token_id", dflash, fields),
        target_layer_ids=taps,
        num_target_layers=max(taps) + 2 if target_layers is None else target_layers,
        vocab_size=vocab,
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        rms_norm_eps=fields["rms_norm_eps"],
        attention=read_attention(fields, gated=False),
        layers=_read_masks(fields, dflash, fields["num_hidden_layers"]),
        draft_vocab=None if drafted == vocab else drafted,
    )


def whole_vocabulary(fields: Fields, spec: DrafterSpec) -> None:
    """Raise CheckpointError for a drafter whose head drafts from a part of the vocabulary."""
    if spec.draft_vocab is not None:
        wanted = f"vocab_size ({spec.vocab_size}): this kind drafts from the whole vocabulary"
        raise fields.error("draft_vocab_size", spec.draft_vocab, wanted)


def _read_masks(fields: Fields, dflash: Fields, layers: int) -> tuple[DrafterLayerMask, ...]:
    """Mask of each layer, as the table at the top of this file says."""
    types = _layer_types(fields, layers)
    windows = dflash["use_swa"]
    flags = ((fields, "is_causal"), (dflash, "causal"), (dflash, "is_causal"))
    causal = next((place[key] for place, key in flags if place.has(key)), None)
    size = None
    if windows or SLIDING in types:
        own = dflash.has("swa_window_size")
        size = dflash["swa_window_size"] if own else fields["sliding_window"]
    return tuple(
        DrafterLayerMask(
            bidirectional=kind == FULL if causal is None else not causal,
            window=size if windows or kind == SLIDING else None,
        )
        for kind in types
    )


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """``use_sliding_window`` is not asked next to ``layer_types``: published drafters set it or leave it out.

    Without the list it means what it means to transformers: layers from ``max_window_layers`` on slide.
    """
    if fields.has("layer_types"):
        return fields.choices("layer_types", layers)
    if fields["use_sliding_window"] and fields.has("sliding_window"):
        first = fields["max_window_layers"]
        return tuple(SLIDING if i >= first else FULL for i in range(layers))
    return (FULL,) * layers


def append_context(g: GraphBuilder, taps: str, spec: DrafterSpec) -> None:
    """Every layer's context K/V of the pass's rows, from f = RMS(W_fc taps; hidden_norm)."""
    f = g.linear(taps, "drafter.fc", spec.hidden_size, "fc", "drafter.fc_out")
    f = g.rms_norm(f, "drafter.hidden_norm", spec.rms_norm_eps, "drafter.feature", plus_one=False)
    kv_columns = spec.attention.kv_heads * spec.attention.head_dim
    for index in range(spec.num_layers):
        prefix = f"drafter.layers.{index}"
        k = g.linear(f, f"{prefix}.self_attn.k_proj", kv_columns, "attention", f"{prefix}.ctx_k")
        v = g.linear(f, f"{prefix}.self_attn.v_proj", kv_columns, "attention", f"{prefix}.ctx_v")
        geometry = spec.attention
        op = KvAppend(
            inputs=(k, v),
            output=f"{prefix}.ctx",
            state=g.kv_state(k, v, prefix, geometry),
            k_norm=g.weight(f"{prefix}.self_attn.k_norm", (geometry.head_dim,), "vector", "norm"),
            eps=spec.rms_norm_eps,
            plus_one=False,
            rope=geometry.rope,
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
        )
        g.emit(op, 0)


def layers(spec: DrafterSpec) -> tuple[LayerSpec, ...]:
    """Every layer by its mask."""
    return tuple(
        LayerSpec(
            spec.attention,
            spec.intermediate_size,
            spec.rms_norm_eps,
            bidirectional=mask.bidirectional,
            window=mask.window,
            conv=spec.conv,
        )
        for mask in spec.layers
    )


def block(g: GraphBuilder, target: TargetSpec, spec: DrafterSpec) -> str:
    """Final hidden rows of the block [anchor, mask, ...]."""
    x = embed(g, target)
    for index, layer in enumerate(layers(spec)):
        x = decoder_layer(g, x, f"drafter.layers.{index}", layer)
    return g.rms_norm(x, "drafter.norm", spec.rms_norm_eps, "drafter.hidden", plus_one=False)


def propose(g: GraphBuilder, target: TargetSpec, spec: DrafterSpec) -> Program:
    """[anchor, mask x (B-1)] -> logits of the B-1 draft rows; row r proposes the token at position length + r."""
    x = block(g, target, spec)
    rows = draft_rows(g, x, spec)
    if spec.draft_vocab is None:
        return g.program(logits=logits(g, rows, target), hidden=x)
    own = g.linear(rows, "drafter.lm_head", spec.draft_vocab, "lm_head", "draft_logits")
    if spec.draft_vocab > target.vocab_size:
        raise ValueError(f"{spec.draft_vocab} drafted tokens of a vocabulary of {target.vocab_size}")
    ids = g.weight(DRAFT_IDS, (spec.draft_vocab,), "vector", "ids")
    op = Remap(inputs=(own,), output="logits", weight=ids, vocab=target.vocab_size)
    return g.program(logits=g.emit(op, target.vocab_size), hidden=x)
