"""The files of the demo's eyes: a tower in the form of Hugging Face, and what makes the demo's target see with it.

No tensor of the target is among them: :func:`edge_dflash.demo.tasks.assemble` puts the two together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from calib.demo.eyes import Eyes, EyesConfig
from calib.demo.pictured import GRID
from calib.demo.storage import target_config, target_config_json
from calib.demo.tokenizer import END_OF_TEXT, END_OF_TURN, MASK, TURN
from edge_dflash.demo.tasks import TARGET, TOWER_FILE

VISION_START, IMAGE, VISION_END, VIDEO = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
BYTES = {0xFC: VISION_START, 0xFD: IMAGE, 0xFE: VISION_END, 0xFF: VIDEO}
"""Tokens for bytes that no UTF-8 text has: the target has embeddings for them that nothing else uses."""

PREFIX = "model.visual."

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}
{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is not defined or enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def save_eyes(eyes: Eyes, directory: Path) -> None:
    """Write the tower (BF16) and the files beside it. OSError when that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        PREFIX + name: t.detach().to(torch.bfloat16).contiguous() for name, t in sorted(eyes.state_dict().items())
    }
    save_file(tensors, str(directory / TOWER_FILE), metadata={"format": "pt"})
    files = tokenizer_files()
    ids = {token: files["tokenizer.json"]["model"]["vocab"][token] for token in BYTES.values()}
    files |= {"config.json": config_json(eyes.c, ids), "preprocessor_config.json": preprocessor_json(eyes.c)}
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_eyes(directory: Path) -> Eyes:
    """The tower of :func:`save_eyes`, in float32."""
    vision = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vision_config"]
    c = EyesConfig(
        depth=vision["depth"],
        hidden=vision["hidden_size"],
        heads=vision["num_heads"],
        intermediate=vision["intermediate_size"],
        out=vision["out_hidden_size"],
        patch=vision["patch_size"],
        merge=vision["spatial_merge_size"],
        positions=round(vision["num_position_embeddings"] ** 0.5),
        theta=vision["rope_parameters"]["rope_theta"],
    )
    eyes = Eyes(c, (GRID[0] * c.merge, GRID[1] * c.merge))
    tensors = load_file(str(directory / TOWER_FILE))
    eyes.load_state_dict({name.removeprefix(PREFIX): tensor.float() for name, tensor in tensors.items()})
    return eyes


def config_json(c: EyesConfig, ids: dict[str, int]) -> dict[str, Any]:
    """config.json of the target with its tower."""
    text = target_config_json(target_config(json.loads((TARGET / "config.json").read_text(encoding="utf-8"))))
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}
    del text["architectures"]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5_vision",
            "depth": c.depth,
            "hidden_size": c.hidden,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": c.intermediate,
            "num_heads": c.heads,
            "in_channels": 3,
            "patch_size": c.patch,
            "spatial_merge_size": c.merge,
            "temporal_patch_size": 2,
            "out_hidden_size": c.out,
            "num_position_embeddings": c.positions**2,
            "rope_parameters": {"rope_type": "axial", "rope_theta": c.theta},
        },
    }


def preprocessor_json(c: EyesConfig) -> dict[str, Any]:
    """preprocessor_config.json: a drawn scene goes in as it is."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": c.patch,
        "merge_size": c.merge,
        "temporal_patch_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 18},
    }


def tokenizer_files() -> dict[str, Any]:
    """The target's tokenizer with tokens for pictures in the place of bytes that no text has."""
    state = json.loads((TARGET / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = state["model"]["vocab"]
    for byte, token in BYTES.items():
        vocabulary[token] = vocabulary.pop(chr(byte))  # bytes from 0xAE on are spelled as the character of their number
        added = {"id": vocabulary[token], "content": token, "special": True, "normalized": False}
        state["added_tokens"].append({**added, "single_word": False, "lstrip": False, "rstrip": False})
    config = json.loads((TARGET / "tokenizer_config.json").read_text(encoding="utf-8"))
    config |= {"chat_template": CHAT_TEMPLATE, "additional_special_tokens": [TURN, END_OF_TURN, MASK, *BYTES.values()]}
    assert (config["eos_token"], config["pad_token"]) == (END_OF_TURN, END_OF_TEXT)
    return {"tokenizer.json": state, "tokenizer_config.json": config}
