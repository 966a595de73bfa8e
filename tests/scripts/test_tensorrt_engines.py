"""The measurement of TensorRT engines: every engine once, weights of the recipe's formats, one JSON object last."""

import json

import numpy as np
import pytest
from tensorrt_build_support import VERSION, FakeCompiler

from edge_dflash.backends.cuda.tensorrt.units import bundle_units, engine_units
from edge_dflash.bench.random_pair import synthetic_pair
from edge_dflash.model import pair_programs
from edge_dflash.weights.formats import Fp8Weight, Nvfp4Weight, WideWeight
from edge_dflash.weights.recipe import Recipe, default_recipe
from tests.scripts import tensorrt_engines
from tests.scripts.tensorrt_engines import PackedStore

PAIR = synthetic_pair("qwen3-8b")
W4A4 = Recipe("plans", target=default_recipe().target, drafter=default_recipe().drafter, activations="nvfp4")


def test_weights_have_the_recipes_formats_and_are_the_same_every_time():
    store = PackedStore(PAIR, W4A4)
    linear = store.get("target.layers.0.self_attn.k_proj")
    assert isinstance(linear, Nvfp4Weight)
    assert linear.shape == pair_programs(PAIR).weights["target.layers.0.self_attn.k_proj"].shape
    assert linear.input_scale
    assert not ((linear.block_scale & 0x7F) == 0x7F).any()
    assert np.array_equal(linear.packed, PackedStore(PAIR, W4A4).get("target.layers.0.self_attn.k_proj").packed)
    others = [
        store.get(f"target.layers.{at}") for at in ("0.self_attn.q_proj", "0.self_attn.v_proj", "1.self_attn.k_proj")
    ]
    scales = [(weight.global_scale, weight.input_scale) for weight in (linear, *others)]
    assert scales[0] == scales[1] == scales[2] != scales[3]  # as in a checkpoint, or no linears are stacked
    fc = store.get("drafter.fc")
    assert isinstance(fc, Fp8Weight)
    assert not ((fc.data & 0x7F) == 0x7F).any()
    assert isinstance(store.get("target.norm"), WideWeight)
    wide = PackedStore(PAIR, default_recipe()).get("target.layers.0.self_attn.k_proj")
    assert wide.input_scale is None


class Compiler(FakeCompiler):
    def lower(self, unit, store):
        made = super().lower(unit, type("None", (), {"get": lambda self, name: np.zeros(4, np.uint8)})())
        made.net.held[:] = [np.zeros(1000, np.uint8)]
        return made

    def build(self, lowered, advance=None):
        return super().build(lowered, lambda share: True)


@pytest.mark.parametrize("pair", ["qwen3-8b", "qwen3.6-27b"])
def test_every_plan_is_built_once_and_the_last_line_is_json(monkeypatch, capsys, pair):
    monkeypatch.setattr(tensorrt_engines, "Compiler", Compiler)
    monkeypatch.setattr(tensorrt_engines, "load", lambda flavour: type("Module", (), {"__version__": VERSION}))
    FakeCompiler.made, FakeCompiler.fail = [], ""
    assert tensorrt_engines.main(["--synthetic", pair, "--workers", "3"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    wanted = engine_units(bundle_units(synthetic_pair(pair), {}, 512).units)
    assert sorted(FakeCompiler.made) == sorted(unit.key for unit in wanted.values())
    assert (found["plans"], found["weight_bytes"], found["tensorrt"]) == (len(wanted), 1000 * len(wanted), VERSION)
    assert len(found["built"]) == len(wanted)


def test_a_plan_that_is_refused_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(tensorrt_engines, "Compiler", Compiler)
    FakeCompiler.made, FakeCompiler.fail = [], "head"
    assert tensorrt_engines.main(["--synthetic", "qwen3-8b"]) == 5
    assert "error: plan head for sm121" in capsys.readouterr().err
    FakeCompiler.fail = ""
