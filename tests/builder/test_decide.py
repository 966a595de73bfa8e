import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from builder_support import BF16, GOLDEN, TARGETS, add_tokenizer, config_of, copy_target, recipe

from edge_dflash.board.archs import BACKENDS
from edge_dflash.builder.decide import BuildConfig, decide
from edge_dflash.builder.journal import WorkDir
from edge_dflash.errors import (
    BackendError,
    BuildError,
    CheckpointError,
    EdgeDflashError,
    RecipeError,
    UnsupportedModelError,
)


def refused(config, kind, *words):
    """Refused in one line, before anything is written."""
    before = sorted(config.output.parent.rglob("*"))
    with pytest.raises(EdgeDflashError) as error:
        decide(config)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert sorted(config.output.parent.rglob("*")) == before


def test_a_plan_knows_formats_files_and_size(tmp_path):
    plan = decide(config_of("qwen3", tmp_path / "out"))
    assert sorted(name for part in plan.parts.values() for name in part.names) == sorted(plan.manifest.weights)
    assert plan.manifest.weights["target.lm_head"] == "nvfp4"
    assert (plan.manifest.max_context, plan.manifest.prefill_chunk) == (
        1024,
        256,
    )  # what a CPU does in a tenth of a second
    assert 900_000 < plan.size < 1_000_000
    wide = decide(config_of("qwen3", tmp_path / "out", recipe=recipe(tmp_path, BF16)))
    assert wide.manifest.weights["target.lm_head"] == "tied"
    assert "target.lm_head" not in str(wide.parts)


def test_the_fingerprint_changes_with_every_input_and_with_nothing_else(tmp_path):
    target = copy_target("qwen3", tmp_path / "target")
    config = config_of("qwen3", tmp_path / "out", target=target)
    first = decide(config).fingerprint
    assert decide(replace(config, output=tmp_path / "other", force=True)).fingerprint == first

    def changed(config):
        second = decide(config).fingerprint
        return {key for key in {**first, **second} if first.get(key) != second.get(key)}

    assert changed(replace(config, max_context=100)) == {"config"}
    assert changed(replace(config, prefill_chunk=100)) == {"config"}
    assert changed(replace(config, lanes=2)) == {"config"}
    assert changed(replace(config, recipe=recipe(tmp_path, BF16))) == {"recipe"}
    os.utime(target / "model.safetensors", ns=(1, 1))
    assert changed(config) == {"target/model.safetensors"}


