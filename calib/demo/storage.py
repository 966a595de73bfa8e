"""The demo target as a Hugging Face checkpoint: config.json and one BF16 safetensors file. Knows no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from calib.demo.model import Target, TargetConfig
from calib.demo.tokenizer import END_OF_TEXT_ID, END_OF_TURN_ID

_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings"),
)  # fields that its file has under our names
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


def save_model(model: Target, directory: Path) -> None:
    """Write config.json and model.safetensors (BF16, tensors in name order) into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(target_config_json(model.c), indent=1) + "\n", encoding="utf-8")
    held = sorted(model.state_dict().items())
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in held}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})


def load_target(directory: Path, device: str = "cpu") -> Target:
    """The target of a checkpoint directory, in float32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    target = Target(target_config(config))
    target.load_state_dict({n: t.float() for n, t in load_file(str(directory / "model.safetensors")).items()})
    return target.to(device)
