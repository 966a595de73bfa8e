"""The demo models as Hugging Face checkpoints: config.json and one BF16 safetensors file. Knows no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from calib.demo.drafter import Drafter, DrafterConfig
from calib.demo.model import Target, TargetConfig
from calib.demo.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings"),
)  # fields that target and drafter files have under our names
Model = TypeVar("Model", bound=nn.Module)
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
    """config.json of a DFlash checkpoint."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **{name: getattr(c, name) for name in _SAME},
        "num_hidden_layers": len(c.sliding),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": c.block_size,
        "num_target_layers": c.num_target_layers,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids)},
        "layer_types": ["sliding_attention" if sliding else "full_attention" for sliding in c.sliding],
        "use_sliding_window": True,
        "sliding_window": c.sliding_window,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
    }


def drafter_config(config: dict[str, Any]) -> DrafterConfig:
    """The sizes in a config.json that :func:`drafter_config_json` wrote, or of the same form."""
    return DrafterConfig(
        **{name: config[name] for name in _SAME},
        sliding=tuple(kind == "sliding_attention" for kind in config["layer_types"]),
        sliding_window=config["sliding_window"],
        block_size=config["block_size"],
        mask_token_id=config["dflash_config"]["mask_token_id"],
        target_layer_ids=tuple(config["dflash_config"]["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        rope_theta=config["rope_theta"],
    )


def save_model(model: Target | Drafter, directory: Path) -> None:
    """Write config.json and model.safetensors (BF16, tensors in name order) into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    config = target_config_json(model.c) if isinstance(model, Target) else drafter_config_json(model.c)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {
        name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in sorted(model.state_dict().items())
    }
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def load_target(directory: Path, device: str = "cpu") -> Target:
    """The target of a checkpoint directory, in float32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return _filled(Target(target_config(config)), directory, device)


def load_drafter(directory: Path, device: str = "cpu") -> Drafter:
    """The drafter of a checkpoint directory, in float32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return _filled(Drafter(drafter_config(config)), directory, device)


def _filled(model: Model, directory: Path, device: str) -> Model:
    tensors = load_file(str(directory / "model.safetensors"))
    model.load_state_dict({name: t.float() for name, t in tensors.items()})
    return model.to(device)
