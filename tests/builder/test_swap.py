"""A bundle as the target of a build: the same target byte for byte, and another drafter."""

import json
import shutil
from dataclasses import replace

import pytest

from edge_dflash.builder import swap
from edge_dflash.builder.swap import is_bundle
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.reader import Bundle
from edge_dflash.cli import run
from edge_dflash.demo.tasks import MODELS
from edge_dflash.errors import BuildError, CheckpointError
from edge_dflash.planner import Planner
from edge_dflash.training.start import make_start


def manifest_of(path):
    return json.loads((path / "manifest.json").read_text())


def target_files(path):
    return {file.name: file.read_bytes() for file in (path / "weights").glob("target-*")}


@pytest.fixture(scope="module")
def other(golden, ids_bundle, tmp_path_factory):
    """A drafter of the same sizes that knows nothing."""
    sizes, path = tmp_path_factory.mktemp("sizes"), tmp_path_factory.mktemp("drafter") / "other"
    shutil.copyfile(golden / "qwen3_5-tiny-dflash" / "config.json", sizes / "config.json")
    make_start(Bundle.open(ids_bundle).pair.target, sizes, path, seed=5)
    return path


def test_the_same_drafter_gives_the_same_bundle_but_for_what_is_measured_with_the_stored_target(demo_bundle, tmp_path):
    before = target_files(demo_bundle)
    result = build(BuildConfig(demo_bundle, MODELS / "drafter", tmp_path / "again"))
    assert result.warnings == ()
    old, new = manifest_of(demo_bundle), manifest_of(tmp_path / "again")
    assert {key for key in old if old[key] != new[key]} <= {"checksum", "files", "kv_scales", "rounding"}
    own = sum(name.startswith("target.") for name, form in old["weights"].items() if form == "nvfp4")
    assert own > 0
    assert (old["rounding"]["rounded"] - own, own) == (new["rounding"]["rounded"], new["rounding"]["kept"])
    changed = {name for name, entry in old["files"].items() if new["files"][name] != entry}
    rounded = {name for name in changed if name.startswith("weights/drafter-")}
    assert changed - rounded <= {"calibration.json", "selftest.json"}
    assert target_files(tmp_path / "again") == before == target_files(demo_bundle)
    for state, scales in old["kv_scales"].items():
        if state.startswith("target."):
            assert new["kv_scales"][state] == scales
        assert all(abs(a / b - 1) < 0.3 for a, b in zip(scales, new["kv_scales"][state], strict=True))


def test_another_drafter_leaves_every_token_as_it_was(ids_bundle, other, tmp_path):
    before = target_files(ids_bundle)
    build(BuildConfig(ids_bundle, other, tmp_path / "other", calibrate=False))
    assert target_files(tmp_path / "other") == before
    drafters = [
        manifest_of(path)["files"]["weights/drafter-head.safetensors"] for path in (ids_bundle, tmp_path / "other")
    ]
    assert drafters[0] != drafters[1]
    plans = []
    for path in (ids_bundle, tmp_path / "other"):
        with Planner.open(path, fallback=False) as planner:
            plans.append(planner.plan(range(3, 30), max_new_tokens=24).tokens)
    assert plans[0] == plans[1]


def test_the_command_takes_a_drafter_away_and_a_build_gives_one(golden, ids_bundle, tmp_path, capsys):
    argv = [
        "build",
        "--target",
        ids_bundle,
        "--drafter",
        "none",
        "--no-calibrate",
        "--output",
        tmp_path / "plain",
        "--json",
    ]
    assert run([str(word) for word in argv]) == 0
    assert json.loads(capsys.readouterr().out)["bundle"] == str(tmp_path / "plain")
    assert Bundle.open(tmp_path / "plain").pair.drafter is None
    drafter = golden / "qwen3_5-tiny-dflash"
    build(BuildConfig(tmp_path / "plain", drafter, tmp_path / "again", calibrate=False))
    assert Bundle.open(tmp_path / "again").pair == Bundle.open(ids_bundle).pair
    assert target_files(tmp_path / "again") == target_files(ids_bundle)
    assert is_bundle(tmp_path / "again")
    assert not is_bundle(drafter)


def test_a_drafter_of_another_target_is_refused_and_nothing_is_left(ids_bundle, golden, tmp_path):
    with pytest.raises(CheckpointError, match=r"num_target_layers|vocab_size|hidden_size"):
        build(BuildConfig(ids_bundle, golden / "qwen3-tiny-dflash", tmp_path / "none"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"arch": "sm90"}, "--arch is sm90"),
        ({"backend": "native"}, "--backend is native"),
        ({"max_context": 77}, "--max-context is 77"),
        ({"prefill_chunk": 7}, "--prefill-chunk is 7"),
        ({"text_only": True}, "--text-only is True"),
    ],
)
def test_what_is_the_targets_cannot_be_asked_for(ids_bundle, tmp_path, more, said):
    with pytest.raises(BuildError, match=f"{said} and --target is a bundle"):
        build(BuildConfig(ids_bundle, MODELS / "drafter", tmp_path / "none", **more))


def test_plans_and_kernels_of_another_version_are_no_target(ids_bundle, golden, tmp_path):
    manifest = Bundle.open(ids_bundle).manifest
    config = BuildConfig(ids_bundle, golden / "qwen3_5-tiny-dflash", tmp_path / "none")
    with pytest.raises(BuildError, match="only TensorRT runs"):
        swap.refuse(config, replace(manifest, backend="tensorrt"))
    with pytest.raises(BuildError, match="kernels of another version"):
        swap.refuse(config, replace(manifest, backend="native", tools={"kernels": "0"}))


def test_a_swap_that_is_gone_on_with_by_another_recipe_begins_again(ids_bundle, golden, tmp_path):
    drafter, recipe = golden / "qwen3_5-tiny-dflash", tmp_path / "wide.yaml"
    recipe.write_text("schema: 1\nname: wide\ndescription: wide\ndrafter: {attention: bf16, mlp: bf16, fc: bf16}\n")
    first, second = (
        swap.decide_swap(BuildConfig(ids_bundle, drafter, tmp_path / "out", recipe=one, calibrate=False))
        for one in (None, recipe)
    )
    assert first.fingerprint["recipe"] != second.fingerprint["recipe"]
    assert first.fingerprint["bundle"] == second.fingerprint["bundle"]


@pytest.mark.parametrize("lanes", [0, 9])
def test_lanes_that_no_bundle_opens_with_are_refused(ids_bundle, golden, tmp_path, lanes):
    with pytest.raises(BuildError, match=f"lanes is {lanes}, accepted are 1 to 8"):
        build(BuildConfig(ids_bundle, golden / "qwen3_5-tiny-dflash", tmp_path / "out", lanes=lanes, calibrate=False))


def test_a_bundle_is_not_put_where_its_target_lies(ids_bundle, golden):
    with pytest.raises(BuildError, match="is a checkpoint of this build"):
        build(BuildConfig(ids_bundle, golden / "qwen3_5-tiny-dflash", ids_bundle, force=True))
