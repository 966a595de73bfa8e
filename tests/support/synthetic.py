"""Random BF16 checkpoints of any dimensions in Hugging Face form, written tensor by tensor: size never meets memory.

    python -m tests.synthetic --model qwen3-4b --output DIR      # DIR/target and DIR/drafter, published dimensions

The tensor lists are written here from the config's fields alone, independently of edge_dflash. Weights have a random
sign and mantissa and an exponent that makes linears keep the scale of their input; the same seed gives the same bytes.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

CONFIGS = Path(__file__).parents[1] / "configs"
CHUNK = 1 << 22  # elements made and written at once


def qwen3_config(**changes):
    """config.json of a small Qwen3; ``changes`` are fields of the file."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    } | changes


def qwen3_5_config(nested=True, **changes):
    """config.json of a small Qwen3.5, multimodal form with ``text_config`` or text only."""
    fields = {
        **qwen3_config(rope_theta=None, tie_word_embeddings=False),
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    } | changes
    if not nested:
        return fields
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": fields}


def drafter_config(target, **changes):
    """config.json of a small drafter for a target's config; ``dflash_config`` is merged, other fields replaced."""
    text = target.get("text_config", target)
    layers = text["num_hidden_layers"]
    dflash = {"mask_token_id": text["vocab_size"] - 1, "target_layer_ids": sorted({1, layers // 2, layers - 2})}
    dflash |= changes.pop("dflash_config", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": layers,
        "dflash_config": dflash,
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "layer_types": ["full_attention"] * changes.get("num_hidden_layers", 2),
        "dtype": "bfloat16",
    } | changes


def published_configs(model):
    """config.json of a published target and its drafter, by the names of the folders of tests/configs."""
    return tuple(json.loads((CONFIGS / model / part / "config.json").read_text()) for part in ("target", "drafter"))


def write_target(directory, config, *, seed=0, shard_bytes=2 << 30, extra=()):
    """Write config.json and BF16 shards of a target. ``extra`` are more (tensor, shape), such as a vision tower's."""
    text = config.get("text_config", config)
    prefix = "model.language_model." if "text_config" in config else "model."
    hybrid = "linear_num_key_heads" in text
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    tensors = [(f"{prefix}embed_tokens.weight", (vocab, hidden))]
    interval = text.get("full_attention_interval", 4)
    default = ["full_attention" if not hybrid or (i + 1) % interval == 0 else "linear_attention" for i in range(999)]
    types = text.get("layer_types") or default[: text["num_hidden_layers"]]
    for i, kind in enumerate(types):
        linear = kind == "linear_attention"
        mixer = _gated_delta(text) if linear else _attention(text, hidden, gated=hybrid)
        tensors += [(f"{prefix}layers.{i}.{name}", shape) for name, shape in mixer + _mlp(text, hidden)]
    tensors.append((f"{prefix}norm.weight", (hidden,)))
    if not (config.get("tie_word_embeddings") or text.get("tie_word_embeddings")):
        tensors.append(("lm_head.weight", (vocab, hidden)))
    # Qwen3.5 norms multiply by 1 + w, except the gated delta layer's own
    write_checkpoint(directory, config, [*tensors, *extra], seed=seed, shard_bytes=shard_bytes, plus_one=hybrid)


def write_drafter(directory, config, *, seed=1, shard_bytes=2 << 30):
    """Write config.json and BF16 shards of a drafter."""
    hidden = config["hidden_size"]
    taps = len(config["dflash_config"].get("target_layer_ids") or range(config["num_hidden_layers"]))
    tensors = [("fc.weight", (hidden, taps * hidden)), ("hidden_norm.weight", (hidden,)), ("norm.weight", (hidden,))]
    for i in range(config["num_hidden_layers"]):
        layer = _attention(config, hidden, gated=False) + _mlp(config, hidden)
        tensors += [(f"layers.{i}.{name}", shape) for name, shape in layer]
    write_checkpoint(directory, config, tensors, seed=seed, shard_bytes=shard_bytes)


def write_checkpoint(directory, config, tensors, *, seed=0, shard_bytes=2 << 30, plus_one=False):
    """Write config.json, the tensors (name, shape) as BF16, and an index when there is more than one shard."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    shards, size = [[]], 0
    for number, (name, shape) in enumerate(tensors):
        if shards[-1] and size + 2 * math.prod(shape) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((number, name, shape))
        size += 2 * math.prod(shape)
    index = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(directory / file, shard, seed, plus_one)
        index |= {name: file for _, name, _ in shard}
    if len(shards) > 1:
        total = {"total_size": sum(2 * math.prod(shape) for _, shape in tensors)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": total, "weight_map": index}))


def _attention(text, hidden, *, gated):
    heads, kv_heads, dim = text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]
    return [
        ("self_attn.q_proj.weight", (heads * dim * (2 if gated else 1), hidden)),
        ("self_attn.k_proj.weight", (kv_heads * dim, hidden)),
        ("self_attn.v_proj.weight", (kv_heads * dim, hidden)),
        ("self_attn.o_proj.weight", (hidden, heads * dim)),
        ("self_attn.q_norm.weight", (dim,)),
        ("self_attn.k_norm.weight", (dim,)),
    ]


def _gated_delta(text):
    hidden, values = text["hidden_size"], text["linear_num_value_heads"]
    width = values * text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + width
    return [
        ("linear_attn.in_proj_qkv.weight", (channels, hidden)),
        ("linear_attn.in_proj_z.weight", (width, hidden)),
        ("linear_attn.in_proj_a.weight", (values, hidden)),
        ("linear_attn.in_proj_b.weight", (values, hidden)),
        ("linear_attn.conv1d.weight", (channels, 1, text["linear_conv_kernel_dim"])),
        ("linear_attn.A_log", (values,)),
        ("linear_attn.dt_bias", (values,)),
        ("linear_attn.norm.weight", (text["linear_value_head_dim"],)),
        ("linear_attn.out_proj.weight", (hidden, width)),
    ]


def _mlp(text, hidden):
    inner = text["intermediate_size"]
    return [
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (inner, hidden)),
        ("mlp.up_proj.weight", (inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
    ]


def _write_shard(path, shard, seed, plus_one):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for _, name, shape in shard:
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, name, shape in shard:
            rng = np.random.Generator(np.random.SFC64([seed, number]))
            for first in range(0, math.prod(shape), CHUNK):
                count = min(CHUNK, math.prod(shape) - first)
                file.write(_values(rng, name, shape, count, plus_one).tobytes())


def _values(rng, name, shape, count, plus_one):
    """BF16 codes of ``count`` elements."""
    if len(shape) > 1:
        fan_in = 1 if "embed_tokens" in name else shape[-1]
        return _codes(rng, count, 1 / math.sqrt(fan_in))
    if name.endswith("A_log"):
        values = np.log(rng.uniform(1, 16, count))
    elif name.endswith("dt_bias"):
        values = rng.uniform(-6, -2, count)  # decays between about 0.5 and 1
    else:
        centre = 0.0 if plus_one and "linear_attn.norm" not in name else 1.0
        values = centre + 0.1 * rng.standard_normal(count)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _codes(rng, count, rms):
    """Random sign and mantissa, exponent in a range of four: rms 7.04 times the smallest power of two."""
    bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
    exponent = np.uint16(127 + round(math.log2(rms / 7.04)))
    codes = bits & np.uint16(0x807F)
    codes |= (((bits >> np.uint16(7)) & np.uint16(3)) + exponent) << np.uint16(7)
    return codes


def main():
    """Write a published pair's dimensions with random weights."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=sorted(p.name for p in CONFIGS.iterdir() if p.is_dir()))
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    target, drafter = published_configs(options.model)
    write_target(options.output / "target", target, seed=options.seed)
    write_drafter(options.output / "drafter", drafter, seed=options.seed + 1)


if __name__ == "__main__":
    main()
