"""Drafters that a training begins with and leaves: read as they were, and written so that a build takes them."""

import json
import shutil

import pytest
import torch
from golden_pairs import EXPERTS, GOLDEN, NAMES, WALKS, directories, pair, store

from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.errors import CheckpointError, RequestError
from edge_dflash.model import pair_programs
from edge_dflash.model.registry import read_drafter_spec, read_pair
from edge_dflash.training.drafter import drafter_weights
from edge_dflash.training.start import make_start, published_config, read_weights, same_files, save_weights
from edge_dflash.weights.checkpoint import PairCheckpoint
from edge_dflash.weights.quantize import dequantize

PAIRS = (*NAMES, *WALKS, EXPERTS)


@pytest.mark.parametrize("name", PAIRS)
def test_a_checkpoint_is_read_and_written_as_it_is(name, tmp_path):
    target, drafter = directories(name)
    found = make_start(pair(name).target, drafter, tmp_path / "start")
    assert found == pair(name)
    weights = read_weights(tmp_path / "start", found)
    for weight in drafter_weights(found):
        assert torch.equal(weights[weight], dequantize(store(name).get(weight)))
    changed = {name: values + 1 for name, values in weights.items()}
    save_weights(tmp_path / "after", found, changed, tmp_path / "start")
    assert read_drafter_spec(tmp_path / "after", found.target.num_layers) == found.drafter
    opened = PairCheckpoint.open(target, tmp_path / "after", pair_programs(found).weights)
    for weight, values in changed.items():
        assert torch.equal(dequantize(opened.get(weight)), values.bfloat16().float())


@pytest.mark.parametrize("name", PAIRS)
def test_a_configuration_alone_gets_random_weights(name, tmp_path):
    target, drafter = directories(name)
    (tmp_path / "sizes").mkdir()
    shutil.copyfile(drafter / "config.json", tmp_path / "sizes" / "config.json")
    found = make_start(pair(name).target, tmp_path / "sizes", tmp_path / "start", seed=1)
    PairCheckpoint.open(target, tmp_path / "start", pair_programs(found).weights)
    make_start(pair(name).target, tmp_path / "sizes", tmp_path / "other", seed=1)
    one, other = ((tmp_path / which / "model.safetensors").read_bytes() for which in ("start", "other"))
    assert one == other


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3-8b", "qwen3.5-4b", "qwen3.6-35b-a3b", "qwen3-coder-30b-a3b"])
def test_published_sizes_are_those_of_published_drafters(name):
    published = synthetic_pair(name)
    config = published_config(published.target, published.drafter.mask_token_id)
    assert config["dflash_config"]["target_layer_ids"][0] == 1
    assert config["num_attention_heads"] == 32
    if name in ("qwen3-8b", "qwen3.5-4b", "qwen3.6-27b"):
        assert config["num_hidden_layers"] == published.drafter.num_layers
        assert config["dflash_config"]["target_layer_ids"] == list(published.drafter.target_layer_ids)


@pytest.mark.parametrize("name", NAMES)
def test_from_scratch_a_small_target_gets_a_drafter_that_a_build_takes(name, tmp_path):
    target, _ = directories(name)
    found = make_start(pair(name).target, None, tmp_path, mask_token_id=3)
    assert read_pair(target, tmp_path) == found
    PairCheckpoint.open(target, tmp_path, pair_programs(found).weights)
    with pytest.raises(RequestError, match="--mask-token"):
        make_start(pair(name).target, None, tmp_path / "none")


def test_drafters_that_cannot_be_trained_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"vocab_size|hidden_size|num_target_layers"):
        make_start(pair("qwen3").target, GOLDEN / "qwen3_5-tiny-dflash", tmp_path / "other")
    shutil.copytree(GOLDEN / "qwen3-tiny-dflash", tmp_path / "lacks")
    config = json.loads((tmp_path / "lacks" / "config.json").read_text())
    (tmp_path / "lacks" / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 9, "layer_types": ["full_attention"] * 9})
    )
    with pytest.raises(RequestError, match="incomplete or quantized"):
        make_start(pair("qwen3").target, tmp_path / "lacks", tmp_path / "start")


def test_only_what_is_the_drafter_s_is_taken_over(tmp_path):
    _, drafter = directories(NAMES[0])
    init = shutil.copytree(drafter, tmp_path / "init")
    for name in ("card.json", "training.json", "README.md", "modeling.py"):
        (init / name).write_text("{}")
    make_start(pair(NAMES[0]).target, init, tmp_path / "start")
    names = {path.name for path in (tmp_path / "start").iterdir()}
    assert names == {path.name for path in drafter.iterdir()} | {"modeling.py"}
    assert same_files(init, tmp_path / "start")
    (init / "config.json").write_text((init / "config.json").read_text() + "\n")
    assert not same_files(init, tmp_path / "start")


def test_random_weights_beside_a_configuration_are_no_other_start(tmp_path):
    _, drafter = directories(NAMES[0])
    (tmp_path / "sizes").mkdir()
    shutil.copyfile(drafter / "config.json", tmp_path / "sizes" / "config.json")
    make_start(pair(NAMES[0]).target, tmp_path / "sizes", tmp_path / "start")
    assert same_files(tmp_path / "sizes", tmp_path / "start")
    shutil.copyfile(drafter / "model.safetensors", tmp_path / "sizes" / "model.safetensors")
    assert not same_files(tmp_path / "sizes", tmp_path / "start")


def test_a_mask_token_is_of_a_drafter_from_scratch(tmp_path):
    _, drafter = directories(NAMES[0])
    with pytest.raises(RequestError, match=r"--mask-token is 5, and .* says its own; leave it out"):
        make_start(pair(NAMES[0]).target, drafter, tmp_path / "start", mask_token_id=5)
