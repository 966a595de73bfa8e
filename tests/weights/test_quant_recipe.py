"""Recipes: defaults, the rules of choice, refusals, and every recipe file that ships."""

import json
import re
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import mixture_config

from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.common.files import directory
from edge_dflash.errors import RecipeError
from edge_dflash.model import pair_programs
from edge_dflash.model.program import WeightSpec
from edge_dflash.model.registry import read_pair
from edge_dflash.weights.formats import WideWeight, read_as
from edge_dflash.weights.quantize import quantize_fp8, quantize_nvfp4
from edge_dflash.weights.recipe import WISHES, Override, Recipe, default_recipe, load_recipe

SHIPPED = sorted(directory("engines").glob("*.yaml"))
WEIGHTS = pair_programs(synthetic_pair("qwen3.6-27b")).weights
MLP = "target.layers.0.mlp.gate_proj"
GATE = "target.layers.0.linear_attn.in_proj_a"
WIDE = WideWeight(np.zeros((4, 32), dtype=np.uint16))
WIDE32 = WideWeight(np.zeros((4, 32), dtype=np.float32))
FP8 = quantize_fp8(torch.ones(4, 32))
NVFP4 = quantize_nvfp4(torch.ones(4, 32))


def read(tmp_path: Path, text: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text("schema: 1\nname: test\n" + text)
    return load_recipe(path)


def read_bytes(recipe: Recipe, model: str) -> int:
    """Bytes of one read of a model's weights, embedding excluded."""
    formats = recipe.formats(WEIGHTS)
    return sum(
        read_as(formats[name]).nbytes(spec.shape)
        for name, spec in WEIGHTS.items()
        if name.startswith(model) and spec.module != "embedding"
    )


def test_default_recipe_meets_the_published_budget():
    recipe = default_recipe()
    formats = recipe.formats(WEIGHTS)
    assert formats["target.lm_head"] == formats[MLP] == "nvfp4"
    assert formats[GATE] == formats["target.embed_tokens"] == formats["target.layers.0.linear_attn.A_log"] == "bf16"
    assert formats["drafter.fc"] == "fp8"
    assert read_bytes(recipe, "target.") == pytest.approx(14.452e9, rel=1e-3)
    assert read_bytes(recipe, "drafter.") == pytest.approx(1.03e9, rel=5e-3)
    assert (recipe.kv, recipe.activations) == ("fp8", "bf16")


def test_mixed_recipe_reads_what_nvidias_checkpoint_reads():
    recipe = load_recipe(directory("engines") / "qwen3.6-27b-sm110-mixed.yaml")
    assert read_bytes(recipe, "target.") == pytest.approx(17.608e9, rel=1e-3)


def test_all_nvfp4_experts_read_what_was_computed_for_a_token():
    recipe = load_recipe(directory("engines") / "qwen3.6-35b-a3b-sm110-nvfp4.yaml")
    assert recipe.requantize == "fp8"
    names = read_target_names()
    formats = recipe.formats(names)
    chosen = re.compile(r"mlp\.experts\.([89]|\d\d+)\.")  # 8 of them are read
    read = {name: spec for name, spec in names.items() if spec.module != "embedding" and not chosen.search(name)}
    assert sum(read_as(formats[name]).nbytes(spec.shape) for name, spec in read.items()) == pytest.approx(
        1.69e9, rel=5e-3
    )


def read_target_names():
    """Weights of Qwen3.6-35B-A3B."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(mixture_config()))
        return pair_programs(read_pair(Path(directory), None)).weights


@pytest.mark.parametrize(
    ("found", "keeps", "result"), [(FP8, False, "nvfp4"), (FP8, True, "fp8"), (NVFP4, False, "nvfp4")]
)
def test_fp8_is_requantized_where_a_recipe_says_so(tmp_path, found, keeps, result):
    recipe = replace(read(tmp_path, "requantize: fp8"), keeps=keeps)
    assert recipe.choice(MLP, WEIGHTS[MLP], found) == result
    with pytest.raises(RecipeError, match="asks for bf16"):
        replace(recipe, target={**recipe.target, "mlp": "bf16"}, keeps=False).choice(MLP, WEIGHTS[MLP], found)


def test_rounding_is_by_search_unless_a_recipe_says_max(tmp_path):
    assert default_recipe().rounding == read(tmp_path, "").rounding == "search"
    assert read(tmp_path, "rounding: max").rounding == "max"
    with pytest.raises(RecipeError, match="rounding is 'luck'; give one of max, search"):
        read(tmp_path, "rounding: luck")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_loads_and_applies(path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert recipe.description
    assert recipe.calibration.path.is_file()
    formats = recipe.formats(WEIGHTS)
    quantized = {WEIGHTS[name].module for name, form in formats.items() if form in ("fp8", "nvfp4")}
    assert quantized <= {"attention", "gated_delta", "mlp", "lm_head", "fc"}
    assert f"| `{path.stem}`" in (readme := (path.parent / "README.md").read_text()) or f"`{path.stem}` |" in readme


def test_left_out_keys_are_the_defaults(tmp_path):
    recipe, default = read(tmp_path, ""), default_recipe()
    assert (recipe.target, recipe.drafter, recipe.context) == (default.target, default.drafter, default.context)
    assert recipe.calibration == default.calibration
    assert read(tmp_path, "target: {mlp: fp8}").target == {**default.target, "mlp": "fp8"}


@pytest.mark.parametrize(
    ("wish", "stored", "result"),
    [
        ("nvfp4", WIDE, "nvfp4"),
        ("nvfp4", WIDE32, "nvfp4"),
        ("nvfp4", NVFP4, "nvfp4"),
        ("nvfp4", FP8, None),
        ("fp8", WIDE, "fp8"),
        ("fp8", FP8, "fp8"),
        ("fp8", NVFP4, None),
        ("bf16", WIDE, "bf16"),
        ("bf16", WIDE32, "bf16"),
        ("bf16", FP8, None),
        ("bf16", NVFP4, None),
        ("keep", WIDE, "bf16"),
        ("keep", WIDE32, "f32"),
        ("keep", FP8, "fp8"),
        ("keep", NVFP4, "nvfp4"),
        ("keep", None, "bf16"),
        ("nvfp4", None, "nvfp4"),
    ],
)
def test_choice(wish, stored, result):
    recipe = Recipe("r", target={"mlp": wish})
    spec = WeightSpec((4, 32), "linear", "mlp")
    if result is None:
        with pytest.raises(RecipeError, match=f"target.mlp asks for {wish} of {MLP}, which the checkpoint stores as"):
            recipe.choice(MLP, spec, stored)
    else:
        assert recipe.choice(MLP, spec, stored) == result


@given(st.sampled_from(sorted(WEIGHTS)), st.sampled_from(["bf16", "keep", "fp8", "nvfp4"]))
def test_what_must_stay_wide_stays_wide(name, wish):
    spec = WEIGHTS[name]
    recipe = Recipe("r", overrides=(Override(name, wish),))
    wide = spec.kind != "linear" or spec.module == "gates"
    if wide and wish in ("fp8", "nvfp4"):
        with pytest.raises(RecipeError, match="always stay wide"):
            recipe.choice(name, spec, None)
    else:
        assert recipe.choice(name, spec, None) == ("bf16" if wish == "keep" else wish)
        if wide:
            assert recipe.choice(name, spec, WIDE32) == "f32"


def test_input_dimension_must_be_a_multiple_of_16():
    spec = WeightSpec((32, 24), "linear", "mlp")
    with pytest.raises(RecipeError, match=f"{MLP}, whose input dimension 24 is not a multiple of 16"):
        default_recipe().choice(MLP, spec, None)
    assert Recipe("r", target={"mlp": "fp8"}).choice(MLP, spec, None) == "fp8"


def test_last_matching_override_wins(tmp_path):
    recipe = read(
        tmp_path,
        'overrides:\n- {match: "target.layers.*.mlp.*", format: fp8}\n'
        '- {match: "target.layers.6[23].mlp.down_proj", format: bf16}\n',
    )
    formats = recipe.formats(WEIGHTS)
    assert formats["target.layers.61.mlp.down_proj"] == formats["target.layers.63.mlp.up_proj"] == "fp8"
    assert formats["target.layers.62.mlp.down_proj"] == "bf16"
    assert formats["drafter.layers.0.mlp.down_proj"] == "nvfp4"


def test_override_that_matches_nothing_is_refused(tmp_path):
    recipe = read(tmp_path, 'overrides: [{match: "model.layers.*", format: fp8}]')
    with pytest.raises(RecipeError, match=r"'model.layers.\*' matches no weight"):
        recipe.formats(WEIGHTS)


def test_w4a4_reaches_nvfp4_linears_but_not_head_and_fc():
    recipe = Recipe("r", drafter={"fc": "nvfp4"}, activations="nvfp4")
    used = {
        spec.module for name, spec in WEIGHTS.items() if recipe.nvfp4_activations(spec, recipe.choice(name, spec, None))
    }
    assert used == {"attention", "gated_delta", "mlp"}
    assert not any(default_recipe().nvfp4_activations(s, "nvfp4") for s in WEIGHTS.values())
    assert not recipe.nvfp4_activations(WEIGHTS[MLP], "fp8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights: {}", "weights is unknown here; known are schema, name, description, target"),
        ("target: {expert: fp8}", r"target.expert is unknown here; did you mean experts\? known are attention"),
        ("drafter: {lm_head: fp8}", "drafter.lm_head is unknown here; known are attention, mlp, fc, norm"),
        ("target: {mlp: int4}", f"mlp is 'int4'; give one of {', '.join(WISHES)}"),
        ("target: {gates: nvfp4}", "gates is 'nvfp4'; give one of bf16, keep"),
        ("target: {norm: fp8}", "norm is 'fp8'; give one of bf16, keep"),
        ("target: [mlp]", r"target is \['mlp'\]; give a mapping"),
        ("overrides: {a: b}", "overrides is .*; give a list"),
        ("overrides: [{match: x}]", r"overrides\[0\].format is missing; give one of"),
        ("overrides: [{match: '', format: fp8}]", r"overrides\[0\].match is ''; give text"),
        ("activations: fp8", "activations is 'fp8'; give one of bf16, nvfp4"),
        ("kv: nvfp4", "kv is 'nvfp4'; give one of fp8, bf16"),
        ("kv: true", "kv is True; give one of fp8, bf16"),
        ("calibration: {tokens: 0}", "tokens is 0; give a positive integer"),
        ("calibration: {tokens: true}", "tokens is True; give a positive integer"),
        ("calibration: {margin: 0.9}", "margin is 0.9; give a number from 1"),
        ("calibration: {margin: .nan}", "margin is nan"),
        ("context: {max_context: 1.5}", "max_context is 1.5"),
        ("context: {window: 5}", "window is unknown here; known are max_context, prefill_chunk"),
        ("kv: fp8\nkv: bf16", "key 'kv' is given twice"),
        ("kv: [", "not a readable YAML file"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, text, message):
    with pytest.raises(RecipeError, match=message) as caught:
        read(tmp_path, text)
    assert "r.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schema_name_and_file(tmp_path):
    path = tmp_path / "r.yaml"
    for text, message in (
        ("name: x", "schema is missing; give 1"),
        ("schema: 2\nname: x", "schema is 2; give 1"),
        ("schema: 1", "name is missing; give a text"),
        ("", "the document is None; give a mapping"),
    ):
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            load_recipe(path)
    with pytest.raises(RecipeError, match="not a readable YAML file"):
        load_recipe(tmp_path / "absent.yaml")


def test_calibration_file_is_found_beside_the_recipe_then_in_calib(tmp_path):
    (tmp_path / "own.jsonl").write_text("{}\n")
    assert read(tmp_path, "calibration: {file: own.jsonl}").calibration.path == tmp_path / "own.jsonl"
    assert read(tmp_path, "").calibration.path == directory("calib") / "robot_planning.jsonl"
    with pytest.raises(RecipeError, match=r"'absent.jsonl' is neither in calib/ nor"):
        _ = read(tmp_path, "calibration: {file: absent.jsonl}").calibration.path