def test_paths_that_cannot_work_are_refused(tmp_path):
    output = tmp_path / "out"
    refused(
        config_of("qwen3", output, target=tmp_path / "no"),
        CheckpointError,
        "no directory",
        "give one with a checkpoint",
    )
    refused(config_of("qwen3", output, drafter=TARGETS["qwen3"]), UnsupportedModelError, "DFlashDraftModel")
    refused(config_of("qwen3", output, drafter=GOLDEN / "qwen3_5-tiny-dflash"), CheckpointError, "num_target_layers")
    refused(config_of("qwen3", output, recipe=tmp_path / "no.yaml"), RecipeError, "no.yaml")
    target = copy_target("qwen3", tmp_path / "target")
    refused(config_of("qwen3", target, target=target), BuildError, "is a checkpoint of this build")
    with pytest.raises(BuildError, match="'/' names no directory to make; give a path that ends in a name"):
        decide(config_of("qwen3", Path("/")))
    output.write_text("")
    refused(config_of("qwen3", output), BuildError, "exists and is no directory")
    output.unlink()
    output.mkdir()
    decide(config_of("qwen3", output))
    (output / "thesis.tex").write_text("mine")
    refused(config_of("qwen3", output), BuildError, "exists; remove it, choose another, or replace it with --force")
    refused(config_of("qwen3", output, force=True), BuildError, "holds no bundle, so --force does not replace it")
    (output / "manifest.json").write_text("")
    decide(config_of("qwen3", output, force=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"arch": "sm42"},
            ("arch is 'sm42'; accepted are cpu, sm87, sm89, sm90, sm110, sm120, sm121 (sm121a, 121 and",),
        ),
        ({"backend": "onnx"}, (f"--backend is 'onnx', accepted are {', '.join(BACKENDS)} and native,tensorrt",)),
        ({"backend": "native"}, ("--arch is 'cpu', --backend native is built for sm87, sm89, sm90, sm110",)),
        ({"backend": "tensorrt"}, ("--arch is 'cpu', --backend tensorrt is built for sm87, sm89, sm90, sm110, sm12",)),
        ({"arch": "sm110a", "backend": "reference"}, ("--backend reference is built for cpu; leave --backend out",)),
        ({"backend": "reference,native"}, ("only native and tensorrt share a bundle: build the other apart",)),
    ],
)
def test_backends_that_are_not_there_are_named(tmp_path, changes, words):
    refused(config_of("qwen3", tmp_path / "out", **changes), BackendError, *words)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"max_context": 8}, "max_context is 8, accepted are 9 (block size + 1) to 1024"),
        ({"max_context": 1025}, "max_context is 1025, accepted are 9"),
        ({"lanes": 9}, "lanes is 9, accepted are 1 to 8"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, accepted are 1 to 1024"),
        ({"max_context": 64, "prefill_chunk": 65}, "prefill_chunk is 65, accepted are 1 to 64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path, changes, word):
    refused(config_of("qwen3", tmp_path / "out", **changes), BuildError, word)


def test_suggested_sizes_are_lowered_to_the_model(tmp_path):
    plan = decide(config_of("qwen3", tmp_path / "out", max_context=100))
    assert (plan.manifest.max_context, plan.manifest.prefill_chunk) == (100, 100)


def test_a_disk_without_space_is_refused_with_the_numbers(tmp_path, monkeypatch):
    small = SimpleNamespace(free=1_000_000)
    monkeypatch.setattr("edge_dflash.builder.journal.shutil.disk_usage", lambda place: small)
    output = tmp_path / "deep" / "down" / "out"
    config = replace(config_of("qwen3", output), output=output)
    with pytest.raises(BuildError, match=r"needs 2.0 MB more .* has 1.0 MB free; free some space or choose another"):
        decide(config)
    assert not output.parent.exists()
    output = tmp_path / "out"
    with WorkDir(output, {}, "x") as work:
        (work.staging / "part").write_bytes(b"0" * 1_500_000)
    decide(replace(config, output=output))  # what an earlier run left there counts


@pytest.mark.parametrize(("size", "warnings"), [(512, 0), (511, 1)])
def test_tokenizers_that_fit_the_mask_token(tmp_path, size, warnings):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), size)
    config = config_of("qwen3", tmp_path / "out", target=target)
    plan = decide(config)
    assert [path.name for path in plan.tokenizer_files] == ["tokenizer.json", "tokenizer_config.json"]
    assert len(plan.scales.ids) == 1016  # the target's 1024 positions less the block
    assert len(plan.warnings) == warnings
    assert all("mask token id 511 has no token in tokenizer.json" in warning for warning in plan.warnings)


def test_tokenizers_without_the_mask_id_are_refused(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 300)
    config = config_of("qwen3", tmp_path / "out", target=target)
    refused(config, CheckpointError, "no token with the drafter's mask id 511 (it has 300 tokens)", "move it away")
    add_tokenizer(target, 513)
    refused(config, CheckpointError, "has 513 tokens, the target's vocabulary only 512")
    (target / "tokenizer.json").write_text("{")
    refused(config, CheckpointError, "cannot read", "download the tokenizer's files again")


def test_chat_templates_that_are_no_jinja_are_refused(tmp_path):
    target = add_tokenizer(copy_target("qwen3", tmp_path / "target"), 512)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{% for a in %}"}))
    refused(config_of("qwen3", tmp_path / "out", target=target), CheckpointError, "is not valid Jinja (", "files again")


def test_the_command_names_every_choice(tmp_path):
    config = BuildConfig(tmp_path / "a b", tmp_path / "d", tmp_path / "out", max_context=9, calibrate=False, force=True)
    config = replace(config, rounding="max")
    assert config.command == (
        f"edge-dflash build --target '{tmp_path}/a b' --drafter {tmp_path}/d --output {tmp_path}/out --arch cpu "
        "--max-context 9 --no-calibrate --force --rounding max"
    )
