import json
from dataclasses import replace

import pytest
from golden_pairs import GOLDEN

from edge_dflash.errors import CheckpointError, UnsupportedModelError
from edge_dflash.model.registry import match_pair, read_drafter_spec, read_pair, read_target_spec
from edge_dflash.model.specs import DrafterLayerMask, ExpertsSpec, YarnScaling

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
        ({"architectures": ["Qwen3_5MoeForCausalLM"]}, UnsupportedModelError, "model_type is 'qwen3_5_text': another"),
        ({"architectures": ["LlamaForCausalLM"]}, UnsupportedModelError, "architecture LlamaForCausalLM"),
        ({"architectures": ["DFlashDraftModel"]}, UnsupportedModelError, "give it as the drafter"),
        ({"attention_bias": "no"}, CheckpointError, "attention_bias is 'no', wanted true or false"),
        ({"hidden_size": DELETE}, CheckpointError, "lacks the field hidden_size"),
        ({"num_hidden_layers": 7}, CheckpointError, "layer_types is 8, wanted a list of 7"),
        ({"num_key_value_heads": 3}, CheckpointError, "num_key_value_heads is 3"),
        ({"linear_num_value_heads": 5}, CheckpointError, "linear_num_value_heads is 5"),
        ({"linear_num_value_heads": 5, "eos_token_id": -1}, CheckpointError, "linear_num_value_heads is 5"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "llama3"}}, CheckpointError, "rope_type is 'llama3'"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.3}}, CheckpointError, "partial_rotary"),
        ({"eos_token_id": "x"}, CheckpointError, "eos_token_id is 'x'"),
        ({"eos_token_id": [0, 512]}, CheckpointError, r"eos_token_id is \[0, 512\], wanted a token id below .* 512"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, CheckpointError, "layer_types is 'linear_attention'"),
    ],
)
def test_bad_target_configs_are_refused(target, changes, error, words):
    with pytest.raises(error, match=words) as caught:
        target(**changes)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "yarn"}}, "lacks the field rope_scaling.factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, r"rope_scaling\.factor is 0\.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1.0}}, "mscale is 1.0, wanted no such setting"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "wanted 'default' or 'yarn'"),
        ({"partial_rotary_factor": 0.5}, "wanted 1: this architecture rotates whole heads"),
    ],
)
def test_rotary_settings_that_would_be_dropped_are_refused(target, changes, words):
    with pytest.raises(CheckpointError, match=words):
        target("qwen3-tiny", **changes)


def test_yarn_settings(target):
    yarn = {"type": "yarn", "factor": 2, "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}
    scaling = target("qwen3-tiny", rope_parameters=DELETE, rope_theta=1e6, rope_scaling=yarn).attention.rope.scaling
    assert scaling == YarnScaling(2.0, 1024, 1.5, 16.0, 2.0)  # 1024: max_position_embeddings


def test_sliding_windows_of_a_target_are_refused(target):
    with pytest.raises(CheckpointError, match="layer_types is 'sliding_attention'"):
        target("qwen3-tiny", layer_types=["sliding_attention"] * 6)
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        target("qwen3-tiny", layer_types=DELETE, use_sliding_window=True, sliding_window=8)


def test_drafter_variants(drafter):
    base = drafter()
    assert base.layers == (DrafterLayerMask(False, 24),) * 2 + (DrafterLayerMask(True, None),)
    nested = {"mask_token_id": 511, "target_layer_ids": [1, 4, 6], "block_size": 8}
    assert drafter(block_size=DELETE, dflash_config=nested) == base
    assert drafter(use_sliding_window=False) == base  # the flag is not what decides
    assert drafter(use_sliding_window=DELETE) == base
    assert drafter(rope_theta=DELETE, rope_parameters={"rope_theta": 1e7, "rope_type": "default"}) == base
    assert drafter(layer_types=DELETE).layers == (DrafterLayerMask(True, None),) * 3


def test_without_layer_types_a_window_counts_when_it_is_used(drafter):
    masks = (DrafterLayerMask(True, None), DrafterLayerMask(False, 24), DrafterLayerMask(False, 24))
    assert drafter(layer_types=DELETE, max_window_layers=1).layers == masks
    assert drafter(layer_types=DELETE, max_window_layers=1, use_sliding_window=False).layers == masks[:1] * 3
    with pytest.raises(CheckpointError, match="lacks the field max_window_layers"):  # which layers slide is not guessed
        drafter(layer_types=DELETE, use_sliding_window=True, max_window_layers=DELETE)


@pytest.mark.parametrize("name", ["qwen3-tiny-dflash", "qwen3_5-tiny-dflash2", "qwen3-tiny-dspark-gated"])
def test_what_only_training_knows_is_never_guessed(tmp_path, name):
    golden = json.loads((GOLDEN / name / "config.json").read_text())
    nested = golden.get("dflash_config", {})
    asked = {"target_layer_ids", "mask_token_id", "block_size"}
    asked |= {key for key in (*golden, *nested) if key.startswith(("conv_", "selector_")) or key == "markov_rank"}
    assert asked <= {*golden, *nested}
    for key in sorted(asked):
        for value in (DELETE, None):
            config = {**golden, "dflash_config": dict(nested)} if nested else dict(golden)
            place = config if key in golden else config["dflash_config"]
            place[key] = value
            if value is DELETE:
                del place[key]
            (tmp_path / "config.json").write_text(json.dumps(config))
            with pytest.raises(
                CheckpointError, match=rf"lacks the field {key}, also inside dflash_config; only the dr"
            ):
                read_drafter_spec(tmp_path, 6)


def test_a_target_says_how_many_layers_it_has_where_its_drafter_does_not(drafter, tmp_path):
    known = drafter()
    for missing in (DELETE, None):
        assert drafter(num_target_layers=missing).num_target_layers == max(known.target_layer_ids) + 2  # at least
    pair_of = json.loads((GOLDEN / "qwen3_5-tiny-dflash" / "config.json").read_text())
    del pair_of["num_target_layers"]
    (tmp_path / "config.json").write_text(json.dumps(pair_of))
    assert read_pair(GOLDEN / "qwen3_5-tiny", tmp_path) == read_pair(
        GOLDEN / "qwen3_5-tiny", GOLDEN / "qwen3_5-tiny-dflash"
    )
    pair_of["dflash_config"]["target_layer_ids"] = [1, 4, 7]
    (tmp_path / "config.json").write_text(json.dumps(pair_of))
    with pytest.raises(CheckpointError, match=r"target_layer_ids hold 7, wanted -1 \(the embedding\) to 6"):
        read_pair(GOLDEN / "qwen3_5-tiny", tmp_path)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, CheckpointError, "lacks the field conv_kernel_size"),
        ({"architectures": ["DSparkDraftModel"]}, CheckpointError, "lacks the field markov_rank"),
        ({"architectures": ["Qwen3ForCausalLM"]}, UnsupportedModelError, "wanted DFlashDraftModel"),
        ({"sample_from_anchor": True}, UnsupportedModelError, "sample_from_anchor"),
        ({"transformer_layer_config": {}}, UnsupportedModelError, "speculators format"),
        ({"model_type": "llama"}, CheckpointError, "model_type is 'llama': another model, wanted 'qwen3'"),
        ({"attention_bias": True}, UnsupportedModelError, "attention_bias"),
        (
            {"dflash_config": {"mask_token_id": 511, "block_size": 16, "target_layer_ids": [1]}},
            CheckpointError,
            "block_size is 8, wanted the same",
        ),
        ({"sliding_window": None}, CheckpointError, "lacks the field sliding_window"),
        ({"layer_types": ["full_attention", "x", "full_attention"]}, CheckpointError, "layer_types is 'x'"),
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
        (
            {"dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 7]}},
            r"hold 7, wanted -1 \(the embedding\) to 6",
        ),
        ({"dflash_config": {"mask_token_id": 512, "target_layer_ids": [1]}}, "outside the vocabulary of 512"),
    ],
)
def test_pairs_that_do_not_match_are_refused(drafter, changes, words):
    with pytest.raises(CheckpointError, match=words):
        match_pair(read_target_spec(GOLDEN / "qwen3_5-tiny"), drafter(**changes))


