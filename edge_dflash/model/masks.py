"""What a block row of each drafter layer sees of its block and of the context, by the drafter's config.json.

    inside the block   is_causal, else dflash_config.causal: one answer for all layers, full ones included
                       neither: layers that layer_types calls sliding are causal, the others bidirectional
    window             layers that layer_types calls sliding; all layers with dflash_config.use_swa
    its size           dflash_config.swa_window_size, else sliding_window

That is vLLM's order (vllm/model_executor/models/qwen3_dflash.py at 036a00d, pull request 52816). z-lab's
model.py agrees since commit 10129599: it reads is_causal, and without it a sliding layer is causal. Its older releases
(44947fb, e763f230) pass is_causal=False to every layer: the window was lost in their eager and SDPA paths and symmetric
in FlashAttention's, and the argument went when masks were built layer by layer. SGLang (python/sglang/srt/models/
dflash.py at 003b23d) reads layer_types alone, which gives the same where no flag is set. A window over a bidirectional
layer is symmetric (vLLM pull request 46104: drafters of MiMo).

They differ in one row: use_swa beside layer_types that name full and sliding layers, which no published drafter has.
vLLM and TensorRT-LLM leave the full ones without a window; here use_swa means every layer. A recipe's ``masks`` sets
any layer's otherwise.
"""

from __future__ import annotations

from edge_dflash.model.fields import Fields
from edge_dflash.model.specs import DrafterLayerMask

FULL, SLIDING = "full_attention", "sliding_attention"


def drafter_masks(fields: Fields, dflash: Fields, layers: int) -> tuple[DrafterLayerMask, ...]:
    """Mask of each of ``layers`` layers; ``dflash`` is the object ``dflash_config``. Raises CheckpointError."""
    types = _layer_types(fields, layers)
    windows = dflash.flag("use_swa")
    flags = ((fields, "is_causal"), (dflash, "causal"), (dflash, "is_causal"))
    causal = next((place.flag(key) for place, key in flags if place.has(key)), None)
    size = None
    if windows or SLIDING in types:
        own = dflash.has("swa_window_size")
        size = dflash.integer("swa_window_size") if own else fields.integer("sliding_window")
    return tuple(
        DrafterLayerMask(
            bidirectional=kind == FULL if causal is None else not causal,
            window=size if windows or kind == SLIDING else None,
        )
        for kind in types
    )


def _layer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """``use_sliding_window`` is not asked beside ``layer_types``: published drafters set it or leave it out.

    Without the list it means what it means to transformers: layers from ``max_window_layers`` on slide.
    """
    if fields.has("layer_types"):
        return fields.choices("layer_types", layers)
    if fields.flag("use_sliding_window") and fields.has("sliding_window"):
        first = fields.integer("max_window_layers")
        return tuple(SLIDING if i >= first else FULL for i in range(layers))
    return (FULL,) * layers
