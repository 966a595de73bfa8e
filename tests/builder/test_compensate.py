"""Builds that compensate: by the inputs that calibration saw, killed and resumed; what is left to search; refusals."""

import os
import shutil

import numpy as np
import pytest
import torch
from builder_support import SHORT, Failing, add_tokenizer, config_of, copy_target, digests, recipe
from golden_pairs import EXPERTS, programs
from typer.testing import CliRunner

from edge_dflash.builder import write
from edge_dflash.builder.importance import SHRINK, inputs_file, shared_inputs
from edge_dflash.builder.write import build
from edge_dflash.bundle import parts
from edge_dflash.bundle.manifest import RoundingUse
from edge_dflash.bundle.parts import building_path
from edge_dflash.bundle.reader import Bundle
from edge_dflash.cli import app
from edge_dflash.errors import BuildError
from edge_dflash.model.ops import Linear
from edge_dflash.weights.compensate import Compensated, feedback
from edge_dflash.weights.quantize import fused_group, quantize_nvfp4, wide_tensor
from edge_dflash.weights.rounding import Search

HEAD = "target.lm_head"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return add_tokenizer(copy_target("qwen3_5", tmp_path_factory.mktemp("target") / "target"), 512)


@pytest.fixture(scope="module")
def config(target, tmp_path_factory):
    path = recipe(tmp_path_factory.mktemp("recipe"), SHORT + "rounding: compensated\n")
    return lambda output, **changes: config_of("qwen3_5", output, target=target, recipe=path, **changes)


@pytest.fixture(scope="module")
def stopped(config, tmp_path_factory):
    """A build that stopped before its manifest was written, with what only a build needs."""
    output = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write.WorkDir, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(BuildError, match="resume with"):
            build(config(output))
    return output


@pytest.fixture(scope="module")
def built(config, tmp_path_factory):
    return Bundle.open(build(config(tmp_path_factory.mktemp("built") / "out")).bundle)


def copied(stopped, tmp_path):
    """The stopped build under another output."""
    shutil.copytree(building_path(stopped), building_path(tmp_path / "out"))
    return tmp_path / "out", building_path(tmp_path / "out") / "bundle"


def test_linears_that_read_the_same_share_their_inputs():
    ops = [op for op in programs("qwen3_5").prefill.ops if isinstance(op, Linear)]
    found = shared_inputs(programs("qwen3_5").prefill, {op.weight for op in ops})
    assert set(found) == {op.weight for op in ops if op.weight.startswith("target.")}
    assert found[HEAD] == HEAD
    for name, first in found.items():
        assert found[first] == first
        assert first.rpartition(".")[0] == name.rpartition(".")[0]
        assert all(found[member] == first for member in fused_group(name))
    assert "target.layers.0.mlp.gate_proj" in found
    assert not any("expert" in name for name in shared_inputs(programs(EXPERTS).prefill, programs(EXPERTS).weights))
    assert shared_inputs(programs("qwen3_5").prefill, ()) == {}


def test_a_build_rounds_the_target_by_the_inputs_that_it_kept(config, stopped, built, tmp_path):
    use = built.manifest.rounding
    assert use == RoundingUse("compensated", built.manifest.weight_summary["nvfp4"], 0, 64)
    decided, folder = write.decide(config(tmp_path / "out")), building_path(stopped) / "bundle"
    kept = {inputs_file(name) for name in decided.scales.compensated.values()}
    assert kept == {path.name for path in folder.glob("*.inputs")}
    importance = write._measured(decided, lambda *_: None)[1]
    for name, first in decided.scales.compensated.items():
        rows = np.fromfile(folder / inputs_file(first), np.uint16).reshape(64, -1)
        x = torch.from_numpy(rows).view(torch.bfloat16)
        squares = x.double().square().mean(0)
        np.testing.assert_allclose(importance[name], (squares / squares.mean() + SHRINK), rtol=1e-4, err_msg=name)
        search = Search(torch.from_numpy(importance[name]))
        if len(fused_group(name)) == 1:
            wide = wide_tensor(decided.store.get(name))
            wanted = quantize_nvfp4(wide, None, Compensated(search, feedback(x)))
            assert built.get(name).packed.tobytes() == wanted.packed.tobytes()
            assert built.get(name).packed.tobytes() != quantize_nvfp4(wide, None, search).packed.tobytes()
    drafter = "drafter.layers.2.self_attn.o_proj"
    wide, search = wide_tensor(decided.store.get(drafter)), Search(torch.from_numpy(importance[drafter]))
    assert built.get(drafter).packed.tobytes() == quantize_nvfp4(wide, None, search).packed.tobytes()
    assert not list(built.path.rglob("*.inputs"))