def mixed(**changes):
    """config.json of Qwen3 with experts, by that of a dense one."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return experts | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | changes


def test_experts_of_flat_and_nested_configs(target):
    flat = read_target_spec(GOLDEN / "qwen3_5_moe-tiny")
    assert flat.experts == ExpertsSpec(8, 2, 16, 48, True)
    assert (flat.architecture, flat.intermediate_size) == ("qwen3_5_moe", 0)
    for form in ("perexpert", "nvfp4-modelopt", "nvfp4-ct"):
        assert read_target_spec(GOLDEN / f"qwen3_5_moe-tiny-{form}") == flat
    dense = target("qwen3-tiny")
    older = target("qwen3-tiny", **mixed())
    assert older.experts == ExpertsSpec(8, 2, 16, None, True)
    assert dense.experts is None
    assert replace(older, architecture="qwen3", experts=None, intermediate_size=dense.intermediate_size) == dense


def test_the_weights_of_experts_sum_to_1_only_where_the_config_says_so(target):
    assert not target("qwen3-tiny", **mixed(norm_topk_prob=False)).experts.renormalised
    without = mixed()
    del without["norm_topk_prob"]
    assert not target("qwen3-tiny", **without).experts.renormalised  # as transformers reads it
    assert target("qwen3_5_moe-tiny", norm_topk_prob=True).experts.renormalised


def test_experts_are_counted_by_either_name(target):
    local = mixed(num_local_experts=12)
    del local["num_experts"]
    assert target("qwen3-tiny", **local).experts.count == 12
    assert target("qwen3-tiny", **mixed(num_local_experts=8)).experts.count == 8
    with pytest.raises(CheckpointError, match=r"num_experts is 8, wanted the same as num_local_experts \(12\)"):
        target("qwen3-tiny", **mixed(num_local_experts=12))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 513}, "num_experts is 513, wanted an integer of at most 512"),
        ({"num_experts": None}, "lacks the field num_experts"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, wanted at most num_experts \(8\)"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2: layers without experts, wanted 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]: layers without experts"),
        ({"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size is 32: a shared expert"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3': another model, wanted 'qwen3_moe'"),
    ],
)
def test_mixtures_that_are_not_known_are_refused(target, changes, words):
    settings = {key: value for key, value in mixed(**changes).items() if value is not DELETE}
    with pytest.raises(CheckpointError, match=words):
        target("qwen3-tiny", **settings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob is false: weights of experts that do not sum to 1, wanted true"),
        ({"shared_expert_intermediate_size": DELETE}, "lacks the field shared_expert_intermediate_size"),
        ({"model_type": "qwen3_5_text"}, "another model, wanted 'qwen3_5_moe' or 'qwen3_5_moe_text'"),
    ],
)
def test_mixtures_with_a_shared_expert_that_are_not_known_are_refused(target, changes, words):
    with pytest.raises(CheckpointError, match=words):
        target("qwen3_5_moe-tiny", **changes)
