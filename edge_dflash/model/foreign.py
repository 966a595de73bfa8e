"""Keys that config files of other models and frameworks have, and what each is: nothing that this version computes.

A key that some table knows is that table's; these are for messages alone, so that nobody takes one for another key.
"""

from __future__ import annotations

from collections.abc import Mapping

_KEYS = {
    "a factor on top of YaRN's own attention_factor": "attn_factor",
    "DeepSeek's scale of attention under YaRN": "mscale mscale_all_dim",
    "a factor on the part of YaRN's ramp that extrapolates": "extrapolation_factor",
    "a mark that YaRN was trained, or computed as the context grows": "finetuned dynamic",
    "bounds of Llama 3's rotary scaling": "low_freq_factor high_freq_factor",
    "factors of LongRoPE for each pair": "short_factor long_factor short_mscale long_mscale",
    "a factor on the rotary base or on positions": "alpha rope_ratio rope_factor rope_scaling_factor position_scale",
    "the rotary base under another framework's name": "rope_base rotary_base rotary_emb_base rope_freq_base",
    "the rotary share of a head under another framework's name": "rotary_pct rotary_percent rotary_dim rope_dim",
    "a second rotary base, of layers of another kind": "rope_local_base_freq local_rope_theta global_rope_theta",
    "rotary pairs that are neighbours, not halves": "rope_interleave rope_interleaved interleaved use_interleaved_rope",
    "layers without rotary embedding": "no_rope_layers nope_layers no_rope_layer_interval no_rope_layer_pattern",
    "capped attention scores or logits": "attn_logit_softcapping final_logit_softcapping attn_logit_softcap",
    "another scale of attention scores": "query_pre_attn_scalar attention_multiplier attn_scale softmax_scale",
    "a temperature of attention by position": "attn_temperature_tuning floor_scale llama_4_scaling",
    "scaled embeddings, residuals or logits": """embedding_multiplier residual_multiplier logits_scaling logit_scale
        scale_emb scale_depth dim_model_base input_embedding_scale output_multiplier""",
    "biases of linears": "attn_bias qkv_bias use_bias use_qkv_bias attention_out_bias add_bias_linear",
    "a norm of queries and keys that is switched": "use_qk_norm qk_norm qk_layernorm",
    "the epsilon of another norm": "layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon",
    "norms and residuals in another order": "apply_residual_connection_post_layernorm parallel_residual sandwich_norm",
    "attention in chunks or by another pattern of windows": "attention_chunk_size sliding_window_pattern window_size",
    "compressed attention": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim",
    "a mixture of experts of another kind": """n_routed_experts n_shared_experts num_shared_experts moe_layer_freq
        first_k_dense_replace routed_scaling_factor scoring_func topk_method n_group topk_group moe_topk""",
    "another framework's name of a size": """n_embd n_head n_heads n_kv_heads n_layer n_layers num_layers num_heads
        ffn_dim ffn_hidden_size ffn_hidden head_size kv_channels multi_query_group_num max_seq_len max_sequence_length
        n_positions seq_length""",
    "another framework's name of the activation": "hidden_activation activation_function activation_type",
    "how many tokens somebody's engine drafts": "num_speculative_tokens num_draft_tokens speculative_tokens gamma",
}
FOREIGN: Mapping[str, str] = {key: what for what, keys in _KEYS.items() for key in keys.split()}
"""By key, what it is."""
