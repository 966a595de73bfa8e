"""Importance against direct computation, and builds that round by it: killed and resumed, not shipped."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builder_support import DRAFTERS, SHORT, Failing, add_tokenizer, config_of, copy_target, digests, recipe
from golden_pairs import EXPERTS, FLOAT32, NAMES, pair, programs, store
from typer.testing import CliRunner

from edge_dflash.backends.reference.dense import TorchWeights
from edge_dflash.backends.reference.interpreter import Interpreter, Memory
from edge_dflash.builder import write
from edge_dflash.builder.importance import FILE, PRIOR, SHRINK, Moments, dump_importance, load_importance
from edge_dflash.builder.scales import calibrate
from edge_dflash.builder.write import build
from edge_dflash.bundle import parts
from edge_dflash.bundle.manifest import RoundingUse
from edge_dflash.bundle.parts import building_path, write_file
from edge_dflash.bundle.reader import Bundle
from edge_dflash.cli import app
from edge_dflash.errors import BuildError
from edge_dflash.model.ops import Experts as ExpertsOp
from edge_dflash.model.ops import Linear
from edge_dflash.weights.formats import WideWeight
from edge_dflash.weights.quantize import dequantize, quantize_nvfp4, wide_tensor
from edge_dflash.weights.rounding import Search

IDS = tuple(int(i) for i in np.random.default_rng(0).integers(0, 511, 40))
HEAD = "target.lm_head"


def observed(name, ids=IDS):
    """Inputs of every linear, rows of all passes together: the untouched Programs, tile by tile; the head's apart."""
    seen = {}

    def observe(op, role, values):
        if isinstance(op, Linear) and op.weight != HEAD:
            seen.setdefault(op.weight, []).append(values.double())
        if isinstance(op, ExpertsOp):
            seen.setdefault((op.router, role), []).append(values)

    passes, block = programs(name), pair(name).drafter
    interpreter = Interpreter(TorchWeights(store(name)), FLOAT32)
    memory = Memory.allocate(passes.states, 64, FLOAT32, lambda _: (1.0, 1.0))
    head = next(op for op in passes.verify.ops if isinstance(op, Linear) and op.weight == HEAD)
    found = interpreter.run(passes.verify, ids, memory, want=(head.inputs[0],))
    seen[HEAD] = [found[head.inputs[0]].double()]
    memory.clear()
    interpreter.run(passes.prefill, ids, memory, observer=observe)
    if block:
        memory.length = 39
        draft = [ids[39]] + [block.mask_token_id] * (block.block_size - 1)
        interpreter.run(passes.propose, draft, memory, observer=observe)
    return seen


def measured(name, linears, ids=IDS, source=None):
    moments = Moments(linears)
    calibrate(pair(name), source or store(name), ids, proposals=1, activations="float32", moments=moments)
    return moments.result()


def shrunk(squares):
    return squares / squares.mean() + SHRINK


@pytest.mark.parametrize("name", NAMES)
def test_importance_is_the_mean_square_of_each_input_in_both_passes(name):
    seen = observed(name)
    found = measured(name, seen)
    assert found.keys() == seen.keys()
    for linear, rows in seen.items():
        wanted = shrunk(torch.cat(rows).square().mean(0)).numpy()
        assert found[linear].dtype == np.float32
        np.testing.assert_allclose(found[linear], wanted, rtol=2e-3, err_msg=linear)


def test_the_head_is_measured_on_every_row_and_never_read():
    class Watched:
        def __init__(self):
            self.read, self.kv_scale = set(), store("qwen3_5").kv_scale

        def get(self, name):
            self.read.add(name)
            return store("qwen3_5").get(name)

    watched = Watched()
    assert set(measured("qwen3_5", (HEAD, "drafter.layers.2.mlp.down_proj"), source=watched)) == {
        HEAD,
        "drafter.layers.2.mlp.down_proj",
    }
    assert HEAD not in watched.read
    alone = Watched()
    measured("qwen3_5", ("target.layers.0.mlp.down_proj",), source=alone)
    assert "target.norm" not in alone.read  # what nobody measures is not computed


