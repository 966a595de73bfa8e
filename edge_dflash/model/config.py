"""What configurations share: the keys that most have, attention with its rotary embedding, stop tokens.

A key is read, refused unless it has a certain value, or without effect on the maths for the reason given. A key that
is in no table is refused by name. Types, ranges and defaults stand in the tables alone: :class:`Fields` checks every
key of a file against its table before the first one is read. What only one architecture has stands in its own file.
Library config classes drop or default fields that matter here, so config.json is read by our own parsing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_dflash.common.files import is_there
from edge_dflash.common.tables import read_json
from edge_dflash.errors import CheckpointError
from edge_dflash.model.fields import ANY, Fields, Key, Table, flag, free, inner, integer, names, number, only, text
from edge_dflash.model.specs import (
    MAX_EXPERTS,
    MAX_LAYERS,
    AttentionSpec,
    ExpertsSpec,
    GatedDeltaSpec,
    LayerType,
    RopeSpec,
    TargetSpec,
    YarnScaling,
)

LIBRARY: Table = {
    **free(
        "how a library returns its results",
        """output_hidden_states output_attentions output_scores output_router_logits return_dict use_return_dict
        return_dict_in_generate tie_last_hidden_states""",
    ),
    **free(
        "a note of the tool that wrote the file",
        """_name_or_path name_or_path model_name _commit_hash auto_map transformers_version tokenizer_class
        unsloth_fixed unsloth_version _attn_implementation_autoset""",
    ),
    **free(
        "for other tasks than text",
        "id2label label2id num_labels problem_type finetuning_task task_specific_params prefix",
    ),
    **free(
        "used in training alone",
        """attention_dropout gradient_checkpointing hidden_dropout initializer_range num_anchors pretraining_tp
        router_aux_loss_coef""",
    ),
    **free(
        "a library's choice of kernels and memory",
        """attn_implementation _attn_implementation chunk_size_feed_forward experts_implementation tf_legacy_loss
        torchscript use_bfloat16 use_cache""",
    ),
    **free("each tensor says how it is stored", "dtype torch_dtype"),
    **free("a prompt is tokens", "bos_token_id pad_token_id sep_token_id decoder_start_token_id is_decoder"),
    **free(
        "a request says how its tokens are chosen",
        """assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty
        do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
        min_p no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
        num_return_sequences presence_penalty remove_invalid_values repetition_penalty suppress_tokens
        target_lookbehind temperature top_k top_p typical_p""",
    ),
    **only("is_encoder_decoder add_cross_attention tie_encoder_decoder", False, why="a model with an encoder"),
    **only("cross_attention_hidden_size", None, why="a model with an encoder"),
    **only("per_layer_config pruned_heads", None, {}, why="layers that differ from each other"),
    "architectures": names(),
    "quantization_config": inner(),
}
ROPE: Table = {
    "rope_type": text("default", "yarn", default="default"),
    "type": text("default", "yarn", default="default"),
    "rope_theta": number(),
    "partial_rotary_factor": number(),
    "factor": number(),
    "original_max_position_embeddings": integer(),
    "attention_factor": number(None, null=True),
    "beta_fast": number(32.0, null=True),
    "beta_slow": number(1.0, null=True),
    **only("truncate", True, why="YaRN with bounds that are not rounded"),
    **free("the three positions of a text token are equal", "mrope_section mrope_interleaved"),
}
DECODER: Table = {
    **LIBRARY,
    "vocab_size": integer(),
    "hidden_size": integer(),
    "intermediate_size": integer(),
    "num_hidden_layers": integer(most=MAX_LAYERS),
    "num_attention_heads": integer(),
    "num_key_value_heads": integer(),
    "head_dim": integer(128),
    "rms_norm_eps": number(1e-6),
    "max_position_embeddings": integer(),
    "rope_theta": number(null=True, beside="rope_parameters or rope_scaling has it"),
    "partial_rotary_factor": number(1.0, null=True, beside="rope_parameters or rope_scaling has it"),
    "rope_parameters": inner(ROPE),
    "rope_scaling": inner(ROPE),
    **only("attention_bias mlp_bias", False, why="biases of linears"),
    **only("hidden_act", "silu", why="another activation"),
    **only("num_experts num_local_experts num_experts_per_tok", None, 0, why="a mixture-of-experts model"),
    **only("mlp_only_layers", None, [], why="a mixture-of-experts model"),
}
TARGET: Table = {
    **DECODER,
    "tie_word_embeddings": flag(False),
    "eos_token_id": Key("read", "tokens", null=True),
    **only("is_causal", True, why="a target that sees ahead"),
    **only("text_config", None, why="the text part of another architecture"),
}
EXPERTS: Table = {
    **free("every layer has experts", "intermediate_size"),
    "num_experts": integer(most=MAX_EXPERTS, null=True, beside="num_local_experts has it"),
    "num_local_experts": integer(most=MAX_EXPERTS, null=True),
    "num_experts_per_tok": integer(),
    "moe_intermediate_size": integer(),
    **only("decoder_sparse_step", 1, why="layers without experts"),
    **only("mlp_only_layers", None, [], why="layers without experts"),
}
"""What the keys of a dense MLP are where experts stand in its place."""

GENERATION: Table = {
    "eos_token_id": Key("read", "tokens", null=True),
    **free("a request says how its tokens are chosen", ANY),
}
"""generation_config.json."""


def read_target(
    text: Fields,
    outer: Fields,
    architecture: str,
    layers: tuple[LayerType, ...],
    *,
    gated: bool,
    gated_delta: Callable[[Fields], GatedDeltaSpec] | None = None,
    experts: ExpertsSpec | None = None,
) -> TargetSpec:
    """Spec of a target by the fields that all have; ``outer``: those around the part about text.

    ``gated``: attention has output gates, and may rotate a part of each head. ``gated_delta`` reads what layers of that
    kind have; ``experts``: what stands in the place of the MLP. Raises CheckpointError.
    """
    return TargetSpec(
        architecture=architecture,
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=0 if experts else text["intermediate_size"],
        rms_norm_eps=text["rms_norm_eps"],
        attention=read_attention(text, gated=gated),
        gated_delta=gated_delta(text) if gated_delta else None,
        layer_types=layers,
        tied=text["tie_word_embeddings"] or outer["tie_word_embeddings"],
        max_position_embeddings=text["max_position_embeddings"],
        eos_token_ids=_eos(text, outer),
        experts=experts,
    )


def read_experts(text: Fields, *, renormalised: bool, shared: int | None = None) -> ExpertsSpec:
    """A mixture of experts, by a table that has :data:`EXPERTS`. Raises CheckpointError."""
    both = "num_experts", "num_local_experts"
    if len({text[name] for name in both if text.has(name)}) > 1:
        raise text.error(both[0], text[both[0]], f"the same as {both[1]} ({text[both[1]]}); keep one")
    count, chosen = text[both[text.has(both[1])]], text["num_experts_per_tok"]
    if chosen > count:
        raise text.error("num_experts_per_tok", chosen, f"at most num_experts ({count})")
    return ExpertsSpec(count, chosen, text["moe_intermediate_size"], shared, renormalised)


def read_attention(fields: Fields, *, gated: bool) -> AttentionSpec:
    """Softmax attention. Raises CheckpointError."""
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    dim = fields["head_dim"]
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    return AttentionSpec(heads, kv_heads, dim, read_rope(fields, dim, whole=not gated), gated)


_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate")


def read_rope(fields: Fields, head_dim: int, *, whole: bool) -> RopeSpec:
    """Rotary embedding of a model; ``whole``: it rotates whole heads, whatever the file says.

    As in transformers, a key of ``rope_parameters`` wins over the flat key, and ``rope_scaling`` stands in the place of
    ``rope_parameters``; where a file has both, they must agree but for the scaling. Raises CheckpointError for settings
    that do not agree, for other kinds of scaling, and for a YaRN whose ramp would run backwards.
    """
    old, new = (fields.child(name) for name in ("rope_scaling", "rope_parameters"))
    if not old.values:
        return _rope(new, fields, head_dim, whole)
    scaling = _scaling(old, fields)
    if new.has("rope_theta") and not old.has("rope_theta") and not fields.has("rope_theta"):
        raise fields.error("rope_scaling", old.values, "its own rope_theta: it stands in the place of rope_parameters")
    rope = _rope(old, fields, head_dim, whole)
    if new.values:
        other = _rope(new, fields, head_dim, whole)
        if (rope.theta, rope.dims) != (other.theta, other.dims) or other.scaling not in (None, scaling):
            raise fields.error(
                "rope_scaling", old.values, f"the same as rope_parameters ({dict(new.values)}); keep one"
            )
    return rope


def _rope(rope: Fields, fields: Fields, head_dim: int, whole: bool) -> RopeSpec:
    """Rotary embedding by one object of settings, and by the flat keys where it lacks some."""
    scaling = _scaling(rope, fields)
    theta = (rope if rope.has("rope_theta") else fields)["rope_theta"]
    source = rope if rope.has("partial_rotary_factor") else fields
    factor = source["partial_rotary_factor"]
    dims = int(head_dim * factor)
    if dims % 2 or not 0 < dims <= head_dim or dims != head_dim * factor:
        raise source.error("partial_rotary_factor", factor, f"a share of head_dim {head_dim} that is an even number")
    if whole and dims != head_dim:
        raise source.error("partial_rotary_factor", factor, "1: this architecture rotates whole heads")
    if scaling is not None:
        if theta <= 1:
            raise rope.error("rope_theta", theta, "more than 1 for YaRN")
        low, high = scaling.ramp(theta, dims)
        if low > high:
            original = scaling.original_max_position_embeddings
            raise rope.error("original_max_position_embeddings", original, f"a context that fits theta {theta:g}")
    return RopeSpec(theta, dims, scaling)


def _scaling(rope: Fields, fields: Fields) -> YarnScaling | None:
    kind = rope["rope_type" if rope.has("rope_type") else "type"]
    if rope.has("type") and rope["type"] != kind:
        raise rope.error("type", rope["type"], f"the same as rope_type ({kind!r})")
    if kind != "yarn":
        for key in _YARN:
            if rope.has(key):
                raise rope.error(key, rope.values[key], "no such setting without rope_type 'yarn'")
        return None
    if (factor := rope["factor"]) < 1:
        raise rope.error("factor", factor, "a number of at least 1")
    name = "original_max_position_embeddings"
    yarn = YarnScaling(
        factor=factor,
        original_max_position_embeddings=(rope[name] if rope.has(name) else fields["max_position_embeddings"]),
        attention_factor=rope["attention_factor"],
        beta_fast=rope["beta_fast"],
        beta_slow=rope["beta_slow"],
    )
    if yarn.beta_fast < yarn.beta_slow:
        raise rope.error("beta_fast", yarn.beta_fast, f"at least beta_slow ({yarn.beta_slow})")
    return yarn


def either(name: str, first: Fields, second: Fields) -> Fields:
    """Which of two objects holds a field that files keep in either; where both do, they must agree."""
    if not first.has(name):
        return second
    if second.has(name) and first.values[name] != second.values[name]:
        raise first.error(name, first.values[name], f"the same as elsewhere in the file ({second.values[name]!r})")
    return first


def trained(name: str, first: Fields, second: Fields) -> Any:
    """The value of :func:`either`, of a field that only the training knows.

    Raises CheckpointError where neither has it: a guess would cost accept length, and nobody would notice.
    """
    source = either(name, first, second)
    if not source.has(name):
        raise CheckpointError(
            f"{first.file} lacks the field {name}, also inside dflash_config; only the drafter's training knows it: "
            "take config.json as it was published"
        )
    return source[name]


def _eos(text: Fields, outer: Fields) -> tuple[int, ...]:
    """Stop tokens of config.json and generation_config.json, in that order, without repeats."""
    sources = [text, outer]
    if is_there(file := text.file.parent / "generation_config.json"):
        sources.append(Fields(file, read_json(file), GENERATION))
    vocab, found = text["vocab_size"], dict[int, None]()
    for fields in sources:
        for token in fields["eos_token_id"]:
            if type(token) is not int or not 0 <= token < vocab:
                value = fields.values["eos_token_id"]
                raise fields.error("eos_token_id", value, f"a token id below vocab_size {vocab}, or a list of them")
            found[token] = None
    return tuple(found)
