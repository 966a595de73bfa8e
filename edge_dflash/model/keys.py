"""The table of configuration keys: what each key that a checkpoint's JSON files may hold means to this version.

A key is read, refused unless it has a certain value, or without effect on the maths for the reason given. A key that
is in no table is refused by name. Types, ranges and defaults stand here alone: :class:`Fields` checks every key of a
file against its table before the first one is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from edge_dflash.model.fields import ANY, Key, Table, flag, free, inner, integer, names, number, only, text
from edge_dflash.model.specs import MAX_BLOCK, MAX_LAYERS

_LIBRARY: Table = {
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
_DECODER: Table = {
    **_LIBRARY,
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
_TARGET: Table = {
    **_DECODER,
    "tie_word_embeddings": flag(False),
    "eos_token_id": Key("read", "tokens", null=True),
    **only("is_causal", True, why="a target that sees ahead"),
    **only("text_config", None, why="the text part of another architecture"),
}
_QWEN3: Table = {
    **_TARGET,
    **only("model_type", "qwen3", why="another model"),
    **free("no layer of a target slides", "sliding_window max_window_layers"),
    "layer_types": names("full_attention"),
    "use_sliding_window": flag(False, beside="layer_types is given"),
}
_IMAGES = free(
    "no image comes in",
    "image_token_id video_token_id vision_start_token_id vision_end_token_id language_model_only",
)
_ALL_FULL = "all layers are full_attention"
_QWEN3_5: Table = {
    **_TARGET,
    **_IMAGES,
    **only("model_type", "qwen3_5", "qwen3_5_text", why="another model"),
    "head_dim": integer(256),
    "partial_rotary_factor": number(0.25, beside="rope_parameters or rope_scaling has it"),
    "layer_types": names("full_attention", "linear_attention"),
    "full_attention_interval": integer(4, beside="layer_types is given"),
    "linear_num_key_heads": integer(beside=_ALL_FULL),
    "linear_num_value_heads": integer(beside=_ALL_FULL),
    "linear_key_head_dim": integer(beside=_ALL_FULL),
    "linear_value_head_dim": integer(beside=_ALL_FULL),
    "linear_conv_kernel_dim": integer(4, least=2, beside=_ALL_FULL),
    **only("attn_output_gate", True, why="attention without its gate"),
    **only("output_gate_type", "swish", "silu", why="another gate"),
    **only("mamba_ssm_dtype", "float32", None, why="a rounded state of gated delta layers"),
    **only("use_sliding_window", False, None, why="a target with sliding layers"),
    **only("sliding_window", None, why="a target with sliding layers"),
    **free(
        "the multi-token-prediction head is not used",
        "mtp_num_hidden_layers mtp_use_dedicated_embeddings num_nextn_predict_layers",
    ),
}
QWEN3_5_NAMES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
FLAT: Mapping[str, Table] = {"qwen3": _QWEN3, "qwen3_5": _QWEN3_5}
"""config.json of a target of text alone, by architecture."""

NESTED: Table = {
    **_LIBRARY,
    **_IMAGES,
    **free("no image comes in", "vision_config"),
    **{key: _TARGET[key] for key in ("tie_word_embeddings", "eos_token_id", "is_causal")},
    **only("model_type", "qwen3_5", "qwen3_5_text", why="another model"),
    "text_config": inner(
        {
            **_QWEN3_5,
            **only("architectures", None, [], *([name] for name in QWEN3_5_NAMES), why="another model"),
        }
    ),
}
"""config.json of a Qwen3.5 target with ``text_config``.

