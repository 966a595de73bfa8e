"""Drafters as vllm-project/speculators writes them (0.9.0), in the keys of z-lab and DeepSpec.

Keys of the layers lie in ``transformer_layer_config``. Taps are numbered as transformers numbers hidden states: 0 is
the embedding, and a layer's is one more than z-lab's. How many layers the target has is not written. Files that are
older than ``sample_from_anchor`` draft from the rows after the anchor, those of DSpark included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_dflash.model import dflash, dflash2, dspark
from edge_dflash.model.config import LIBRARY
from edge_dflash.model.fields import Fields, Table, flag, free, inner, integer, integers, only, text
from edge_dflash.model.specs import MAX_BLOCK

TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
CLASSES = {"dflash": dflash.NAMES[0], "dflash2": dflash2.NAMES[0], "dspark": dspark.NAMES[0]}
_MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_LOCAL = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_OWN = {"dflash": (), "dflash2": _LOCAL, "dspark": _MARKOV}
TABLE: Table = {
    **LIBRARY,
    TYPE: text(*CLASSES),
    LAYER: inner(),
    "aux_hidden_state_layer_ids": integers(least=0),
    "block_size": integer(least=2, most=MAX_BLOCK),
    "mask_token_id": integer(least=0),
    "draft_vocab_size": integer(),
    "target_hidden_size": integer(null=True),
    "sample_from_anchor": flag(False),
    "sliding_window_non_causal": flag(null=True, beside="dflash2's sliding layers are bidirectional, others' causal"),
    "markov_rank": integer(256, least=0),
    "markov_head_type": text(*dspark.KINDS, default="vanilla"),
    "enable_confidence_head": flag(True),
    "confidence_head_with_markov": flag(True),
    "conv_kernel_size": integer(2),
    "conv_group_size": integer(16),
    "selector_rank": integer(256),
    "selector_top_k": integer(16),
    **only("logit_scale", None, 1, 1.0, why="scaled logits"),
    **only("mask_embedding attention_sink_bias", None, False, why="weights that the layers of Qwen3 do not have"),
    **only("is_neox_style rope_is_neox_style", None, True, why="rotary pairs that are neighbours, not halves"),
    **free("how the drafter was trained and is called", "speculators_config speculators_version"),
    **free("a library's way to write defaults", "has_no_defaults_at_init"),
    **free("embedding and head are the target's", "tie_word_embeddings"),
    **free("transformer_layer_config has it", "model_type"),
}
"""config.json."""


def spelled(fields: Fields) -> dict[str, Any]:
    """The same drafter in z-lab's keys. Raises CheckpointError."""
    kind, layer = fields[TYPE], fields.values.get(LAYER)
    if not isinstance(layer, dict):
        raise fields.lacks(LAYER)
    if layer.get("quantization_config"):
        raise fields.error(LAYER, "with a quantization_config", "it beside transformer_layer_config")
    ids = fields["aux_hidden_state_layer_ids"]
    if not ids:
        raise fields.lacks("aux_hidden_state_layer_ids")
    if fields.has("target_hidden_size") and (size := fields["target_hidden_size"]) != layer.get("hidden_size"):
        raise fields.error("target_hidden_size", size, f"the drafter's hidden_size ({layer.get('hidden_size')})")
    for name in (*_MARKOV, *_LOCAL):
        if name in fields.values and name not in _OWN[kind]:
            raise fields.error(name, fields.values[name], f"no such key for a drafter of type {kind!r}")
    anchor, own = fields["sample_from_anchor"], {name: fields[name] for name in _OWN[kind]}
    if anchor and kind == "dflash":  # DSpark without its heads
        kind, own = "dspark", {"markov_rank": 0}
    if kind == "dspark" or anchor:
        own["sample_from_anchor"] = anchor
    given = fields.has("sliding_window_non_causal")
    if fields["sliding_window_non_causal"] if given else kind == "dflash2":
        own["is_causal"] = False
    found = {
        "architectures": [CLASSES[kind]],
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "draft_vocab_size": fields["draft_vocab_size"],
        "target_layer_ids": [index - 1 for index in ids],
        **own,
    }
    for name in found.keys() & layer.keys() - {"architectures"}:
        if layer[name] is not None and layer[name] != found[name]:
            raise fields.error(
                f"{LAYER}.{name}", layer[name], f"no such key, or {found[name]!r} as the keys beside it say"
            )
    return {**layer, **found}


def is_spelled(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this form."""
    return TYPE in config
