"""The demo models as Hugging Face checkpoints: config.json and one BF16 safetensors file. Knows no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from calib.demo.drafter import ConvConfig, Drafter, DrafterConfig
from calib.demo.heads import MarkovConfig, SelectorConfig
from calib.demo.model import Target, TargetConfig
from calib.demo.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings"),
)  # fields that target and drafter files have under our names
Model = TypeVar("Model", bound=nn.Module)
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"  # names of the target's tensors in a DSpark file
_LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def target_config_json(c: TargetConfig) -> dict[str, Any]:
    """config.json of a text-only Qwen3.5 checkpoint."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        **{name: getattr(c, name) for name in _SAME},
        "num_hidden_layers": c.num_hidden_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        **{f"linear_{name}": getattr(c, f"linear_{name}") for name in _LINEAR},
        "layer_types": ["full_attention" if full else "linear_attention" for full in c.full_layers],
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": c.rope_theta,
            "partial_rotary_factor": c.rotary_dims / c.head_dim,
        },
        "bos_token_id": None,
        "eos_token_id": END_OF_TURN_ID,
        "pad_token_id": END_OF_TEXT_ID,
    }


def target_config(config: dict[str, Any]) -> TargetConfig:
    """The sizes in a config.json that :func:`target_config_json` wrote, or of the same form."""
    rotary = config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]
    return TargetConfig(
        **{name: config[name] for name in _SAME},
        **{f"linear_{name}": config[f"linear_{name}"] for name in _LINEAR},
        num_hidden_layers=config["num_hidden_layers"],
        rotary_dims=round(rotary),
        rope_theta=config["rope_parameters"]["rope_theta"],
    )


def drafter_config_json(c: DrafterConfig) -> dict[str, Any]:
    """config.json of a DFlash, DFlash2 or DSpark checkpoint, each in the form of its first publisher."""
    block = {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)}
    common = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{name: getattr(c, name) for name in _SAME},
        "num_hidden_layers": len(c.sliding),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": c.num_target_layers,
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in c.sliding],
        "use_sliding_window": any(c.sliding),
        "sliding_window": c.sliding_window if any(c.sliding) else None,
    }
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta}}
    if isinstance(c.head, MarkovConfig):
        head: dict[str, Any] = {"markov_rank": c.head.rank, "markov_head_type": c.head.kind}
        head["enable_confidence_head"] = c.head.confidence is not None
        if c.head.confidence is not None:
            head["confidence_head_with_markov"] = c.head.confidence == "markov"
        return {"architectures": ["Qwen3DSparkModel"], **common, **rope, "block_size": c.block_size, **block, **head}
    if isinstance(c.head, SelectorConfig) and c.conv is not None:
        block |= {"block_size": c.block_size, "conv_kernel_size": c.conv.taps, "conv_group_size": c.conv.group_size}
        block |= {"selector_rank": c.head.rank, "selector_top_k": c.head.top_k}
        own = {"architectures": ["DFlash2DraftModel"], "is_causal": c.causal, "max_window_layers": len(c.sliding)}
        return {**own, **common, **rope, "dflash_config": block}
    theta = {"rope_theta": c.rope_theta, "rope_scaling": None}
    own = {"architectures": ["DFlashDraftModel"], "block_size": c.block_size}
    return {**own, **common, "dflash_config": block, **theta}


def drafter_config(config: dict[str, Any]) -> DrafterConfig:
    """The sizes in a config.json that :func:`drafter_config_json` wrote, or of the same form."""
    block = config.get("dflash_config", {}) | config
    kind = config["architectures"][0]
    plain = DrafterConfig(
        **{name: config[name] for name in _SAME},
        sliding=tuple(kind == "sliding_attention" for kind in config["layer_types"]),
        sliding_window=config["sliding_window"] or DrafterConfig.sliding_window,
        block_size=block["block_size"],
        mask_token_id=block["mask_token_id"],
        target_layer_ids=tuple(block["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        rope_theta=config.get("rope_parameters", config)["rope_theta"],
    )
    if kind == "DFlash2DraftModel":
        conv = ConvConfig(block["conv_kernel_size"], block["conv_group_size"])
        selector = SelectorConfig(block["selector_rank"], block["selector_top_k"])
        return replace(plain, causal=config["is_causal"], conv=conv, head=selector)
    if kind == "Qwen3DSparkModel":
        confidence: Literal["hidden", "markov"] | None = None
        if config["enable_confidence_head"]:
            confidence = "markov" if config["confidence_head_with_markov"] else "hidden"
        head = MarkovConfig(config["markov_head_type"], config["markov_rank"], confidence)
        return replace(plain, anchor_drafts=True, head=head)
    return plain


def save_model(model: Target | Drafter, directory: Path, copies: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write config.json and model.safetensors (BF16, tensors in name order) into ``directory``.

    ``copies`` are tensors of the target that the file holds too.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = target_config_json(model.c) if isinstance(model, Target) else drafter_config_json(model.c)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    held = {**model.state_dict(), **(copies or {})}
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in sorted(held.items())}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def target_copies(target: Target, c: DrafterConfig) -> dict[str, torch.Tensor]:
    """The tensors of the target that a drafter's file holds as well: DSpark files do."""
    if c.kind != "dspark":
        return {}
    return {_EMBEDDING: target.model.embed_tokens.weight, _HEAD: target.lm_head.weight}


def load_target(directory: Path, device: str = "cpu") -> Target:
    """The target of a checkpoint directory, in float32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return _filled(Target(target_config(config)), directory, device)


def load_drafter(directory: Path, device: str = "cpu") -> Drafter:
    """The drafter of a checkpoint directory, in float32; copies of the target's tensors are left out."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return _filled(Drafter(drafter_config(config)), directory, device, (_EMBEDDING, _HEAD))


def _filled(model: Model, directory: Path, device: str, without: tuple[str, ...] = ()) -> Model:
    tensors = load_file(str(directory / "model.safetensors"))
    model.load_state_dict({name: t.float() for name, t in tensors.items() if name not in without})
    return model.to(device)
