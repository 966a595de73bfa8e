import json

import pytest

from edge_dflash.checkpoint.config import match_pair, read_drafter_spec, read_target_spec
from edge_dflash.checkpoint.specs import DrafterLayerMask, YarnScaling
from edge_dflash.errors import CheckpointError, UnsupportedModelError
from tests.golden_pairs import GOLDEN

DELETE = object()


def config(name, **changes):
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    for key, value in changes.items():
        if value is DELETE:
            del fields[key]
        else:
            fields[key] = value
    return fields


@pytest.fixture
def target(tmp_path):
    def read(name="qwen3_5-tiny", generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config(name, **changes)))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_target_spec(tmp_path)

    return read


@pytest.fixture
def drafter(tmp_path):
    def read(name="qwen3_5-tiny-dflash", **changes):
        (tmp_path / "config.json").write_text(json.dumps(config(name, **changes)))
        return read_drafter_spec(tmp_path)

    return read


def test_nested_and_flat_text_configs_give_one_spec():
    flat = read_target_spec(GOLDEN / "qwen3_5-tiny")
    assert read_target_spec(GOLDEN / "qwen3_5-tiny-nvfp4-ct") == flat
    assert (flat.attention.rope.dims, flat.attention.rope.theta) == (16, 1e7)
    assert flat.gated_delta is not None
    assert flat.gated_delta.conv_channels == 320
    assert not flat.tied


def test_tied_at_either_level(target):
    nested = config("qwen3_5-tiny-nvfp4-ct")
    assert target("qwen3_5-tiny-nvfp4-ct", tie_word_embeddings=True).tied
    text = {**nested["text_config"], "tie_word_embeddings": True}
    assert target("qwen3_5-tiny-nvfp4-ct", text_config=text).tied
    assert read_target_spec(GOLDEN / "qwen3-tiny").tied


def test_layer_types_follow_the_interval_when_missing(target):
    assert target(layer_types=DELETE).layer_types == target().layer_types
    spec = target(layer_types=DELETE, full_attention_interval=2)
    assert [kind == "full_attention" for kind in spec.layer_types] == [False, True] * 4


def test_rope_theta_flat_or_in_rope_parameters(target):
    assert target("qwen3-tiny", rope_parameters=DELETE, rope_theta=5e5).attention.rope.theta == 5e5
    both = target("qwen3-tiny", rope_parameters={"rope_theta": 7.0, "rope_type": "default"}, rope_theta=5e5)
    assert both.attention.rope.theta == 7.0  # rope_parameters wins


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_yarn(target, place):
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256, "rope_theta": 1e6}
    spec = target("qwen3-tiny", **{place: yarn})
    assert spec.attention.rope.scaling == YarnScaling(4.0, 256)


def test_stop_tokens_of_both_files_are_joined(target):
    assert target(eos_token_id=5, generation={"eos_token_id": [7, 5]}).eos_token_ids == (5, 7)
    assert target(eos_token_id=None).eos_token_ids == (7, 5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, UnsupportedModelError, "mixture-of-experts"),
        ({"model_type": "qwen3_5_moe_text"}, UnsupportedModelError, "mixture-of-experts"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModelError, "architecture LlamaForCausalLM"),
        ({"architectures": ["DFlashDraftModel"]}, UnsupportedModelError, "give it as the drafter"),
        ({"architectures": []}, CheckpointError, "architectures is"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act is 'gelu'"),
        ({"output_gate_type": "sigmoid"}, UnsupportedModelError, "output_gate_type"),
        ({"hidden_size": DELETE}, CheckpointError, "lacks the field hidden_size"),
        ({"hidden_size": "128"}, CheckpointError, "hidden_size is '128', wanted an integer"),
        ({"num_hidden_layers": 7}, CheckpointError, "layer_types is 8, wanted a list of 7"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads is 3"),
        ({"linear_num_value_heads": 5}, CheckpointError, "linear_num_value_heads is 5"),
        ({"rms_norm_eps": -1}, CheckpointError, "rms_norm_eps is -1"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "llama3"}}, CheckpointError, "rope_type is 'llama3'"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}, CheckpointError, "partial_rotary"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id is 'x'"),
    ],
)
def test_bad_target_configs_are_refused(target, changes, error, words):
    with pytest.raises(error, match=words) as caught:
        target(**changes)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_configs_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_target_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_target_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="wanted an object"):
        read_target_spec(tmp_path)