Tools also write keys of ``text_config`` a second time beside it: those that say the same have no effect.
"""

_BLOCK: Table = {
    "block_size": integer(least=2, most=MAX_BLOCK, null=True),
    "mask_token_id": integer(least=0, null=True),
    "target_layer_ids": Key("read", "integers", null=True),
    **only("sample_from_anchor shift_labels shifted", None, False, why="a DSpark/DeepSpec drafter: shifted rows"),
    **only("markov_rank markov_head_type enable_confidence_head", None, why="a DSpark/DeepSpec drafter: shifted rows"),
    # vLLM and SGLang read the style of the drafter's own rotation; all targets here rotate halves, and so do drafters.
    **only("is_neox_style rope_is_neox_style", None, True, why="rotary pairs that are neighbours, not halves"),
    **only("attention_sink_bias add_swa_attention_sink_bias", None, False, why="a learned sink in every softmax"),
    **only("input_embedding_scale output_multiplier logit_scale", None, 1, 1.0, why="scaled embeddings or logits"),
    **only("final_logit_softcapping", None, why="capped logits"),
    **only("projector_type", None, "dflash", why="another drafter design"),
    **only("attention_mode", None, "gqa", why="another attention"),
    **only("use_aux_hidden_state", None, True, why="a drafter that sees no hidden states of the target"),
}
DRAFTER: Table = {
    **_DECODER,
    **_BLOCK,
    **only("model_type", "qwen3", why="another model"),
    **only("speculators_model_type transformer_layer_config", None, why="the speculators format, not z-lab's"),
    **free("embedding and head are the target's", "tie_word_embeddings"),
    **free("the target's stop tokens count", "eos_token_id"),
    "max_position_embeddings": integer(beside="YaRN has original_max_position_embeddings, or there is no YaRN"),
    "num_target_layers": integer(most=MAX_LAYERS),
    "draft_vocab_size": integer(null=True),
    "layer_types": names("full_attention", "sliding_attention"),
    "use_sliding_window": flag(False, null=True, beside="layer_types is given"),
    "sliding_window": integer(null=True, beside="no layer slides, or swa_window_size is given"),
    "max_window_layers": integer(0, least=0, null=True, beside="layer_types is given, or no layer slides"),
    "is_causal": flag(null=True, beside="it says what layer_types say"),
    "dflash_config": inner(
        {
            **_BLOCK,
            "causal": flag(null=True, beside="is_causal is given, or says what layer_types say"),
            "is_causal": flag(null=True, beside="causal or the outer is_causal is given, or says what layer_types say"),
            "use_swa": flag(False, null=True, beside="all layers slide"),
            "swa_window_size": integer(null=True, beside="no layer slides"),
        }
    ),
}
GENERATION: Table = {
    "eos_token_id": Key("read", "tokens", null=True),
    **free("a request says how its tokens are chosen", ANY),
}
"""generation_config.json."""

_SCALES: Table = {
    **free("how the scales were found", "observer observer_kwargs scale_dtype zp_dtype"),
    **only("symmetric", True, None, why="zero points"),
    **only("dynamic", False, None, why="scales that are not stored"),
    # "static" and "weight" are the order in which weights were rounded; they are stored in their own
    **only("actorder", False, None, "static", "weight", why="reordered groups"),
    **only("block_structure", None, why="scales of another shape"),
}
_KV_CACHE: Table = {
    **_SCALES,
    **only("num_bits", 8, why="a KV cache of another format", required=True),
    **only("type", "float", why="a KV cache of another format", required=True),
    **only("strategy", "tensor", None, why="not one scale a tensor"),
    **only("group_size", None, why="not one scale a tensor"),
}
_WEIGHTS: Table = {
    **_SCALES,
    "num_bits": integer(),
    "type": text(),
    "group_size": integer(16, null=True),
    **only("strategy", "tensor", "channel", "tensor_group", None, why="scales of another shape"),
}
_ACTIVATIONS: Table = {
    **only("num_bits", 4, 8, why="another format of activations"),
    **only("type", "float", why="another format of activations"),
    **only("symmetric", True, None, why="zero points"),
    **free("the recipe and the stored input scales say how activations are rounded", ANY),
}
_FORMAT = only(
    "format",
    *("nvfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense", None),
    why="another format of weights",
)
_GROUP: Table = {
    **_FORMAT,
    "targets": names(),
    "weights": inner(_WEIGHTS, late=True),  # of a group of modules that are not used, such as mtp.*, nothing counts
    "input_activations": inner(_ACTIVATIONS),
    **only("output_activations", None, why="quantized outputs"),
}
COMPRESSED_TENSORS: Table = {
    **_FORMAT,
    **only("quant_method", "compressed-tensors", why="another format"),
    "config_groups": inner({ANY: inner(_GROUP)}),
    "ignore": names(),
    "kv_cache_scheme": inner(_KV_CACHE),
    **only("transform_config", None, {}, {"config_groups": {}}, why="weights in another basis"),
    "sparsity_config": inner({**only("format", "dense", None, why="sparse weights"), **free("dense weights", ANY)}),
    **free("the tensors show it", "quantization_status global_compression_ratio version run_compressed"),
}
"""quantization_config of compressed-tensors."""

_ALGORITHM: Table = {
    "quant_algo": text(default="", null=True),
    **only("group_size", 16, None, why="NVFP4 has groups of 16"),
    **only("has_zero_point", False, None, why="zero points"),
    **free("such scales are tensors, which are refused", "pre_quant_scale awq_block_size"),
}
MODELOPT: Table = {
    **_ALGORITHM,
    **only("quant_method", "modelopt", why="another format"),
    "kv_cache_quant_algo": text("FP8", default="FP8", null=True),
    "kv_cache_scheme": inner(_KV_CACHE, "FP8"),  # the text: ModelOpt before 0.33
    "ignore": names(),
    "exclude_modules": names(),
    "quantized_layers": inner({ANY: inner(_ALGORITHM)}),
    **free("quant_algo and quantized_layers say the same", "config_groups"),
    **free("a note of the tool that wrote the file", "producer"),
}
"""quantization_config of ModelOpt, and ``quantization`` of hf_quant_config.json."""

HF_QUANT: Table = {
    "quantization": inner(MODELOPT),
    **only("quant_method", "modelopt", None, why="another format"),
    **free("a note of the tool that wrote the file", "producer"),
}
"""hf_quant_config.json, and quantization_config of drafters that ModelOpt writes."""
