"""Configurations as published checkpoints have them: every key that their tools write is known."""

import json

import pytest
from synthetic import CONFIGS

from edge_dflash.errors import CheckpointError, UnsupportedModelError
from edge_dflash.model.registry import match_pair, read_drafter_spec, read_target_spec
from edge_dflash.weights.declared import check_quantization

NOTES = {"attention_dropout": 0.0, "initializer_range": 0.02, "transformers_version": "4.57.1", "use_cache": True}


def published(name, part="target", **more):
    """config.json of tests/configs with the keys that tools write besides those that count, and some changed."""
    return {**json.loads((CONFIGS / name / part / "config.json").read_text()), **NOTES, **more}


def qwen3(name="qwen3-8b", **more):
    return published(name, bos_token_id=151643, **more)


def qwen3_5_text(name, **more):
    older = {"mlp_only_layers": [], "mtp_use_dedicated_embeddings": False}
    return {**published(name)["text_config"], **NOTES, **older, **more}


def wrapper(text, **more):
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
        **more,
    }


def drafter(name, **more):
    written = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 151643, "eos_token_id": 151645}
    return published(name, "drafter", **{**written, "tie_word_embeddings": True, **more})


def scheme(bits, group=None, **more):
    strategy = "tensor_group" if group else "channel"
    scale = "torch.float8_e4m3fn" if group else None
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group,
        "num_bits": bits,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "scale_dtype": scale,
        "strategy": strategy,
        "symmetric": True,
        "type": "float",
        "zp_dtype": scale,
        **more,
    }


def compressed(groups, form, **more):
    return {
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "format": form,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*visual.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
        **more,
    }


def group(weights, inputs, form, targets=("Linear",)):
    inputs = {"format": form, "input_activations": inputs, "output_activations": None}
    return {**inputs, "targets": list(targets), "weights": weights}


MODELOPT_NVFP4 = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
            "targets": ["Linear"],
            "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
        }
    },
    "ignore": ["lm_head", "model.layers.0.self_attn*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
}
EARLY_FP8 = {
    **MODELOPT_NVFP4,
    "quant_algo": "FP8",
    "kv_cache_scheme": "FP8",
    "config_groups": {},
    "ignore": ["lm_head"],
}
del EARLY_FP8["quant_method"]
CT_NVFP4 = compressed(
    [group(scheme(4, 16), scheme(4, 16, dynamic="local", observer="static_minmax"), "nvfp4-pack-quantized")],
    "nvfp4-pack-quantized",
)
CT_FP8 = compressed(
    [group(scheme(8), scheme(8, strategy="token", dynamic=True, observer=None), "float-quantized")], "float-quantized"
)
CT_MIXED = compressed(
    [
        group(
            scheme(8), scheme(8, strategy="token", dynamic=True), "float-quantized", [r"re:.*self_attn\.[qkvo]_proj$"]
        ),
        group(
            scheme(4, 16, actorder="static"),
            scheme(4, 16, dynamic="local"),
            "nvfp4-pack-quantized",
            [r"re:.*mlp\.(gate|up|down)_proj$"],
        ),
    ],
    "mixed-precision",
    kv_cache_scheme=scheme(8, strategy="tensor", observer="static_minmax"),
    transform_config={"config_groups": {}},
)
TEXT_27B = qwen3_5_text("qwen3.6-27b", bos_token_id=248044, pad_token_id=None, partial_rotary_factor=0.25)
TEXT_4B = qwen3_5_text("qwen3.5-4b")
LARGE = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
TARGETS = {
    "qwen3-4b": (qwen3("qwen3-4b")),
    "qwen3-8b": (qwen3()),
    "qwen3-32b": (qwen3(**LARGE)),
    "qwen3-8b with yarn": (qwen3(rope_scaling=YARN)),
    "qwen3-4b as tuned": (
        qwen3("qwen3-4b", pad_token_id=151654, unsloth_fixed=True, layer_types=["full_attention"] * 36)
    ),
    "qwen3-8b modelopt": (qwen3(quantization_config=MODELOPT_NVFP4)),
    "qwen3-32b early modelopt": (qwen3(**LARGE, quantization_config=EARLY_FP8)),
    "qwen3-32b compressed-tensors": (qwen3(**LARGE, quantization_config=CT_NVFP4)),
    "qwen3-8b fp8": (qwen3(quantization_config=CT_FP8)),
    "qwen3.5-4b": (wrapper(TEXT_4B)),
    "qwen3.5-4b of text alone": ({**TEXT_4B, "architectures": ["Qwen3_5ForCausalLM"]}),
    "qwen3.6-27b": (wrapper({**TEXT_27B, "output_gate_type": "swish"}, language_model_only=False)),
    "qwen3.6-27b as tuned": (
        wrapper(TEXT_27B, model_name="x/Qwen3.6-27B", unsloth_version="2026.4.2", use_cache=False, bos_token_id=None)
    ),
    "qwen3.6-27b mixed": (
        wrapper(
            TEXT_27B,
            dtype="bfloat16",
            head_dim=256,
            num_attention_heads=24,
            num_key_value_heads=4,
            quantization_config=CT_MIXED,
        )
    ),
}
SLIDING = ["sliding_attention"] * 4 + ["full_attention"]
DRAFTERS = {
    "qwen3-4b": drafter("qwen3-4b"),
    "qwen3-8b": drafter("qwen3-8b", draft_vocab_size=151936, num_anchors=512),
    "qwen3.5-4b": drafter(
        "qwen3.5-4b",
        layer_types=SLIDING,
        sliding_window=4096,
        use_sliding_window=True,
        rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
        rope_theta=...,
        block_size=...,
        dflash_config={"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
    ),
    "qwen3.6-27b": drafter(
        "qwen3.6-27b",
        block_size=16,
        dflash_config={
            "mask_token_id": 248070,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "projector_type": "dflash",
            "attention_mode": "gqa",
            "use_aux_hidden_state": True,
            "causal": False,
        },
    ),
}


def write(directory, config):
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return directory


@pytest.mark.parametrize("name", TARGETS)
def test_a_published_target_is_read(tmp_path, name):
    config = TARGETS[name]
    spec = read_target_spec(write(tmp_path, config))
    assert spec.num_layers == config.get("text_config", config)["num_hidden_layers"]
    check_quantization(tmp_path)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_published_drafter_is_read_and_fits_its_target(tmp_path, name):
    target = read_target_spec(write(tmp_path, TARGETS[name]))
    match_pair(target, read_drafter_spec(write(tmp_path, DRAFTERS[name])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 128}, "head_dim is 128, wanted no such setting"),
        ({"num_attention_heads": 24.0}, r"num_attention_heads is 24\.0, wanted no such setting"),
        ({"linear_gate": 1}, "linear_gate is 1, wanted no such setting"),
    ],
)
def test_a_key_beside_text_config_that_says_something_else_is_refused(tmp_path, change, words):
    with pytest.raises(CheckpointError, match=words):
        read_target_spec(write(tmp_path, wrapper(TEXT_27B, **change)))


