"""Damaged checkpoints, recipes and bundles, full disks and interruptions: refused, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import contextmanager

import pytest
from cli_support import flip_byte
from text_support import write_tokenizer

import edge_dflash.cli.build
from edge_dflash.bundle import parts


def rewrite(checkpoint, change):
    """Change the header or the bytes of a checkpoint's tensors."""
    file = checkpoint / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def corrupt_header(target, drafter):
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:8] + b"!" + file.read_bytes()[9:])


def truncate(target, drafter):
    file = target / "model.safetensors"
    os.truncate(file, file.stat().st_size - 64)


def norm_of(header):
    return next(entry for name, entry in header.items() if name.endswith("input_layernorm.weight"))


def insert_nan(target, drafter):
    def change(header, data):
        begin = norm_of(header)["data_offsets"][0]
        data[begin : begin + 4] = b"\xff\xff\xff\xff"  # NaN as BF16 and as FP32

    rewrite(target, change)


def wrong_dtype(target, drafter):
    def change(header, data):
        entry = norm_of(header)
        begin, end = entry["data_offsets"]
        size = (end - begin) // entry["shape"][0]
        entry["dtype"] = {2: "I16", 4: "I32"}[size]

    rewrite(target, change)


def no_weights(target, drafter):
    (drafter / "model.safetensors").unlink()


def other_drafter(target, drafter):
    config = json.loads((drafter / "config.json").read_text())
    config["vocab_size"] += 64
    (drafter / "config.json").write_text(json.dumps(config))


def moe(target, drafter):
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    config["model_type"] = "qwen3_5_moe"
    (target / "config.json").write_text(json.dumps(config))


def no_mask_token(target, drafter):
    write_tokenizer(target)


@pytest.mark.parametrize(
    "spoil",
    [corrupt_header, truncate, insert_nan, wrong_dtype, no_weights, other_drafter, moe, no_mask_token],
    ids=lambda spoil: spoil.__name__,
)
def test_a_bad_checkpoint_makes_no_bundle(refused, build_pair, pair, tmp_path, spoil):
    spoil(*pair)
    code, _ = refused(*build_pair)
    assert code == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("body", ["schema: 1\nname: x\nspeed: 9\n", "schema: 99\nname: x\n", "{"])
def test_a_bad_recipe_makes_no_bundle(refused, build_pair, tmp_path, body):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(body)
    code, line = refused(*build_pair, "--recipe", recipe)
    assert code == 4
    assert str(recipe) in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_recipe_lists_those_that_ship(refused, build_pair):
    code, line = refused(*build_pair, "--recipe", "fastest")
    assert code == 4
    assert "demo-cpu" in line


def test_a_shipped_recipe_goes_by_its_name(cli, build_pair):
    assert cli(*build_pair, "--recipe", "demo-cpu-drafter-bf16")[0] == 0


@pytest.mark.parametrize(("flag", "value"), [("--arch", "sm999"), ("--backend", "magic"), ("--backend", "tensorrt")])
def test_what_this_version_does_not_build_for_is_refused(refused, build_pair, flag, value, tmp_path):
    code, line = refused(*build_pair, flag, value)
    assert code == 7
    assert value in line
    assert not (tmp_path / "out").exists()


def test_what_is_at_the_output_is_not_overwritten(refused, build_pair, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert refused(*build_pair)[0] == 5
    assert refused(*build_pair, "--force")[0] == 5
    assert (tmp_path / "out" / "thesis.txt").read_text() == "x"


def test_a_full_disk_stops_a_build_and_is_survived(refused, cli, build_pair, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(file, data):
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", write)
        code, _ = refused(*build_pair)
    assert code == 5
    assert not (tmp_path / "out").exists()
    assert cli(*build_pair)[0] == 0
    assert not (tmp_path / "out.building").exists()


def test_control_c_during_a_build_is_one_line_and_the_build_resumes(refused, cli, build_pair, tmp_path, monkeypatch):
    @contextmanager
    def interrupted_after_the_first_report():
        def report(stage, done, total):
            if done:
                raise KeyboardInterrupt

        yield report

    with monkeypatch.context() as patch:
        patch.setattr(edge_dflash.cli.build, "stages", interrupted_after_the_first_report)
        code, line = refused(*build_pair)
    assert code == 130
    assert "interrupted" in line
    assert not (tmp_path / "out").exists()
    assert cli(*build_pair)[0] == 0


def newer_schema(bundle):
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["schema"] = 999
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def lose_file(bundle):
    next((bundle / "weights").iterdir()).unlink()


def flip_byte_of_manifest(bundle):
    file = bundle / "manifest.json"
    file.write_text(file.read_text().replace('"cpu"', '"cpv"'))


@pytest.mark.parametrize(
    "spoil", [flip_byte, newer_schema, lose_file, flip_byte_of_manifest], ids=lambda spoil: spoil.__name__
)
def test_a_damaged_bundle_is_refused(refused, ids_bundle, tmp_path, spoil):
    bundle = shutil.copytree(ids_bundle, tmp_path / "bundle")
    spoil(bundle)
    for argv in (["generate", bundle, "--ids", "1"], ["verify", bundle]):
        code, line = refused(*argv)
        assert code == 6
        assert str(bundle) in line
