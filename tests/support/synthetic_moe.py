"""Mixtures of experts of any dimensions as quantizers publish them, mixed precision, with random or with empty bytes.

    python tests/support/synthetic_moe.py --output DIR [--layers 40] [--wide]   # Qwen3.6-35B-A3B's dimensions

``--wide`` writes BF16 with all experts of a layer in two tensors, as the model is published; otherwise ModelOpt's form:
experts and head NVFP4, attention and gated delta FP8. The tensor lists are written here from the config alone.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

BLOCK = 64 << 20  # random bytes that all tensors are cut from
SIZES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}


def moe_config(**changes):
    """config.json of Qwen3.6-35B-A3B; ``changes`` are fields of its text_config."""
    layers = changes.get("num_hidden_layers", 40)
    text = {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    } | changes
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": text,
    }


def tensors(config, *, wide=False):
    """Every tensor of the checkpoint: name -> (safetensors dtype, shape)."""
    text = config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    found = {}

    def linear(name, shape, form):
        rows, columns = shape
        if wide or form == "BF16":
            found[f"{name}.weight"] = "BF16", shape
            return
        if form == "NVFP4":
            found[f"{name}.weight"] = "U8", (rows, columns // 2)
            found[f"{name}.weight_scale"] = "F8_E4M3", (rows, columns // 16)
            found[f"{name}.weight_scale_2"] = "F32", ()
        else:
            found[f"{name}.weight"] = "F8_E4M3", shape
            found[f"{name}.weight_scale"] = "F32", ()
        found[f"{name}.input_scale"] = "F32", ()

    root = "model.language_model."
    found[f"{root}embed_tokens.weight"] = "BF16", (vocab, hidden)
    for index, kind in enumerate(text["layer_types"]):
        layer = f"{root}layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{name}.weight"] = "BF16", (hidden,)
        (_delta if kind == "linear_attention" else _attention)(layer, text, linear, found)
        _experts(f"{layer}.mlp", text, linear, found, wide=wide)
    found[f"{root}norm.weight"] = "BF16", (hidden,)
    linear("lm_head", (vocab, hidden), "NVFP4")
    _experts("mtp.layers.0.mlp", text, lambda name, shape, form: None, found, wide=True)
    found["model.visual.patch_embed.proj.weight"] = "BF16", (64, 3, 2, 16, 16)
    return found


def _delta(layer, text, linear, found):
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    width = heads * text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + width
    linear(f"{layer}.linear_attn.in_proj_qkv", (channels, hidden), "FP8")
    linear(f"{layer}.linear_attn.in_proj_z", (width, hidden), "FP8")
    linear(f"{layer}.linear_attn.out_proj", (hidden, width), "FP8")
    for name in ("in_proj_a", "in_proj_b"):
        linear(f"{layer}.linear_attn.{name}", (heads, hidden), "BF16")
    found[f"{layer}.linear_attn.conv1d.weight"] = "BF16", (channels, 1, text["linear_conv_kernel_dim"])
    for name in ("A_log", "dt_bias"):
        found[f"{layer}.linear_attn.{name}"] = "BF16", (heads,)
    found[f"{layer}.linear_attn.norm.weight"] = "BF16", (text["linear_value_head_dim"],)


def _attention(layer, text, linear, found):
    hidden, dim = text["hidden_size"], text["head_dim"]
    width, narrow = (text[name] * dim for name in ("num_attention_heads", "num_key_value_heads"))
    for name, shape in (("q", (2 * width, hidden)), ("k", (narrow, hidden)), ("v", (narrow, hidden))):
        linear(f"{layer}.self_attn.{name}_proj", shape, "FP8")
    linear(f"{layer}.self_attn.o_proj", (hidden, width), "FP8")
    for name in ("q_norm", "k_norm"):
        found[f"{layer}.self_attn.{name}.weight"] = "BF16", (dim,)


def _experts(mlp, text, linear, found, *, wide):
    hidden, count, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    linear(f"{mlp}.gate", (count, hidden), "BF16")
    linear(f"{mlp}.shared_expert_gate", (1, hidden), "BF16")
    sizes = [("shared_expert", text["shared_expert_intermediate_size"])]
    if wide:
        found[f"{mlp}.experts.gate_up_proj"] = "BF16", (count, 2 * inner, hidden)
        found[f"{mlp}.experts.down_proj"] = "BF16", (count, hidden, inner)
    else:
        sizes += [(f"experts.{expert}", inner) for expert in range(count)]
    for name, width in sizes:
        for kind in ("gate_proj", "up_proj"):
            linear(f"{mlp}.{name}.{kind}", (width, hidden), "NVFP4")
        linear(f"{mlp}.{name}.down_proj", (hidden, width), "NVFP4")


def write_moe(directory, config, found, *, shards=3, empty=False, seed=0):
    """config.json, shards and their index. ``empty`` leaves zeros that take no room, but for scales: they are 1."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    block = np.random.default_rng(seed).integers(0, 256, BLOCK, np.uint8)
    names = list(found)
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        part.sort(key=lambda name: (-SIZES[found[name][0]], name))  # as the format's own writer has them
        _write_shard(directory / file, {name: found[name] for name in part}, None if empty else block)
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


def _write_shard(path, found, block):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (kind, shape) in found.items():
        end = offset + SIZES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (kind, shape) in found.items():
            size = SIZES[kind] * math.prod(shape)
            if kind == "F32":
                file.write(np.full(math.prod(shape), 1.0 if block is None else 2.0**-9, np.float32).tobytes())
            elif block is None or name.startswith(("mtp.", "model.visual.")):
                file.seek(size, 1)
            else:
                for first in range(0, size, BLOCK):
                    file.write(_values(kind, name, shape, block, min(BLOCK, size - first)))
        file.truncate(8 + len(text) + offset)


def _values(kind, name, shape, block, size):
    """Bytes of values without NaN, of a size that keeps activations finite."""
    raw = block[:size]
    if kind == "BF16":
        words = raw.view(np.uint16)
        top = 119 if len(shape) > 1 else 126  # exponents of 2^-8, and of norms' 1/2
        return (words & np.uint16(0x807F)) | np.uint16(top << 7)
    if kind == "F8_E4M3":
        return raw & np.uint8(0x77 if name.endswith("weight_scale") else 0xF7)
    return raw


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--empty", action="store_true", help="zeros that take no room on the disk")
    options = parser.parse_args()
    config = moe_config(num_hidden_layers=options.layers)
    found = tensors(config, wide=options.wide)
    write_moe(options.output, config, found, empty=options.empty)
    size = sum(SIZES[kind] * math.prod(shape) for kind, shape in found.values())
    print(f"{len(found)} tensors, {size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
