"""A target with a vision tower becomes a bundle that sees; without it, the bundle of text alone."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from builder_support import recipe
from golden_pairs import GOLDEN, directories, golden
from pictures_support import picture
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from edge_dflash.backends import load
from edge_dflash.builder.decide import decide
from edge_dflash.builder.write import BuildConfig, build
from edge_dflash.bundle.manifest import check_manifest
from edge_dflash.bundle.reader import Bundle
from edge_dflash.cli import app
from edge_dflash.errors import BackendError, BundleError, RecipeError
from edge_dflash.pictures.pictured import text_ids

TARGET, DRAFTER = directories("vision")
VISION = "weights/target-vision.safetensors"


def config(output, **changes):
    return BuildConfig(
        **{"target": TARGET, "drafter": DRAFTER, "output": output, "max_context": 200, "rounding": "max", **changes}
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A bundle with the tower, and one without."""
    where = tmp_path_factory.mktemp("built")
    build(config(where / "sees"))
    build(config(where / "text", text_only=True))
    return Bundle.open(where / "sees"), Bundle.open(where / "text")


def rows(bundle, number=0):
    return load(bundle).see(picture(number)).host()


def away(found, number=0):
    """Largest difference from transformers' rows, as a share of their largest value."""
    wanted = golden("vision")[f"img{number}.tower_rows"]
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def test_a_bundle_sees(built):
    bundle, _ = built
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["schema"] == 5
    assert manifest["pair"]["target"]["vision"]["patches"]["max_pixels"] == 65536
    assert {entry["file"] for entry in manifest["sources"]} >= {"preprocessor_config.json"}
    held = {name: form for name, form in bundle.manifest.weights.items() if name.startswith("target.visual.")}
    assert len(held) == 33
    assert set(held.values()) == {"bf16"}
    assert 0 < away(rows(bundle)) <= 0.02  # activations are rounded to BF16


def test_a_bundle_that_sees_is_verified_with_texts(built):
    shown = CliRunner().invoke(app, ["verify", str(built[0].path), "--max-new-tokens", "8", "--json"])
    assert shown.exit_code == 0, shown.exception
    found = json.loads(shown.stdout.splitlines()[-1])
    assert found["ok"]
    assert found["self_test"]["tower"]["ok"]
    assert text_ids([5, 186, 187], 186) == [5, 185, 187]
    assert text_ids([5, 186], None) == [5, 186]


def test_without_the_tower_a_bundle_is_of_text(built):
    sees, text = built
    assert text.pair.target.vision is None
    assert (json.loads((text.path / "manifest.json").read_text()))["schema"] == 1
    assert VISION not in text.manifest.files
    assert sees.manifest.size - text.manifest.size >= sees.manifest.files[VISION].size
    for name in text.manifest.weights:
        assert text.manifest.weights[name] == sees.manifest.weights[name]
    same = [name for name in text.manifest.files if name.startswith("weights/")]
    assert [text.manifest.files[name] for name in same] == [sees.manifest.files[name] for name in same]
    with pytest.raises(BackendError, match="no vision tower"):
        rows(text)


def test_files_of_text_alone_are_a_target_of_text(tmp_path):
    shutil.copytree(TARGET, tmp_path / "target")
    (tmp_path / "target" / "preprocessor_config.json").unlink()
    decided = decide(config(tmp_path / "out", target=tmp_path / "target"))
    assert decided.pair.target.vision is None
    assert any("takes no images; download the file" in warning for warning in decided.warnings)
    quiet = decide(config(tmp_path / "out", target=tmp_path / "target", text_only=True))
    assert not any("images" in warning for warning in quiet.warnings)
    assert "--text-only" in quiet.config.command


def test_a_recipe_makes_the_tower_fp8(built, tmp_path):
    text = "{schema: 1, name: eyes, target: {vision: fp8}}"
    build(config(tmp_path / "fp8", recipe=recipe(tmp_path, text)))
    bundle = Bundle.open(tmp_path / "fp8")
    formats = {name: form for name, form in bundle.manifest.weights.items() if name.startswith("target.visual.")}
    assert {name for name, form in formats.items() if form == "fp8"} == {
        name for name in formats if name.endswith((".qkv", ".proj", "linear_fc1", "linear_fc2"))
    }
    found = rows(bundle)
    assert away(rows(built[0])) < away(found) <= 0.1
    assert bundle.manifest.files[VISION].size < 0.6 * built[0].manifest.files[VISION].size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{schema: 1, name: four, target: {vision: nvfp4}}", "vision is 'nvfp4'; give one of bf16, fp8, keep"),
        (
            "{schema: 1, name: four, overrides: [{match: 'target.visual.*.qkv', format: nvfp4}]}",
            "vision weights are built as bf16 or fp8",
        ),
        (
            "{schema: 1, name: four, overrides: [{match: 'target.visual.pos_embed', format: fp8}]}",
            "embedding weights always stay wide",
        ),
    ],
)
def test_what_a_tower_is_not_built_in_is_refused(tmp_path, text, words):
    with pytest.raises(RecipeError, match=words):
        decide(config(tmp_path / "out", recipe=recipe(tmp_path, text)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("depth", 1025, "a tower of 1025 blocks"),
        ("heads", 0, "the tower's heads is 0"),
        ("heads", 5, "in 5 heads"),
        ("out", 128, "are of another target"),
        ("image_token_id", 192, "image token 192"),
    ],
)
def test_a_manifest_of_no_tower_is_refused(built, field, value, words):
    manifest = built[0].manifest
    target = manifest.pair.target
    other = replace(target, vision=replace(target.vision, **{field: value}))
    changed = replace(manifest, pair=replace(manifest.pair, target=other))
    with pytest.raises(BundleError, match=words):
        check_manifest(changed)


def test_files_of_another_tower_are_refused(built):
    manifest = built[0].manifest
    target = manifest.pair.target
    other = replace(target, vision=replace(target.vision, positions=7))
    with pytest.raises(BundleError, match=r"pos_embed has shape \[36, 64\], wanted \[49, 64\]"):
        Bundle.staged(built[0].path, replace(manifest, pair=replace(manifest.pair, target=other)))


def test_a_mixture_of_experts_sees_with_the_same_tower(tmp_path):
    """The experts' checkpoint with the tower of the dense one: their hidden sizes are the same."""
    text, merged = GOLDEN / "qwen3_5_moe-tiny-perexpert", tmp_path / "target"
    shutil.copytree(text, merged)
    shutil.copy(TARGET / "preprocessor_config.json", merged)
    says = json.loads((TARGET / "config.json").read_text())
    tower = {key: value for key, value in says.items() if key == "vision_config" or key.endswith("_token_id")}
    whole = json.loads((text / "config.json").read_text()) | tower
    (merged / "config.json").write_text(json.dumps(whole))
    visual = {k: v for k, v in load_file(TARGET / "model.safetensors").items() if k.startswith("model.visual.")}
    save_file(load_file(text / "model.safetensors") | visual, merged / "model.safetensors")
    build(config(tmp_path / "sees", target=merged, drafter=None))
    bundle = Bundle.open(tmp_path / "sees")
    assert (bundle.pair.target.architecture, bundle.pair.target.vision.depth) == ("qwen3_5_moe", 2)
    assert away(rows(bundle)) <= 0.02