def test_experts_share_their_input_and_have_the_rows_that_chose_them():
    name, layer = EXPERTS, "target.layers.1.mlp"
    block = next(op for op in programs(name).prefill.ops if isinstance(op, ExpertsOp) and layer in op.router)
    wanted = [*block.gates, *block.ups, *block.downs, *block.shared[:3]]
    ids = tuple(one % 190 for one in IDS)
    found = measured(name, wanted, ids)
    assert found.keys() == {f"{layer}.experts", *block.downs, *block.shared[:3]}
    seen = observed(name, ids)
    x, chosen = (torch.cat(seen[block.router, role]) for role in ("x", "experts"))
    np.testing.assert_allclose(found[f"{layer}.experts"], shrunk(x.double().square().mean(0)), rtol=2e-3)
    np.testing.assert_array_equal(found[f"{layer}.experts"], found[block.shared.gate])
    weights = TorchWeights(store(name), row_tile=None)

    def squares(gate, up, down, rows):
        hidden = torch.nn.functional.silu(weights.linear(x[rows], gate)) * weights.linear(x[rows], up)
        return hidden.double().square().sum(0)

    every = torch.ones(len(x), dtype=torch.bool)
    np.testing.assert_allclose(found[block.shared.down], shrunk(squares(*block.shared[:3], every)), rtol=2e-3)
    mine = [(chosen == expert).any(-1) for expert in range(len(block.downs))]
    sums = [squares(*names, rows) for *names, rows in zip(block.gates, block.ups, block.downs, mine, strict=True)]
    mean = sum(sums) / sum(int(rows.sum()) for rows in mine)
    assert any(not rows.any() for rows in mine) or min(int(rows.sum()) for rows in mine) < 20
    for down, own in zip(block.downs, sums, strict=True):
        np.testing.assert_allclose(found[down], shrunk(own + PRIOR * mean), rtol=2e-3, err_msg=down)


