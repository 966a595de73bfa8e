"""Every key of a configuration is read, refused by name, or declared without effect: none is ignored."""

import json
import shutil
from collections import Counter

import pytest
from config_mutations import OUTCOMES, bases, load, verdicts
from golden_pairs import GOLDEN

from edge_dflash.errors import CheckpointError
from edge_dflash.model.registry import read_target_spec
from edge_dflash.model.specs import RopeSpec, YarnScaling
from edge_dflash.weights.declared import check_quantization
from edge_dflash.weights.safetensors import TensorFiles

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def test_no_key_is_ignored(tmp_path):
    judged = [verdict for base in bases() for verdict in verdicts(base, tmp_path)]
    assert [f"{mutation.label}: {outcome}" for mutation, outcome in judged if outcome not in OUTCOMES] == []
    counts = Counter(outcome for _, outcome in judged)
    assert sum(counts.values()) >= 1500
    assert min(counts[outcome] for outcome in OUTCOMES) > 0
    for key in {mutation.key for mutation, outcome in judged if outcome == "overridden"}:  # it counts where it may
        others = (mutation for mutation, outcome in judged if mutation.key == key and outcome == "read")
        assert any(m.base.outcome(tmp_path, m.files()) != m.base.outcome(tmp_path) for m in others), key


@pytest.fixture
def target(tmp_path):
    """A function that reads a golden target's config, changed; a key whose value is ... goes."""

    def read(name="qwen3-tiny", **changes):
        config = {key: value for key, value in (load(name) | changes).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_target_spec(tmp_path)

    return read


def test_rotary_keys_inside_rope_scaling_are_read(target):
    theta = {"rope_type": "default", "rope_theta": 5e5}
    assert target(rope_parameters=..., rope_scaling=theta).attention.rope == RopeSpec(5e5, 32)
    assert target(rope_parameters=..., rope_theta=7.0, rope_scaling=theta).attention.rope == RopeSpec(5e5, 32)
    both = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert target("qwen3_5-tiny", rope_parameters=..., rope_scaling=both).attention.rope == RopeSpec(5e5, 32)
    yarn = {**YARN, "rope_theta": 5e5}
    assert target(rope_parameters=..., rope_scaling=yarn).attention.rope == RopeSpec(5e5, 32, YarnScaling(4.0, 256))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": YARN},  # transformers would take a theta of 10,000
        {
            "rope_scaling": {"rope_type": "default", "rope_theta": 1e6},
            "rope_parameters": {**YARN, "rope_theta": 1e6},
        },
        {
            "rope_scaling": {**YARN, "rope_theta": 1e6},
            "rope_parameters": {**YARN, "rope_theta": 1e6, "factor": 2.0},
        },
    ],
)
def test_rope_scaling_beside_other_rope_parameters_is_refused(target, changes):
    with pytest.raises(CheckpointError, match=r"config\.json: rope_scaling is .* rope_parameters"):
        target(**changes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-tiny", {"is_causal": False}, "is_causal is false: a target that sees ahead, wanted true"),
        ("qwen3-tiny", {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config is .*: layers that differ"),
        ("qwen3-tiny", {"hidden_size": 128.0}, r"hidden_size is 128\.0, wanted an integer"),
        ("qwen3-tiny", {"num_hidden_layers": True}, "num_hidden_layers is true, wanted an integer"),
        ("qwen3-tiny", {"vocab_size": 1 << 40}, "vocab_size is 1099511627776, wanted an integer of at most"),
        ("qwen3-tiny", {"rope_thetaa": 1e6}, "wanted no such setting: this version does not know what it changes"),
        (
            "qwen3-tiny",
            {"beta_fast": 32},
            r"no such setting here \(it is known inside rope_parameters and rope_scaling\)",
        ),
        ("qwen3_5-tiny", {"architectures": ["Qwen3_5ForConditionalGeneration"]}, "lacks the field text_config"),
        ("qwen3_5-tiny-nvfp4-ct", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, wanted no such setting"),
    ],
)
def test_keys_that_change_the_maths_are_refused_by_name(target, name, changes, words):
    with pytest.raises(CheckpointError, match=words):
        target(name, **changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"beta_fast": 1.0, "beta_slow": 2.0},
            r"rope_parameters\.beta_fast is 1\.0, wanted at least beta_slow \(2\.0\)",
        ),
        ({"beta_fast": 0.5}, r"beta_fast is 0\.5, wanted at least beta_slow"),
        ({"truncate": False}, r"rope_parameters\.truncate is false"),
        ({"mscale": 1.0}, r"rope_parameters\.mscale is 1\.0, wanted no such setting"),
        ({"rope_theta": 1.0}, r"rope_theta is 1\.0, wanted more than 1 for YaRN"),
        ({"original_max_position_embeddings": 1}, "original_max_position_embeddings is 1, wanted a context that fits"),
        ({"type": "default"}, r"rope_parameters\.type is 'default', wanted the same as rope_type \('yarn'\)"),
        ({"partial_rotary_factor": None}, r"rope_parameters\.partial_rotary_factor is null"),
        ({"rope_type": "default"}, r"rope_parameters\.factor is 4\.0, wanted no such setting without rope_type 'yarn'"),
    ],
)
def test_yarn_settings_that_cannot_be_meant_are_refused(target, change, words):
    with pytest.raises(CheckpointError, match=words):
        target(rope_parameters={**YARN, "rope_theta": 1e6, **change})


COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("dialect", [COMPRESSED, MODELOPT])
@pytest.mark.parametrize(
    "change",
    [
        {"num_bits": 4},
        {"num_bits": None},
        {"type": "int"},
        {"strategy": "channel"},
        {"strategy": "attn_head"},
        {"dynamic": True},
        {"symmetric": False},
        {"group_size": 128},
        {"block_structure": [128, 128]},
        {"new": 1},
    ],
)
def test_a_kv_cache_that_is_not_8_bit_float_per_tensor_is_refused(tmp_path, dialect, change):
    def declared(scheme):
        quantization = {**dialect, "kv_cache_scheme": scheme}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        return check_quantization(tmp_path)

    declared(FP8)
    with pytest.raises(CheckpointError, match=rf"kv_cache_scheme\.{next(iter(change))}"):
        declared({**FP8, **change})
    with pytest.raises(CheckpointError, match=r"lacks the field quantization_config\.kv_cache_scheme\.type"):
        declared({"num_bits": 8})


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            {**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}},
            "transform_config is .*: weights in another",
        ),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is .*: sparse"),
        ({**MODELOPT, "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is 'INT8': a KV cache of another format"),
        ({**MODELOPT, "quant_algo": "INT4_AWQ"}, "quant_algo is 'INT4_AWQ': another format of weights"),
        *(({"quant_method": name}, f"quant_method is '{name}'.* in BF16") for name in ("gptq", "awq", "fp8", "gguf")),
        ({"quant_algo": "NVFP4"}, "quant_method is None, wanted 'modelopt' or"),
    ],
)
def test_quantization_that_would_be_misread_is_refused(tmp_path, quantization, words):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(CheckpointError, match=words):
        check_quantization(tmp_path)


def test_two_quantization_configs_must_be_one(tmp_path):
    config = {"quantization_config": MODELOPT, "text_config": {"quantization_config": COMPRESSED}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="wanted one object, in one place"):
        check_quantization(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-06, "rms_norm_eps": 1e-3', "'rms_norm_eps' occurs twice"),
        ('"rope_theta": 1000000.0', '"rope_theta": 1e6, "rope_theta": 2e6', "'rope_theta' occurs twice"),
        ('"rms_norm_eps": 1e-06', '"rms_norm_eps": NaN', "NaN is no number of JSON"),
        ('"rms_norm_eps": 1e-06', '"rms_norm_eps": Infinity', "Infinity is no number"),
        ('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e999', "rms_norm_eps is inf, wanted a positive number"),
    ],
)
def test_names_that_occur_twice_and_numbers_that_are_none_are_refused(tmp_path, old, new, words):
    text = (GOLDEN / "qwen3-tiny" / "config.json").read_text()
    assert text.count(old) == 1
    (tmp_path / "config.json").write_text(text.replace(old, new))
    with pytest.raises(CheckpointError, match=words) as caught:
        read_target_spec(tmp_path)
    assert "config.json" in str(caught.value)


def test_names_that_occur_twice_in_the_other_files_are_refused(tmp_path):
    shutil.copytree(GOLDEN / "qwen3_5-tiny-nvfp4-modelopt", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "eos_token_id": 2}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json .*'eos_token_id' occurs twice"):
        read_target_spec(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {}, "quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json .*'quantization' occurs twice"):
        check_quantization(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"index\.json .*'a' occurs twice"):
        TensorFiles.open(tmp_path)