def test_drafter_variants(drafter):
    base = drafter()
    assert base.layers == (DrafterLayerMask(False, 24),) * 2 + (DrafterLayerMask(True, None),)
    nested = {"mask_token_id": 511, "target_layer_ids": [1, 4, 6], "block_size": 8}
    assert drafter(block_size=DELETE, dflash_config=nested) == base
    assert drafter(use_sliding_window=False) == base  # the flag is not what decides
    assert drafter(use_sliding_window=DELETE) == base
    assert drafter(is_causal=True) == base
    assert drafter(is_causal=False).layers[0] == DrafterLayerMask(True, 24)
    flag = {"mask_token_id": 511, "target_layer_ids": [1, 4, 6], "causal": False}
    assert drafter(dflash_config=flag).layers[0] == DrafterLayerMask(True, 24)
    assert drafter(rope_theta=DELETE, rope_parameters={"rope_theta": 1e7, "rope_type": "default"}) == base
    assert drafter(layer_types=DELETE).layers == (DrafterLayerMask(True, None),) * 3


def test_taps_may_be_more_than_layers_or_follow_the_rule(drafter):
    five = {"mask_token_id": 511, "target_layer_ids": [0, 1, 2, 3, 4]}
    assert drafter(dflash_config=five).target_layer_ids == (0, 1, 2, 3, 4)
    rule = {"mask_token_id": 511}
    published = {(5, 36): (1, 9, 17, 25, 33), (5, 32): (1, 8, 15, 22, 29), (5, 64): (1, 16, 31, 46, 61)}
    for (layers, depth), taps in published.items():
        kinds = ["full_attention"] * layers
        spec = drafter(dflash_config=rule, num_hidden_layers=layers, layer_types=kinds, num_target_layers=depth)
        assert spec.target_layer_ids == taps
    one = drafter(dflash_config=rule, num_hidden_layers=1, layer_types=["full_attention"], num_target_layers=9)
    assert one.target_layer_ids == (4,)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, UnsupportedModelError, "DFlash2"),
        ({"architectures": ["DSparkDraftModel"]}, UnsupportedModelError, "DSpark"),
        ({"architectures": ["Qwen3ForCausalLM"]}, UnsupportedModelError, "wanted DFlashDraftModel"),
        ({"sample_from_anchor": True}, UnsupportedModelError, "sample_from_anchor"),
        ({"block_size": DELETE}, CheckpointError, "lacks the field"),
        ({"block_size": 1}, CheckpointError, "block_size is 1"),
        ({"sliding_window": None}, CheckpointError, "lacks the field sliding_window"),
        ({"layer_types": ["full_attention", "x", "full_attention"]}, CheckpointError, "layer_types is 'x'"),
        ({"dflash_config": {"target_layer_ids": [1]}}, CheckpointError, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, CheckpointError, "at least one layer"),
    ],
)
def test_bad_drafter_configs_are_refused(drafter, changes, error, words):
    with pytest.raises(error, match=words):
        drafter(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_target_layers": 9}, "num_target_layers is 9, the target's is 8"),
        ({"hidden_size": 64}, "hidden_size is 64"),
        ({"vocab_size": 500}, "vocab_size is 500"),
        ({"dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 7]}}, "hold 7, wanted 0 to 6"),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}}, "outside the vocabulary of 512"),
    ],
)
def test_pairs_that_do_not_match_are_refused(drafter, changes, words):
    with pytest.raises(CheckpointError, match=words):
        match_pair(read_target_spec(GOLDEN / "qwen3_5-tiny"), drafter(**changes))