@pytest.mark.parametrize(
    "change", [{"projector_type": "domino"}, {"attention_mode": "mla"}, {"use_aux_hidden_state": False}]
)
def test_other_designs_under_the_name_of_a_dflash_drafter_are_refused(tmp_path, change):
    config = DRAFTERS["qwen3-8b"]
    config = {**config, "dflash_config": {**config["dflash_config"], **change}}
    with pytest.raises(UnsupportedModelError, match=rf"dflash_config\.{next(iter(change))}"):
        read_drafter_spec(write(tmp_path, config))


def test_a_drafter_of_more_than_the_vocabulary_is_refused(tmp_path):
    part = read_drafter_spec(write(tmp_path, {**DRAFTERS["qwen3-8b"], "draft_vocab_size": 32000}))
    assert part.draft_vocab == 32000
    assert read_drafter_spec(write(tmp_path, DRAFTERS["qwen3-8b"])).draft_vocab is None
    config = {**DRAFTERS["qwen3-8b"], "draft_vocab_size": 151937}
    with pytest.raises(CheckpointError, match=r"draft_vocab_size is 151937, wanted at most vocab_size \(151936\)"):
        read_drafter_spec(write(tmp_path, config))


@pytest.mark.parametrize("named", [{}, {"quant_method": "modelopt"}])
@pytest.mark.parametrize("mirrored", [True, False])
def test_a_quantized_drafter_of_modelopt_is_read(tmp_path, named, mirrored):
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["fc"]}
    scheme = {"producer": {"name": "modelopt", "version": "0.46.0"}, "quantization": quantization}
    write(tmp_path, {**DRAFTERS["qwen3-8b"], "quantization_config": {**scheme, **named}})
    if mirrored:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(scheme))
    assert read_drafter_spec(tmp_path).num_layers == 5
    check_quantization(tmp_path)
    write(tmp_path, {"quantization_config": {**scheme, "quantization": {**quantization, "quant_algo": "INT8"}}})
    with pytest.raises(CheckpointError, match="quant_algo is 'INT8'"):
        check_quantization(tmp_path)


def dspark(**inside):
    """A DSpark drafter of Qwen3.8-27B as its trainer writes it (RadixArk/Qwen3.8-27B-DSpark)."""
    head = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    rope = {"rope_type": "yarn", "rope_theta": 10000000, "factor": 32.0, "original_max_position_embeddings": 8192}
    block = {"projector_type": "dspark", "mask_token_id": 248077, "target_layer_ids": [4, 16, 28, 40, 52], **head}
    flat = dict.fromkeys(("mask_token_id", "target_layer_ids", "sample_from_anchor", "is_causal", "rope_theta"), ...)
    return published(
        "qwen3.8-27b-dspark",
        "drafter",
        **{**flat, **head, "rope_scaling": ...},
        block_size=7,
        layer_types=["full_attention"] * 5,
        rope_parameters={**rope, "beta_fast": 32.0, "beta_slow": 1.0},
        dflash_config={**block, "confidence_head_with_markov": True, **inside},
    )


def test_a_published_dspark_drafter_is_read(tmp_path):
    found = read_drafter_spec(write(tmp_path, dspark()))
    assert (found.kind, found.block_size, found.drafts, found.anchor_drafts) == ("dspark", 7, 7, True)
    assert (found.head.rank, found.head.confidence, found.attention.rope.scaling.factor) == (256, "markov", 32.0)
    other = {"shift_label": True, "use_confidence_head": True, "confidence_head_alpha": 0.5}
    assert read_drafter_spec(write(tmp_path, dspark(**other))) == found
    with pytest.raises(CheckpointError, match="use_confidence_head is false, wanted the same as enable_confidence"):
        read_drafter_spec(write(tmp_path, dspark(use_confidence_head=False)))
    assert not read_drafter_spec(write(tmp_path, dspark(shift_label=False))).anchor_drafts
    with pytest.raises(UnsupportedModelError, match="projector_type is 'domino'"):
        read_drafter_spec(write(tmp_path, dspark(projector_type="domino")))