def test_damage_is_named_and_what_was_never_seen_has_no_importance(tmp_path):
    moments = Moments(("a", "b", "c", "d"))
    moments.add("a", torch.tensor([[1e19, 1.0]]))
    moments.add("b", torch.zeros(4, 2))
    moments.add("c", torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
    found = moments.result()
    assert found.keys() == {"a", "c"}
    np.testing.assert_allclose(found["a"], [2 + SHRINK, SHRINK], rtol=1e-6)  # no overflow
    np.testing.assert_allclose(found["c"], [2 / 6 + SHRINK, 10 / 6 + SHRINK], rtol=1e-6)
    write_file(tmp_path / FILE, dump_importance(found))
    assert {name: h.tolist() for name, h in load_importance(tmp_path / FILE).items()} == {
        name: h.tolist() for name, h in found.items()
    }
    for bad, said in (("3e38", "inf"), ("nan", "nan")):
        moments.add("d", torch.tensor([[float(bad), 1.0]]))
        with pytest.raises(BuildError, match=f"calibration found {said} in what d reads"):
            moments.result()
    write_file(tmp_path / FILE, dump_importance({}))
    assert load_importance(tmp_path / FILE) == {}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A golden target with a tokenizer, so that builds calibrate."""
    return add_tokenizer(copy_target("qwen3_5", tmp_path_factory.mktemp("target") / "target"), 512)


@pytest.fixture(scope="module")
def config(target, tmp_path_factory):
    path = recipe(tmp_path_factory.mktemp("recipe"), SHORT)
    return lambda output, **changes: config_of("qwen3_5", output, target=target, recipe=path, **changes)


@pytest.fixture(scope="module")
def built(config, tmp_path_factory):
    return Bundle.open(build(config(tmp_path_factory.mktemp("built") / "search")).bundle)


def test_a_build_rounds_by_what_it_measured_and_says_so(built, config, tmp_path):
    assert not list(built.path.rglob(FILE))
    counts = built.manifest.weight_summary
    assert built.manifest.rounding == RoundingUse("search", counts["nvfp4"], 0, 64)
    decided = write.decide(config(tmp_path / "out"))
    importance = write._measured(decided, lambda *_: None)[1]
    for name in (HEAD, "target.layers.0.mlp.down_proj", "drafter.layers.2.self_attn.o_proj"):
        wide = wide_tensor(decided.store.get(name))
        search = Search(torch.from_numpy(importance[name]))
        assert built.get(name).packed.tobytes() == quantize_nvfp4(wide, None, search).packed.tobytes()
        assert built.get(name).packed.tobytes() != quantize_nvfp4(wide, None, Search()).packed.tobytes()


def test_max_is_what_it_was_without_a_search(built, config, tmp_path):
    option = Bundle.open(build(config(tmp_path / "out", rounding="max")).bundle)
    asked = recipe(tmp_path, SHORT + "rounding: max\n")
    named = Bundle.open(build(replace(config(tmp_path / "named"), recipe=asked)).bundle)
    assert digests(option.path) == digests(named.path)
    assert option.manifest.rounding is None
    assert json.loads((option.path / "manifest.json").read_text())["schema"] == 1
    source = write.decide(config(tmp_path / "other")).store
    for name, form in option.manifest.weights.items():
        if form == "nvfp4" and "down_proj" in name:
            plain = quantize_nvfp4(wide_tensor(source.get(name)))
            assert option.get(name).packed.tobytes() == plain.packed.tobytes()
            assert option.get(name).block_scale.tobytes() == plain.block_scale.tobytes()
            assert option.get(name).packed.tobytes() != built.get(name).packed.tobytes()
    assert option.manifest.kv_scales == built.manifest.kv_scales


def test_the_option_is_read_and_refused(tmp_path):
    given = config_of("qwen3", tmp_path / "out")
    words = ["build", "--target", str(given.target), "--output", str(given.output), "--rounding"]
    refused = CliRunner().invoke(app, [*words, "luck"])
    assert refused.exit_code != 0
    assert not given.output.exists()
    assert CliRunner().invoke(app, [*words, "max"]).exit_code == 0
    assert Bundle.open(given.output).manifest.rounding is None


def test_a_search_calibrates_even_where_every_scale_is_known(target, tmp_path):
    wide = recipe(tmp_path, SHORT + "kv: bf16\n")
    config = config_of("qwen3_5", tmp_path / "out", target=target, recipe=wide)
    assert len(write.decide(config).scales.ids) == 64
    off = write.decide(config_of("qwen3_5", tmp_path / "out", target=target, recipe=wide, calibrate=False))
    assert (off.scales.ids, off.scales.moments, off.manifest.rounding.tokens) == ((), (), 0)
    assert off.warnings == ()


def test_weights_of_the_checkpoint_are_counted_apart(tmp_path):
    bundle = Bundle.open(build(config_of("modelopt", tmp_path / "out")).bundle)
    use = bundle.manifest.rounding
    assert 0 < use.kept < bundle.manifest.weight_summary["nvfp4"] + 1
    assert use.rounded + use.kept == sum(form in ("nvfp4", "fp8") for form in bundle.manifest.weights.values()) - 1
    assert use.tokens == 0


@pytest.mark.parametrize("at", [1, 2, 9, 30, 60, 100])
def test_a_resumed_build_has_the_bytes_of_one_that_was_not_stopped(built, config, tmp_path, monkeypatch, at):
    """Failures while importance is written, between it and the scales, and behind both, where it is read again."""
    runs = []
    original = write.measure_scales
    monkeypatch.setattr(write, "measure_scales", lambda *args: (runs.append(1), original(*args))[1])
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", Failing(at))
        with pytest.raises(BuildError, match="is full"):
            build(config(tmp_path / "out"))
    kept = building_path(tmp_path / "out") / "bundle"
    again = not ((kept / FILE).exists() and (kept / "calibration.json").exists())
    assert digests(build(config(tmp_path / "out")).bundle) == digests(built.path)
    assert len(runs) == 1 + again


def test_importance_of_another_build_is_not_taken_up(built, config, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_bytes", Failing(100))
        with pytest.raises(BuildError):
            build(config(tmp_path / "out", rounding="max"))
        patch.setattr(parts, "write_bytes", Failing(100))
        with pytest.raises(BuildError):
            build(config(tmp_path / "out", max_context=512))
    path = building_path(tmp_path / "out") / "bundle" / FILE
    damaged = path.read_bytes()
    path.write_bytes(damaged[:-4] + b"\0\0\0\x40")
    assert digests(build(config(tmp_path / "out")).bundle) == digests(built.path)


def test_killed_builds_that_calibrate_come_to_the_same_bytes(target, built, config, tmp_path):
    program = [sys.executable, Path(__file__).parents[1] / "support" / "kill_builds.py", target, DRAFTERS["qwen3_5"]]
    short = config(tmp_path / "out").recipe
    run = subprocess.run([*program, tmp_path / "out", "2", "3", short], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout) >= 1
    assert built.manifest.rounding.tokens == 64
    assert digests(tmp_path / "out") == digests(built.path)


def test_a_weight_that_damages_what_linears_read_is_refused():
    name = "target.layers.1.mlp.up_proj"
    damaged = dequantize(store("qwen3").get(name)).numpy().copy()
    damaged[0, 0] = np.inf

    class Damaged:
        kv_scale = store("qwen3").kv_scale

        def get(self, asked):
            return WideWeight(damaged) if asked == name else store("qwen3").get(asked)

    with pytest.raises(BuildError, match=r"calibration found (inf|nan)"):
        measured("qwen3", ("target.layers.1.mlp.down_proj",), source=Damaged())