def test_a_factor_is_made_once_for_linears_that_share_an_input(config, tmp_path, monkeypatch):
    made, decided = [], write.decide(config(tmp_path / "out"))
    monkeypatch.setattr(write, "feedback", lambda x: (made.append(x.shape), feedback(x))[1])
    build(config(tmp_path / "out"))
    assert len(made) == len(set(decided.scales.compensated.values())) < len(decided.scales.compensated)


@pytest.mark.parametrize("at", [5, 19, 40])
def test_a_resumed_build_has_the_bytes_of_one_that_was_not_stopped(built, config, tmp_path, monkeypatch, at):
    """Failures while inputs are kept, right behind them, and while weights are written."""
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", Failing(at))
        with pytest.raises(BuildError, match="is full"):
            build(config(tmp_path / "out"))
    assert digests(build(config(tmp_path / "out")).bundle) == digests(built.path)


@pytest.mark.parametrize("damage", ["lost", "other", "whole"])
def test_inputs_are_measured_again_unless_they_are_as_they_were_written(
    stopped, built, config, tmp_path, monkeypatch, damage
):
    output, folder = copied(stopped, tmp_path)
    path, runs, original = folder / inputs_file(HEAD), [], write.measure_scales
    for weights in folder.rglob("*.safetensors"):
        if weights.parent.name == "weights":
            weights.unlink()
    kept = path.read_bytes()
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes({"other": kept[:-2] + b"\0\0", "whole": kept}[damage])
    monkeypatch.setattr(write, "measure_scales", lambda *args: (runs.append(1), original(*args))[1])
    assert digests(build(config(output)).bundle) == digests(built.path)
    assert len(runs) == (damage != "whole")


def test_without_calibration_it_is_search_and_said(target, config, tmp_path):
    decided = write.decide(config(tmp_path / "out", calibrate=False))
    assert decided.manifest.rounding.by == "search"
    assert any("search, not compensation" in warning for warning in decided.warnings)
    assert decided.scales.kept_bytes(decided.programs.weights) == 0
    assert not any("of inputs" in line for line in decided.lines)
    searched = write.decide(config(tmp_path / "out", rounding="search"))
    assert searched.scales.compensated == {}
    assert searched.warnings == write.decide(config(tmp_path / "out")).warnings


def test_what_does_not_fit_is_refused_before_anything_is_made(config, tmp_path, monkeypatch):
    decided = write.decide(config(tmp_path / "out"))
    weights = decided.programs.weights
    names = set(decided.scales.compensated.values())
    needed = decided.scales.kept_bytes(weights)
    assert needed == sum(64 * 2 * weights[name].shape[1] for name in names)
    assert f"keeping {needed / 1e6:,.1f} MB of inputs beside the output until the build ends" in decided.lines
    usage, asked = shutil.disk_usage(tmp_path), []

    def free(path):
        asked.append(path)
        return usage._replace(free=room)

    monkeypatch.setattr(shutil, "disk_usage", free)
    room = 0
    with pytest.raises(BuildError, match=rf"MB more \({needed / 1e6:,.1f} MB of inputs until it is built: --rounding"):
        write.decide(config(tmp_path / "out"))
    with pytest.raises(BuildError, match=r"MB more in .*MB free") as without:
        write.decide(config(tmp_path / "out", rounding="search"))
    room = int(float(str(without.value).split(" MB more")[0].rpartition(" ")[2].replace(",", "")) * 1e6) + needed // 2
    write.decide(config(tmp_path / "out", rounding="search"))
    with pytest.raises(BuildError, match="MB of inputs"):
        write.decide(config(tmp_path / "out"))
    room = usage.free
    monkeypatch.setattr(os, "sysconf", lambda name: 16 if name == "SC_PHYS_PAGES" else 4096)
    with pytest.raises(BuildError, match=r"inputs, 64 calibration tokens\) needs 0.0 GB of memory.*--rounding search"):
        write.decide(config(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_inspect_says_what_was_compensated(built):
    shown = CliRunner().invoke(app, ["inspect", str(built.path)])
    use = built.manifest.rounding
    assert f"rounding: {use.rounded} weights by compensated (drafter and experts by search), weighted" in shown.stdout
