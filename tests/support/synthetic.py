"""Random checkpoints in Hugging Face form: BF16 pairs of small dimensions, and the tensors of a published mixture.

The tensor lists are written here from the config's fields alone, independently of edge_dflash. Weights have a random
sign and mantissa and an exponent that makes linears keep the scale of their input; the same seed gives the same bytes.
"""

import json
import math
from pathlib import Path

import numpy as np
from checkpoint_files import header_of, write

CONFIGS = Path(__file__).parents[1] / "configs"


SMALL = {  # of targets and drafters
    "model_type": "qwen3",
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": False,
    "dtype": "bfloat16",
}


def qwen3_config(**changes):
    """config.json of a small Qwen3; ``changes`` are fields of the file."""
    return {
        **SMALL,
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
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
        **SMALL,
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "num_target_layers": layers,
        "dflash_config": dflash,
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * changes.get("num_hidden_layers", 2),
    } | changes


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
    write(directory, _filled([*tensors, *extra], seed, plus_one=hybrid), config, shard_bytes)


def write_drafter(directory, config, *, seed=1):
    """Write config.json and BF16 tensors of a drafter."""
    hidden = config["hidden_size"]
    taps = len(config["dflash_config"].get("target_layer_ids") or range(config["num_hidden_layers"]))
    tensors = [("fc.weight", (hidden, taps * hidden)), ("hidden_norm.weight", (hidden,)), ("norm.weight", (hidden,))]
    for i in range(config["num_hidden_layers"]):
        layer = _attention(config, hidden, gated=False) + _mlp(config, hidden)
        tensors += [(f"layers.{i}.{name}", shape) for name, shape in layer]
    write(directory, _filled(tensors, seed), config)


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


def _filled(tensors, seed, *, plus_one=False):
    """BF16 codes of (name, shape), each by a generator of its own."""
    found = {}
    for number, (name, shape) in enumerate(tensors):
        rng = np.random.Generator(np.random.SFC64([seed, number]))
        found[name] = "BF16", _values(rng, name, shape, plus_one).reshape(shape)
    return found


def _values(rng, name, shape, plus_one):
    count = math.prod(shape)
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


def mixture_config(**changes):
    """config.json of Qwen3.6-35B-A3B; ``changes`` are fields of its text_config."""
    config = json.loads((CONFIGS / "qwen3.6-35b-a3b" / "target" / "config.json").read_text())
    config["text_config"] |= changes
    return config


def write_mixture(directory, config):
    """A mixture as ModelOpt writes it: experts and head NVFP4, attention and gated delta FP8; scalars are 1, the rest
    zeros that take no room on the disk.
    """
    text = config["text_config"]
    hidden, experts = text["hidden_size"], range(text["num_experts"])
    tensors = {}

    def linear(name, shape, form="BF16"):
        scalars = {"NVFP4": ("weight_scale_2", "input_scale"), "FP8": ("weight_scale", "input_scale"), "BF16": ()}[form]
        if form == "NVFP4":
            tensors[f"{name}.weight_scale"] = "F8_E4M3", (shape[0], shape[1] // 16)
            shape = shape[0], shape[1] // 2
        tensors[f"{name}.weight"] = {"NVFP4": "U8", "FP8": "F8_E4M3", "BF16": "BF16"}[form], shape
        tensors.update({f"{name}.{end}": ("F32", ()) for end in scalars})

    linear("model.language_model.embed_tokens", (text["vocab_size"], hidden))
    for index, kind in enumerate(text["layer_types"]):
        layer = f"model.language_model.layers.{index}"
        delta = kind == "linear_attention"
        for name, shape in _gated_delta(text) if delta else _attention(text, hidden, gated=True):
            wide = len(shape) != 2 or "in_proj_a" in name or "in_proj_b" in name
            if name.endswith(".weight"):
                linear(f"{layer}.{name.removesuffix('.weight')}", shape, "BF16" if wide else "FP8")
            else:
                tensors[f"{layer}.{name}"] = "BF16", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            linear(f"{layer}.{name}", (hidden,))
        linear(f"{layer}.mlp.gate", (len(experts), hidden))
        linear(f"{layer}.mlp.shared_expert_gate", (1, hidden))
        for name in ("shared_expert", *(f"experts.{expert}" for expert in experts)):
            inner = text["shared_expert_intermediate_size" if name == "shared_expert" else "moe_intermediate_size"]
            linear(f"{layer}.mlp.{name}.gate_proj", (inner, hidden), "NVFP4")
            linear(f"{layer}.mlp.{name}.up_proj", (inner, hidden), "NVFP4")
            linear(f"{layer}.mlp.{name}.down_proj", (hidden, inner), "NVFP4")
    linear("model.language_model.norm", (hidden,))
    linear("lm_head", (text["vocab_size"], hidden), "NVFP4")
    for name in ("mtp.layers.0.mlp.experts.gate_up_proj", "model.visual.patch_embed.proj.weight"):  # read by nobody
        tensors[name] = "BF16", (64, 3, 2, 16, 16)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
    head, size = header_of({n: (kind, shape, sizes[kind] * math.prod(shape)) for n, (kind, shape) in tensors.items()})
    with (directory / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
        for entry in json.loads(head[8:]).values():
            if entry["dtype"] == "F32":
                file.seek(len(head) + entry["data_offsets"][0])
                file.write(np.ones(1, np.float32).tobytes())
    return directory
